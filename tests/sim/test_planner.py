"""The planner on whole scenarios: against every split and order, and against the simulator."""

import itertools
import json
import os
from pathlib import Path

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_core.plan import Plan
from kvasir_scenario.load import load_text
from kvasir_scenario.planning import plan_of
from kvasir_scenario.schema import Scenario
from kvasir_sim.cli import main
from kvasir_sim.costs import build_costs
from kvasir_sim.links import build_links
from kvasir_sim.plan_reasons import plan_yaml, planned_scenario
from kvasir_sim.planner import PlannedRing, auto_layers, plan_scenario
from kvasir_sim.run import run
from tests.sim.profile_inputs import PROFILE
from tests.sim.shipped import ROOT

LOAD = "workload: {kind: closed, users: 24, prompt_tokens: 60, output_tokens: 120, requests: 240}\n"
SPEEDS = (
    "model: {layers: 12}\n"
    "ring: {micro_batch_width: 8, layers: auto, stages: [{pass_s_per_layer: 0.004}, "
    "{pass_s_per_layer: 0.001}, {pass_s_per_layer: 0.002}]}\n"
    "costs: {kind: fixed}\n"
)
GPUS = (
    "model: {preset: llama-3-8b, layers: 9, context: 2048}\n"
    "devices: {big: {preset: h100-sxm}, old: {preset: a100-40g}, home: {preset: rtx4090}}\n"
    "ring: {layers: auto, stages: [{device: home}, {device: old}, {device: big}], "
    "micro_batch_width: 8, row_width: 128, kv_tokens: 8192, window: 3}\n"
    "costs: {kind: roofline}\n"
)


def load(text: str, extra: str = LOAD) -> Scenario:
    return load_text(text + extra, label="plan.yaml", planner=auto_layers)


def true_holds(scenario: Scenario, planned: PlannedRing) -> list[int]:
    """The holds of the average micro-batch by the cost model itself, not by the planner."""
    plan = plan_of(scenario, auto_layers)
    return list(build_costs(scenario, plan).holds(planned.reference.micro_batch))


