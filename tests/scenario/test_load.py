"""Reading scenarios: overrides, variants, YAML's traps, limits, paths, and the way back to YAML."""

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_scenario import load
from kvasir_scenario.data_paths import data_directory, existing_file, expand_path
from kvasir_scenario.dump import to_yaml
from kvasir_scenario.load import load_scenario, load_text, resolve_path
from kvasir_scenario.planning import plan_of
from kvasir_scenario.variants import variants_of
from kvasir_scenario.yaml_tree import FILE_BYTES_MAX, NODES_MAX, plain_scalar, read_tree

ROOT = Path(__file__).parents[2]
TEXT = """\
model: {layers: 8, context: 512}
ring:
  stages:
    - {layers: 4, pass_s: 1.0}
    - {layers: 4, pass_s: 2.0}
  window: 2
workload:
  kind: trace
  requests: [[0, 1, 10]]
what_if:
  drained: {policy.packer: drained}
  slow: {ring.stages.1.pass_s: 4.0, ring.window: auto}
"""


def refusal(text: str = TEXT, *overrides: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        load_text(text, label="s.yaml", overrides=overrides)
    return str(caught.value)


# Overrides


def test_settings_change_values_at_any_depth_and_the_last_one_wins() -> None:
    scenario = load_text(
        TEXT,
        overrides=["ring.stages.0.pass_s=2", "ring.window=1", "ring.window=3", "run.horizon_s=60"],
    )
    assert scenario.ring.stages[0].pass_s == 2  # type: ignore[index]
    assert scenario.ring.window == 3
    assert scenario.run.horizon_s == 60


def test_a_setting_is_yaml() -> None:
    scenario = load_text(
        TEXT, overrides=["ring.stages=[{layers: 2}, {layers: 6}]", "ring.credits=unbounded"]
    )
    assert plan_of(scenario).layers == ((0, 2), (2, 8))
    assert scenario.ring.credits == "unbounded"


def test_a_setting_may_change_a_variant() -> None:
    scenario = load_text(TEXT, overrides=["what_if.drained.policy.packer=greedy", "what_if.x={}"])
    assert [(name, other.policy.packer) for name, other in variants_of(scenario)] == [
        ("drained", "greedy"), ("slow", "cohort"), ("x", "cohort"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ring.windw=1", "--set ring.windw=1: ring.windw: unknown key; did you mean window?"),
        ("ring.window=atuo", '--set ring.window=atuo: ring.window: found "atuo"; it must be'),
        ("ring.window", "--set ring.window: its value is missing; it must be key.path=value, for"),
        ("ring.window ", "for example --set ring.window=1"),
        ("=1", "--set =1: the name is missing; it must be key.path=value"),
        ("ring..window=1", "--set ring..window=1: ring..window is no key path"),
        ("ring.stages.2.pass_s=1", "ring.stages is a list of 2; 2 must be one of its indexes"),
        ("ring.stages.-1.pass_s=1", "ring.stages is a list of 2; -1 must be one of its indexes"),
        ("ring.stages.x.pass_s=1", "ring.stages is a list of 2; x must be one of its indexes"),
        ("ring.window.x=1", "ring.window is 2, which has no x; set ring.window as a whole"),
        ("ring.window=.inf", "--set ring.window=.inf: found .inf; a number must be finite"),
        ("ring.window=[1", "--set ring.window=[1: not valid YAML"),
        ("ring.window=*x", "anchors and aliases (x) are not read"),
        ("run.seed=true", "run.seed: found true; it must be a whole number"),
        ("what_if.slow.ring.windw=1", "what_if.slow: ring.windw: unknown key"),
        (".".join("a" * 40) + "=1", "is no key path"),
    ],
)
def test_a_wrong_setting_is_named(setting: str, message: str) -> None:
    assert message in refusal(TEXT, setting)


def test_a_seed_of_its_own_is_checked_like_any_other() -> None:
    assert load_text(TEXT, seed=7).run.seed == 7
    with pytest.raises(ScenarioError, match=r"--seed -1: run\.seed: found -1; .* at least 0"):
        load_text(TEXT, seed=-1)


def test_settings_leave_the_lines_of_other_keys_alone() -> None:
    scenario = load_text(TEXT, label="s.yaml", overrides=["ring.window=3"])
    assert "s.yaml:4: ring.stages.0.pass_s: no" in str(scenario.error("ring.stages.0.pass_s", "no"))
    assert "--set ring.window=3: ring.window: no" in str(scenario.error("ring.window", "no"))
    assert "s.yaml:2: ring.row_width: no" in str(scenario.error("ring.row_width", "no"))
    assert "s.yaml:1: run.seed: no" in str(scenario.error("run.seed", "no"))


# Variants


def test_variants_differ_from_the_baseline_by_their_keys_alone() -> None:
    scenario = load_text(TEXT, overrides=["ring.row_width=99"])
    (_, drained), (_, slow) = variants_of(scenario)
    assert drained.policy.packer == "drained"
    assert drained.ring == scenario.ring
    assert slow.ring.window == "auto"
    assert slow.ring.stages[1].pass_s == 4  # type: ignore[index]
    assert slow.ring.row_width == 99
    assert slow.what_if == {}
    assert (slow.name, slow.base) == (scenario.name, scenario.base)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("{policy.packr: x}", "s.yaml:13: what_if.bad: policy.packr: unknown key; did you mean"),
        ("{ring.stages: 9}", "s.yaml:13: what_if.bad: ring.stages: 9 stages cannot"),
        ("{ring.stages.5.pass_s: 9}", "s.yaml:13: what_if.bad: ring.stages is a list of 2"),
        ("{what_if.drained: {}}", "s.yaml:13: what_if.bad.what_if.drained: a variant cannot"),
        ("{name: x}", "s.yaml:13: what_if.bad.name: a variant cannot"),
        ("3", "s.yaml:13: what_if.bad: found 3; it must be a map of keys"),
    ],
)
def test_a_wrong_variant_is_refused_before_anything_runs(variant: str, message: str) -> None:
    assert message in refusal(TEXT + f"  bad: {variant}\n")


# YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1_000", 1000), ("-3", -3), ("+3", 3), ("0x10", 16), ("0o17", 15), ("0", 0),
        ("1e3", 1000.0), ("1.5e-3", 0.0015), (".5", 0.5), ("1.", 1.0), ("1_000.5", 1000.5),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("no", "no"), ("on", "on"), ("y", "y"), ("1:30", "1:30"), ("010", "010"), ("1_", "1_"),
        ("2024-01-01", "2024-01-01"), ("1e", "1e"), ("0x", "0x"), ("-", "-"), ("1__0", "1__0"),
    ],
)  # fmt: skip
def test_a_plain_scalar_means_what_yaml_1_2_says(text: str, value: object) -> None:
    found = plain_scalar(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", [".nan", ".NaN", ".inf", "-.INF", "1e999", "-1e999", "9" * 41])
def test_a_number_that_no_clock_could_hold_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="found"):
        plain_scalar(text)


def test_quotes_make_text_of_anything() -> None:
    assert read_tree("a: '1'\nb: \"null\"", "t").data == {"a": "1", "b": "null"}


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    assert load_text(TEXT, overrides=["ring.kv_tokens=1e6"]).ring.kv_tokens == 1_000_000
    assert "whole number" in refusal(TEXT, "ring.kv_block=1.5")


def test_a_bomb_of_aliases_is_refused_before_it_grows() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
    )
    assert "s.yaml:1: a: anchors and aliases" in refusal(bomb)


def test_depth_is_limited() -> None:
    assert "s.yaml:1: a.0.0.0: nested more than 32 levels deep" in refusal("a: " + "[" * 200)
    assert "s.yaml:1: " in refusal("a: " + "[" * 100_000)


