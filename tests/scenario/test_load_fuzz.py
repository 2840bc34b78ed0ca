"""Whatever a file says, reading it gives a scenario or a `ScenarioError`, and soon."""

from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir_core.errors import ScenarioError
from kvasir_scenario.dump import to_yaml
from kvasir_scenario.load import load_text
from kvasir_scenario.planning import plan_of
from kvasir_scenario.schema import Scenario

BASE: dict[str, Any] = {
    "name": "fuzz",
    "model": {"preset": "qwen3-30b-a3b", "context": 512},
    "devices": {"a": {"preset": "a100-80g"}, "b": {"flops": 1e14, "bandwidth_bytes_per_s": 1e12}},
    "ring": {
        "stages": [{"layers": 24, "device": "a"}, {"layers": [24, 48], "device": "b"}],
        "links": [{"latency_s": 0.001, "bandwidth_bytes_per_s": 1e9}],
        "return_link": {"latency_s": 0.001},
        "window": "auto",
        "kv_tokens": [4096, 8192],
    },
    "costs": {"kind": "roofline", "matmul_efficiency": 0.6},
    "policy": {"packer": "cohort", "prefill_rows_max": 128},
    "workload": {
        "kind": "poisson",
        "rate_per_s": {"phases": [{"rate_per_s": 1, "for_s": {"uniform": [20, 120]}}]},
        "prompt_tokens": {"percentiles": {"50": 100, "90": 400}},
        "output_tokens": {"lognormal": {"median": 10, "p90": 20}},
        "requests": 10,
        "cancels": {"share": 0.1, "after_s": 2},
    },
    "experts": {"workers": [], "overlap": 2},
    "faults": [{"kind": "stage_lost", "stage": 0, "at_s": 1, "for_s": 2}],
    "what_if": {"one": {"ring.window": 1}},
    "run": {"seed": 3, "horizon_s": 10},
}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "unbounded", "any", "1:30", "a", "trace", "fixed", "${HOME}"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def paths_of(data: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(data, dict):
        below = [paths_of(value, (*path, key)) for key, value in data.items()]
    elif isinstance(data, list):
        below = [paths_of(value, (*path, index)) for index, value in enumerate(data)]
    else:
        below = []
    return [path, *(found for part in below for found in part)]


def changed(data: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy with the value at `path` replaced."""
    if not path:
        return value
    copied: Any = dict(data) if isinstance(data, dict) else list(data)
    copied[path[0]] = changed(data[path[0]], path[1:], value)
    return copied


def outcome(text: str, *overrides: str) -> Scenario | None:
    complaint = ""
    scenario = None
    try:
        scenario = load_text(text, label="s.yaml", overrides=overrides)
        plan_of(scenario)
    except ScenarioError as error:
        complaint = str(error)
    assert (scenario is None) == complaint.startswith(("s.yaml", "--set"))
    return scenario


def test_the_fuzzed_scenario_is_valid_itself() -> None:
    assert outcome(yaml.safe_dump(BASE)) is not None


@given(st.text())
def test_any_text_is_a_scenario_or_an_error(text: str) -> None:
    outcome(text)


@given(st.lists(st.sampled_from(list("{}[]:,-#&*!|>'\"%@`?\n\t ~0a.")), max_size=60).map("".join))
def test_any_pile_of_yaml_punctuation_is_an_error(text: str) -> None:
    assert outcome(text) is None


@given(values)
def test_any_yaml_value_is_an_error(value: Any) -> None:
    assert outcome(yaml.safe_dump(value)) is None


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(paths_of(BASE)), value=values)
def test_any_value_at_any_key_is_a_scenario_or_an_error(
    path: tuple[str | int, ...], value: Any
) -> None:
    scenario = outcome(yaml.safe_dump(changed(BASE, path, value)))
    if scenario is not None:
        assert outcome(to_yaml(scenario)) == scenario


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from([path for path in paths_of(BASE) if path]),
    value=st.one_of(values.map(yaml.safe_dump), st.text()),
)
def test_any_setting_gives_a_scenario_or_an_error(path: tuple[str | int, ...], value: str) -> None:
    outcome(yaml.safe_dump(BASE), ".".join(map(str, path)) + "=" + value)


@given(st.lists(st.text(max_size=20), max_size=3))
def test_any_words_after_set_give_a_scenario_or_an_error(settings_: list[str]) -> None:
    outcome(yaml.safe_dump(BASE), *settings_)