def every_ring(
    scenario: Scenario, planned: PlannedRing
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
    """Longest hold of every order and split, by the cost model itself."""
    stages = scenario.ring.stages
    assert not isinstance(stages, int)
    total = scenario.model.layers
    found = {}
    for order in itertools.permutations(range(len(stages))):
        for cuts in itertools.combinations(range(1, total), len(stages) - 1):
            edges = (0, *cuts, total)
            layers = tuple(itertools.pairwise(edges))
            ring = scenario.ring.model_copy(
                update={
                    "stages": tuple(
                        stages[place].model_copy(update={"layers": pair})
                        for place, pair in zip(order, layers, strict=True)
                    )
                }
            )
            other = scenario.model_copy(update={"ring": ring})
            found[order, edges] = max(true_holds(other, planned))
    return found


@pytest.mark.parametrize("text", [SPEEDS, GPUS], ids=["fixed", "roofline"])
def test_no_order_and_no_split_has_a_shorter_longest_hold(text: str) -> None:
    scenario = load(text)
    planned = plan_scenario(scenario)
    best = min(every_ring(scenario, planned).values())
    assert max(true_holds(planned_scenario(scenario, planned), planned)) == best
    assert max(planned.holds_ns) == pytest.approx(best, abs=2)


@pytest.mark.parametrize("text", [SPEEDS, GPUS], ids=["fixed", "roofline"])
def test_the_predicted_holds_are_those_of_the_cost_model(text: str) -> None:
    scenario = load(text)
    planned = plan_scenario(scenario)
    holds = true_holds(planned_scenario(scenario, planned), planned)
    assert list(planned.holds_ns) == pytest.approx(holds, abs=2)


def tokens_per_s(scenario: Scenario) -> float:
    rate = run(scenario, None).report.throughput.output_tokens_per_s
    assert rate is not None
    return rate


def test_the_plan_beats_the_even_split_by_what_it_predicted() -> None:
    """Three stages of unequal speed: the gain within a tenth, start and end of the run included."""
    scenario = load(SPEEDS)
    planned = plan_scenario(scenario)
    assert planned.even_ns is not None
    predicted = max(planned.even_ns) / planned.longest_ns
    even = load(SPEEDS.replace("layers: auto", "layers: even"))
    gain = tokens_per_s(planned_scenario(scenario, planned)) / tokens_per_s(even)
    assert predicted == pytest.approx(2.0)
    assert gain == pytest.approx(predicted, rel=0.1)


def test_the_predicted_rate_is_what_the_simulator_gives() -> None:
    scenario = load(GPUS)
    planned = plan_scenario(scenario)
    assert tokens_per_s(planned_scenario(scenario, planned)) == pytest.approx(
        planned.tokens_per_s, rel=0.15
    )


def test_a_stage_slowed_for_the_whole_run_gets_fewer_layers() -> None:
    text = (
        "model: {layers: 30}\nring: {stages: 2, layers: auto}\n"
        "costs: {kind: fixed, pass_s_per_layer: 0.001}\n"
        "faults: [{kind: stage_slow, stage: 0, factor: 2, at_s: 0, for_s: 1e6}]\n"
    )
    assert plan_scenario(load(text)).layers == ((0, 10), (10, 30))
    assert plan_scenario(load(text.replace("1e6", "5"))).layers == ((0, 15), (15, 30))


def test_the_tails_output_matrix_is_worth_layers() -> None:
    text = (
        "model: {preset: qwen2.5-7b, context: 2048}\ndevices: {gpu: {preset: l40s}}\n"
        "ring: {stages: 2, device: gpu, layers: auto, kv_tokens: 20000}\ncosts: {kind: roofline}\n"
    )
    head, tail = (stop - start for start, stop in plan_scenario(load(text)).layers)
    assert head + tail == 28
    assert head - tail in {2, 3, 4}  # 545 million parameters beside 233 million a layer, shared.


def test_memory_counts_against_speed() -> None:
    """The fast card is too small for its fair share, so the slow one takes the rest."""
    text = (
        "model: {preset: llama-3-8b}\n"
        "devices: {fast: {preset: h200, memory_bytes: 6e9}, slow: {preset: l40s}}\n"
        "ring: {stages: [{device: fast}, {device: slow}], layers: auto, kv_tokens: 16384}\n"
        "costs: {kind: roofline}\n"
    )
    scenario = load(text)
    planned = plan_scenario(scenario)
    count = {
        stage.device: b - a for stage, (a, b) in zip(planned.stages, planned.layers, strict=True)
    }
    per_layer = 436_224_000 + 16384 * 4096
    assert count["fast"] == (6_000_000_000 - 1_050_673_152) // per_layer
    assert planned.even_ns is None or max(planned.even_ns) >= max(planned.holds_ns)
    build_costs(*resolved(scenario, planned))  # It really fits.
    with pytest.raises(ScenarioError, match=r"ring\.stages: no split fits: .* of 32 layers"):
        plan_scenario(load(text.replace("l40s}", "l40s, memory_bytes: 9e9}")))


def rebuilt(scenario: Scenario) -> tuple[Scenario, Plan]:
    return scenario, plan_of(scenario)


def resolved(scenario: Scenario, planned: PlannedRing) -> tuple[Scenario, Plan]:
    return rebuilt(planned_scenario(scenario, planned))


def test_kv_is_all_that_fits_at_the_scarcest_stage() -> None:
    text = GPUS.replace(", kv_tokens: 8192", "")
    planned = plan_scenario(load(text))
    made, plan = resolved(load(text), planned)
    assert planned.kv_tokens is not None
    assert planned.kv_tokens % 16 == 0
    assert set(plan.kv_tokens) == {planned.kv_tokens}
    build_costs(made, plan)
    assert planned.kv_tokens == 24 * 2048  # All users at full context: memory is no limit here.
    small = text.replace("preset: rtx4090}", "preset: rtx4090, memory_bytes: 3e9}")
    crowd = load(small, LOAD.replace("users: 24", "users: 240"))
    planned = plan_scenario(crowd)
    assert planned.kv_tokens is not None
    assert planned.kv_tokens < 240 * 2048
    made, plan = resolved(crowd, planned)
    build_costs(made, plan)
    more = made.ring.model_copy(update={"kv_tokens": planned.kv_tokens + 16})
    with pytest.raises(ScenarioError, match=r"at most \d+ KV tokens fit"):
        build_costs(*rebuilt(made.model_copy(update={"ring": more})))


def test_the_window_covers_a_lap_with_its_links() -> None:
    text = (
        "model: {layers: 8}\nring: {stages: 4, layers: auto, micro_batch_width: 4, LINK}\n"
        "costs: {kind: fixed, pass_s_per_layer: 0.005}\n"
    )
    near = load(text.replace("LINK", "link: {latency_s: 0}"))
    far = load(text.replace("LINK", "link: {latency_s: 0.01}"))
    assert plan_scenario(near).window == 4
    assert plan_scenario(far).window == 8  # Each of four links takes as long as a stage.
    given = load(text.replace("LINK", "window: 3"))
    assert plan_scenario(given).window == 3


def test_a_slow_link_is_named_as_the_limit() -> None:
    text = GPUS.replace("window: 3", "link: {bandwidth_bytes_per_s: 2e6}")
    planned = plan_scenario(load(text))
    assert planned.longest_ns == max(planned.links_ns) > max(planned.holds_ns)
    assert any(sentence.startswith("link-bound: hop 0") for sentence in planned.why)


def test_sending_that_occupies_a_stage_costs_it_layers() -> None:
    text = (
        "model: {layers: 20, hidden: 1000, dtype: float32}\n"
        "ring: {stages: 2, layers: auto, micro_batch_width: 8, "
        "link: {bandwidth_bytes_per_s: 4.8e6, occupies_sender: true}, return_link: {}}\n"
        "costs: {kind: fixed, pass_s_per_layer: 0.001}\n"
    )
    planned = plan_scenario(load(text))
    assert planned.reference.rows == 12  # 8 decodes and their prompt rows: 48,000 bytes, 10 ms.
    assert planned.layers == ((0, 5), (5, 20))


def test_an_order_given_by_links_or_faults_is_kept() -> None:
    linked = GPUS.replace("window: 3", "window: 3, links: [{latency_s: 0.1}, {}]")
    slowed = GPUS + "faults: [{kind: stage_slow, stage: 0, factor: 2, at_s: 1, for_s: 1}]\n"
    for text in (linked, slowed):
        planned = plan_scenario(load(text))
        assert planned.order == (0, 1, 2)
        assert any(sentence.startswith("order kept: ") for sentence in planned.why)


def test_what_the_scenario_states_is_kept() -> None:
    planned = plan_scenario(load(GPUS))
    assert (planned.window, planned.row_width, planned.micro_batch_width) == (3, 128, 8)
    assert planned.kv_tokens is None


def test_free_widths_are_chosen_for_the_load_and_the_slo() -> None:
    text = GPUS.replace("micro_batch_width: 8, row_width: 128, ", "").replace(", window: 3", "")
    free = plan_scenario(load(text))
    assert free.micro_batch_width == -(-24 // free.window)
    assert free.row_width in {64, 128, 256, 512, 1024}
    hurried = plan_scenario(load(text + "slo: {tpot_s: 0.0001}\n"))
    assert hurried.row_width == 64


def test_a_written_plan_is_a_scenario_with_the_same_plan() -> None:
    scenario = load(GPUS)
    planned = plan_scenario(scenario)
    text = plan_yaml(scenario, planned)
    again = load_text(text, label="again.yaml")
    assert again == planned_scenario(scenario, planned)
    assert plan_of(again).layers == planned.layers
    for sentence in planned.why:
        assert f"# - {sentence}\n" in text


def test_layers_auto_keeps_order_and_widths() -> None:
    scenario = load(GPUS)
    plan = plan_of(scenario, auto_layers)
    assert plan.row_width == 128
    assert [stop - start for start, stop in plan.layers] != [3, 3, 3]
    holds = every_ring(scenario, plan_scenario(scenario))
    best = min(hold for (order, _), hold in holds.items() if order == (0, 1, 2))
    chosen = (0, *(stop for _, stop in plan.layers))
    assert holds[(0, 1, 2), chosen] == best


def test_a_profile_plans_by_measured_head_and_tail(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps(PROFILE))
    text = (
        "model: {layers: 30, hidden: 576, dtype: float32}\n"
        "ring: {stages: 2, layers: auto}\n"
        f"costs: {{kind: profile, file: {file}}}\n"
    )
    scenario = load(text)
    planned = plan_scenario(scenario)
    assert planned.micro_batch_width <= 8  # The profile knows no more decodes.
    assert planned.row_width <= 64
    made, plan = resolved(scenario, planned)
    holds = list(build_costs(made, plan).holds(planned.reference.micro_batch))
    assert list(planned.holds_ns) == pytest.approx(holds, abs=40)
    assert planned.layers[0][1] > 15  # The tail's extra outweighs the head's.
    assert build_links(made, plan)[0].latency_ns == 100_000


def test_the_command_says_why_and_writes_a_scenario_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "three.yaml"
    path.write_text(SPEEDS + LOAD)
    planned = tmp_path / "planned.yaml"
    main(["plan", str(path)])
    out = capsys.readouterr().out
    assert "- layers 2, 7, 3: " in out
    assert "stage 1: layers [2, 9), " in out
    assert "Nothing was written" in out
    assert list(tmp_path.iterdir()) == [path], "no file that nobody asked for"
    for _ in range(2):  # Its own file is replaced.
        main(["plan", str(path), "--out", str(planned)])
    assert "  layers: even" not in planned.read_text()
    assert f"Plan: {planned}" in capsys.readouterr().out
    main(["plan", str(planned), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["layers"] == [[0, 2], [2, 9], [9, 12]]
    assert sorted(tmp_path.iterdir()) == [planned, path]


def test_the_command_refuses_to_overwrite_its_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "three.yaml"
    path.write_text(SPEEDS + LOAD)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(path), "--out", str(path)])
    assert "is the scenario itself" in capsys.readouterr().err
    assert path.read_text() == SPEEDS + LOAD


def test_the_command_prints_yaml_alone_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "three.yaml"
    path.write_text(SPEEDS + LOAD)
    main(["plan", str(path), "--out", "-"])
    printed = capsys.readouterr()
    assert plan_of(load_text(printed.out, label="out")).layers == ((0, 2), (2, 9), (9, 12))
    assert "- stage 0 is the longest" in printed.err


def test_the_command_names_the_card_of_each_stage_and_what_fits_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", str(ROOT / "scenarios" / "uneven_gpus.yaml")])
    first, second, third = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("stage 0 on fast: layers [0, 14), ")
    assert second.startswith("stage 1 on fast: layers [14, 28), ")
    assert third.startswith("stage 2 on old: layers [28, 32), ")
    assert third.endswith(" of 17.2 GB for weights and KV")


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("", "it is a directory"),
        ("folder.yaml", "it is a directory"),
        ("loop.yaml", "symbolic links"),
        ("none/x.yaml", "there is no directory none"),
        ("precious.txt", "must end in .yaml or .yml"),
        ("precious.yaml", "did not write it"),
        ("pipe.yaml", "no regular file"),
    ],
)
def test_the_command_says_before_any_work_why_it_cannot_write_there(
    out: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("three.yaml").write_text(SPEEDS + LOAD)
    Path("folder.yaml").mkdir()
    Path("loop.yaml").symlink_to("loop.yaml")
    os.mkfifo("pipe.yaml")
    for name in ("precious.yaml", "precious.txt"):
        Path(name).write_text("ten: years\n")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "three.yaml", "--out", out])
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith(f"kvasir-sim: --out {out or '.'} cannot be written: ")
    assert why in said.err
    assert sorted(tmp_path.iterdir()) == before
    assert Path("precious.yaml").read_text() == "ten: years\n"