def test_the_number_of_values_is_limited() -> None:
    text = TEXT + "faults: [" + "1," * NODES_MAX + "]"
    assert re.search(rf"s\.yaml:13: faults\.999\d\d: more than {NODES_MAX} values", refusal(text))


def test_the_size_of_a_file_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ScenarioError, match=f"more than {FILE_BYTES_MAX} bytes"):
        load_scenario(path)


def test_a_byte_order_mark_and_windows_lines_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "dos.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert load_scenario(path).name == "dos"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: \xff\xfe\n", "bad.yaml:1: is not UTF-8"),
        (b"a: 1\nb: \xff", "bad.yaml:2: is not UTF-8"),
        (b"a: \x00", "bad.yaml.*not valid YAML"),
        (b"", "found nothing"),
        (b"# only a comment\n", "found nothing"),
        (b"just words", "a scenario is a map"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError, match=message):
        load_scenario(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"none\.yaml: cannot be read: No such file"):
        load_scenario(tmp_path / "none.yaml")
    with pytest.raises(ScenarioError, match="cannot be read: Is a directory"):
        load_scenario(tmp_path)
    with pytest.raises(ScenarioError, match="is no path"):
        load_scenario(Path("a\0b"))


def test_the_name_is_the_files_unless_it_says_otherwise(tmp_path: Path) -> None:
    for file, name in (("4stage.yaml", "4stage"), ("a b.yaml", "scenario")):
        (tmp_path / file).write_text(TEXT)
        assert load_scenario(tmp_path / file).name == name
    assert load_scenario(tmp_path / "4stage.yaml", ["name=mine"]).name == "mine"


# The way back


RICH = (
    TEXT
    + """\
name: '1e3'
question: |
  What: if "this" has # two lines,
  'quotes' and ünïcode?
devices: {yes: {preset: a100-80g}, null: {flops: 1e12, bandwidth_bytes_per_s: 1_000}}
slo: {ttft_s: 0.1}
experts: {hub: null, workers: [{name: lan, count: 3, per_expert_s: 1.0e-5, download_bytes_per_s:
  1e8, link: {latency_s: 0.001}, arrival_s: {percentiles: {0: 0, 99.5: 600}}}]}
faults: [{kind: stage_lost, stage: any, rate_per_h: 0.1, for_s: 3}]
"""
)


@pytest.mark.parametrize("text", [TEXT, RICH])
def test_a_dump_reads_back_as_the_same_scenario(text: str) -> None:
    scenario = load_text(text, label="here.yaml", overrides=["ring.row_width=77"])
    dumped = to_yaml(scenario)
    again = load_text(dumped, label="there.yaml", base=Path("/elsewhere"))
    assert again == scenario
    assert to_yaml(again) == dumped
    assert plan_of(again).digest == plan_of(scenario).digest


def test_a_null_that_is_not_the_default_survives_the_dump() -> None:
    experts = load_text(to_yaml(load_text(RICH))).experts
    assert experts is not None
    assert experts.hub is None


def test_a_dump_keeps_paths_as_the_user_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "model: {layers: 8}\nring: {stages: 2}\n"
        "workload: {kind: trace, path: '${KVASIR_DATA}/a.csv', format: azure}\n"
    )
    dumped = to_yaml(load_scenario(path))
    assert "path: ${KVASIR_DATA}/a.csv" in dumped
    assert str(tmp_path) not in dumped


