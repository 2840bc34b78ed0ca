"""A GGUF's metadata as the model whose experts are simulated."""

import json
from pathlib import Path

import pytest

from kvasir_core import ScenarioError
from kvasir_scenario.load import load_text
from kvasir_sim.cli import main
from tests.rt.tiny_models import TinyModel, write_tiny_model
from tests.sim.swarm.swarms import LAN, Run


def document(model: dict[str, object]) -> str:
    return json.dumps(
        {
            "name": "file", "model": model,
            "ring": {"stages": 2, "row_width": 64, "micro_batch_width": 8, "kv_tokens": 8192},
            "costs": {"kind": "fixed", "pass_s": 0.1},
            "workload": {
                "kind": "closed", "users": 2, "prompt_tokens": 8, "output_tokens": 4,
                "duration_s": 5,
            },
            "experts": {"workers": [LAN]}, "run": {"horizon_s": 10},
        }
    )  # fmt: skip


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    shape = TinyModel(architecture="qwen3moe", layers=4, experts=16, experts_used=4, expert_ffn=32)
    return write_tiny_model(tmp_path / "tiny.gguf", shape)


def test_layers_experts_and_their_bytes_come_from_the_file(model_file: Path) -> None:
    run = Run(load_text(document({"path": model_file.name}), base=model_file.parent))
    numbers = run.swarm.numbers
    assert numbers.layers == (0, 1, 2, 3)
    assert (numbers.experts, numbers.top_k) == (16, 4)
    assert numbers.expert_bytes == 3 * 64 * 32 * 2
    assert numbers.row_bytes == 64 * 2


def test_keys_of_the_scenario_win_over_the_file(model_file: Path) -> None:
    model = {"path": model_file.name, "experts_used": 2}
    run = Run(load_text(document(model), base=model_file.parent))
    assert (run.swarm.numbers.experts, run.swarm.numbers.top_k) == (16, 2)


def test_a_dense_file_has_no_experts_to_simulate(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "dense.gguf", TinyModel(architecture="llama"))
    with pytest.raises(ScenarioError, match=r"experts\.model: experts is missing"):
        Run(load_text(document({"path": "dense.gguf"}), base=tmp_path))


def test_a_file_that_is_no_model_is_an_error_of_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.gguf").write_text("<html>")
    scenario = tmp_path / "s.yaml"
    scenario.write_text(document({"path": "page.gguf"}))
    with pytest.raises(SystemExit) as stop:
        main([str(scenario), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert "s.yaml:1: model.path:" in shown
    assert "page.gguf" in shown