def test_a_dump_is_the_same_in_every_process() -> None:
    program = (
        "from kvasir_scenario.load import load_text; from kvasir_scenario.dump import to_yaml;"
        "import sys; sys.stdout.write(to_yaml(load_text(sys.stdin.read())))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            input=RICH,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {to_yaml(load_text(RICH))}


def test_reading_scenarios_needs_no_heavy_library() -> None:
    program = (
        "import sys, kvasir_scenario.load, kvasir_scenario.dump;"
        "print([m for m in ('numpy', 'pandas', 'pyarrow', 'matplotlib', 'torch', 'simpy', 'rich')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "[]"


# Paths


def test_relative_paths_start_at_the_scenario_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(TEXT)
    scenario = load_scenario(path)
    assert resolve_path(scenario, "data/a.csv") == tmp_path / "data" / "a.csv"
    assert resolve_path(scenario, "/abs/a.csv") == Path("/abs/a.csv")


def test_the_data_directory_is_the_environments_or_beside_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVASIR_DATA", str(tmp_path))
    assert expand_path("${KVASIR_DATA}/a.csv", Path("elsewhere")) == tmp_path / "a.csv"
    monkeypatch.delenv("KVASIR_DATA")
    assert data_directory(ROOT / "scenarios") == ROOT.parent / "shared"
    checkout = tmp_path / "copy"
    (checkout / "kvasir_core").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    assert expand_path("${KVASIR_DATA}/a", checkout / "scenarios") == tmp_path / "shared" / "a"


@pytest.mark.parametrize("text", ["${HOME}/a", "$HOME/a", "${}/a", "$KVASIR_DATA/a"])
def test_no_other_variable_is_expanded(text: str) -> None:
    with pytest.raises(ScenarioError, match=r"only \$\{KVASIR_DATA\} is expanded"):
        expand_path(text, Path())


def test_a_missing_file_is_named_with_its_line_and_how_to_get_it(tmp_path: Path) -> None:
    scenario = load_text(TEXT, label="s.yaml", base=tmp_path)
    with pytest.raises(
        ScenarioError, match=r"s\.yaml:7: workload\.path: found a\.csv, but .*; fetch it from X"
    ):
        existing_file(scenario, "workload.path", "a.csv", obtain="fetch it from X")
    with pytest.raises(ScenarioError, match="which is a folder"):
        existing_file(scenario, "workload.path", ".")
    with pytest.raises(ScenarioError, match=r"workload\.path: found the variable"):
        existing_file(scenario, "workload.path", "${X}")
    (tmp_path / "a.csv").touch()
    assert existing_file(scenario, "workload.path", "a.csv") == tmp_path / "a.csv"


# Model files


def test_a_model_files_shape_fills_what_the_scenario_leaves_out(tmp_path: Path) -> None:
    text = (
        "model: {path: m.gguf, context: 100}\nring: {stages: 2}\n"
        "workload: {kind: trace, requests: [[0, 1, 1]]}\n"
    )
    asked: list[Path] = []

    def read_shape(path: Path) -> dict[str, int | str | bool]:
        asked.append(path)
        return {"layers": 30, "context": 8192, "hidden": 576}

    model = load_text(text, base=tmp_path, read_shape=read_shape).model
    assert asked == [tmp_path / "m.gguf"]
    assert (model.layers, model.context, model.hidden) == (30, 100, 576)

    def refuse(path: Path) -> dict[str, int | str | bool]:
        raise ScenarioError(f"{path.name} is no GGUF file")

    with pytest.raises(ScenarioError, match=r"s\.yaml:1: model\.path: m\.gguf is no GGUF file"):
        load_text(text, label="s.yaml", read_shape=refuse)


def test_without_the_runtime_a_model_file_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (
        "model: {path: m.gguf}\nring: {stages: 2}\nworkload: {kind: trace, requests: [[0, 1, 1]]}\n"
    )
    monkeypatch.setattr(load, "SHAPE_READERS", "kvasir.nobody")
    assert "model.path: a model file is read by the runtime" in refusal(text)
    broken = EntryPoint("gguf", "kvasir_scenario.no_such_module:read", load.SHAPE_READERS)
    monkeypatch.setattr(load, "entry_points", lambda group: [broken])
    assert "install kvasir[rt], or give layers" in refusal(text)
