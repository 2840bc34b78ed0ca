"""The schema: what a scenario may say, its defaults, and the JSON Schema for editors."""

import copy
import pickle
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from kvasir_core.errors import ScenarioError
from kvasir_scenario.load import load_text
from kvasir_scenario.presets import MODEL_PRESETS
from kvasir_scenario.schema import Scenario, json_schema
from kvasir_scenario.schema_experts import Experts
from kvasir_scenario.schema_types import Section
from kvasir_scenario.schema_workload import ClosedWorkload, Distribution, RateProfile, TraceWorkload

MINIMAL = """\
name: minimal
model: {layers: 8, context: 4096}
devices: {}
ring:
  stages: 2
  row_width: 64
  micro_batch_width: 8
  window: auto
  running_max: 256
  kv_tokens: 100000
  kv_block: 16
  credits: 2
  link: {latency_s: 0, bandwidth_bytes_per_s: null, occupies_sender: false}
costs: {kind: fixed}
policy: {packer: cohort, chunked_prefill: true}
workload: {kind: trace, requests: [[0, 1, 10]]}
slo: {ttft_s: 1.0, tpot_s: 0.05}
experts: null
faults: []
what_if: {drained: {policy.packer: drained}}
run: {seed: 1, warmup_s: 0, horizon_s: null}
"""
SHORTEST = """\
model: {layers: 8}
ring: {stages: 2}
workload: {kind: trace, requests: [[0, 1, 10]]}
"""


def with_workload(text: str) -> Scenario:
    return load_text(f"model: {{layers: 8}}\nring: {{stages: 2}}\nworkload: {text}\n")


def test_the_designs_own_example_is_valid_and_means_what_it_says() -> None:
    scenario = load_text(MINIMAL)
    assert (scenario.name, scenario.model.layers, scenario.ring.row_width) == ("minimal", 8, 64)
    assert scenario.ring.window == "auto"
    assert isinstance(scenario.workload, TraceWorkload)
    assert scenario.workload.requests == ((0.0, 1, 10),)
    assert scenario.experts is None
    assert scenario.run.horizon_s is None


def test_three_sections_are_enough() -> None:
    scenario = load_text(SHORTEST)
    assert scenario.costs.kind == "fixed"
    assert scenario.policy.packer == "cohort"
    assert scenario.ring.credits == 2
    assert scenario.run.seed == 1


def test_a_preset_gives_the_shape_and_own_keys_win() -> None:
    scenario = load_text(
        "model: {preset: llama-3-8b, context: 4096}\nring: {stages: 4}\n"
        "workload: {kind: trace, requests: [[0, 1, 1]]}\n"
    )
    model = scenario.model
    assert (model.layers, model.hidden, model.kv_heads, model.vocab) == (32, 4096, 8, 128256)
    assert model.context == 4096
    assert MODEL_PRESETS["llama-3-8b"]["context"] == 8192


@pytest.mark.parametrize("name", list(MODEL_PRESETS))
def test_every_preset_is_a_valid_model(name: str) -> None:
    scenario = load_text(
        f"model: {{preset: {name}}}\nring: {{stages: 4}}\n"
        "workload: {kind: trace, requests: [[0, 1, 1]]}\n"
    )
    assert scenario.model.hidden is not None
    assert scenario.model.element_bytes == 2


def parameters(name: str) -> float:
    """Weights of a preset, from its shape alone (norms left out)."""
    shape = {key: int(value) for key, value in MODEL_PRESETS[name].items() if key != "dtype"}
    hidden, head_dim = shape["hidden"], shape["head_dim"]
    attention = 2 * hidden * head_dim * (shape["heads"] + shape["kv_heads"])
    experts = shape.get("experts")
    block = (
        3 * hidden * shape["expert_ffn"] * experts + hidden * experts
        if experts
        else 3 * hidden * shape["ffn"]
    )
    vocabulary = shape["vocab"] * hidden * (1 if shape.get("tied_embeddings") else 2)
    return shape["layers"] * (attention + block) + vocabulary


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.6),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-32b", 32.8),
        ("smollm2-135m", 0.1345),
        ("mixtral-8x7b", 46.7),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235.1),
        ("dense-45-layers", 23.4),
        ("moe-122b", 122.0),
    ],
)
def test_a_presets_shape_adds_up_to_its_published_size(name: str, billions: float) -> None:
    assert parameters(name) == pytest.approx(billions * 1e9, rel=0.01)


def test_stages_may_be_counts_ranges_or_a_number() -> None:
    text = "model: {{layers: 8}}\nring: {{stages: {}}}\nworkload: {{kind: trace, requests: [[0, 1, 1]]}}"
    listed = load_text(text.format("[{layers: 5, pass_s: 2}, {layers: [5, 8]}]")).ring.stages
    assert not isinstance(listed, int)
    assert (listed[0].layers, listed[0].pass_s) == (5, 2.0)
    assert listed[1].layers == (5, 8)
    assert load_text(text.format(3)).ring.stages == 3


def test_links_are_one_per_hop_and_the_return_is_as_link_unless_told() -> None:
    text = (
        "model: {{layers: 8}}\nring: {{stages: 3, {}}}\n"
        "workload: {{kind: trace, requests: [[0, 1, 1]]}}"
    )
    same = load_text(text.format("link: {latency_s: 2}")).ring.hops
    assert [hop.latency_s for hop in same] == [2, 2, 2]
    each = load_text(
        text.format("links: [{latency_s: 1}, {latency_s: 2}], return_link: {latency_s: 3}")
    ).ring.hops
    assert [hop.latency_s for hop in each] == [1, 2, 3]
    free = load_text(text.format("links: [{latency_s: 1}, {latency_s: 2}]")).ring.hops
    assert [hop.latency_s for hop in free] == [1, 2, 0]


def test_lengths_may_be_a_number_or_one_of_four_distributions() -> None:
    scenario = with_workload(
        "{kind: poisson, rate_per_s: 2, requests: 10, prompt_tokens: {percentiles: {50: 120, 99.9: "
        "400}}, output_tokens: {lognormal: {median: 100, p90: 300}, max: 1000}}"
    )
    prompt = scenario.workload.prompt_tokens  # type: ignore[union-attr]
    assert isinstance(prompt, Distribution)
    assert prompt.percentiles == {50.0: 120.0, 99.9: 400.0}
    for form in ("128", "{empirical: [1, 2, 3]}", "{uniform: [1, 9]}"):
        with_workload(
            f"{{kind: constant, rate_per_s: 1, duration_s: 5, prompt_tokens: {form}, output_tokens: 1}}"
        )


def test_a_rate_may_change_in_phases() -> None:
    scenario = with_workload(
        "{kind: gamma, burstiness: 2, duration_s: 3600, prompt_tokens: 9, output_tokens: 9,\n"
        "  rate_per_s: {repeat: true, phases: [{rate_per_s: 8, for_s: {uniform: [20, 120]}},\n"
        "    {rate_per_s: 1, for_s: {uniform: [20, 400]}}]}}"
    )
    rate = scenario.workload.rate_per_s  # type: ignore[union-attr]
    assert isinstance(rate, RateProfile)
    assert [phase.rate_per_s for phase in rate.phases] == [8, 1]


def test_closed_loop_users_may_think_at_random() -> None:
    scenario = with_workload(
        "{kind: closed, users: 64, think_s: {lognormal: {median: 5, p90: 20}}, requests: 1e3,"
        " prompt_tokens: 100, output_tokens: 10}"
    )
    assert isinstance(scenario.workload, ClosedWorkload)
    assert scenario.workload.requests == 1000


def test_faults_come_at_a_time_or_at_a_rate() -> None:
    scenario = load_text(
        SHORTEST + "faults:\n"
        "- {kind: stage_lost, stage: 1, at_s: 10, for_s: 5}\n"
        "- {kind: stage_slow, stage: any, rate_per_h: 6, factor: 2, for_s: {uniform: [1, 9]}}\n"
        "- {kind: link_slow, hop: 0, at_s: 1, add_s: 0.04, for_s: 60}\n"
        "- {kind: link_stop, hop: 1, at_s: 1, for_s: 2}\n"
    )
    assert [fault.kind for fault in scenario.faults] == [
        "stage_lost", "stage_slow", "link_slow", "link_stop",
    ]  # fmt: skip


def test_an_experts_section_has_a_default_for_all_but_its_workers() -> None:
    scenario = load_text(
        "model: {preset: qwen3-30b-a3b}\nring: {stages: 2}\n"
        "workload: {kind: trace, requests: [[0, 1, 10]]}\n"
        "experts: {overlap: 4}\n"
    )
    assert isinstance(scenario.experts, Experts)
    assert scenario.experts.overlap == 4


def test_a_scenario_survives_copying_pickling_and_keeps_its_lines() -> None:
    scenario = load_text(MINIMAL, label="a.yaml")
    for other in (copy.deepcopy(scenario), pickle.loads(pickle.dumps(scenario))):
        assert other == scenario
        assert "a.yaml:5: ring.stages: no" in str(other.error("ring.stages", "no"))
    assert scenario != load_text(SHORTEST)
    assert scenario != MINIMAL


def test_a_scenario_cannot_be_changed_in_place() -> None:
    scenario = load_text(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        scenario.ring.row_width = 1  # type: ignore[misc]


def sections(section: type[BaseModel]) -> set[type[BaseModel]]:
    found = {section}
    for field in section.model_fields.values():
        waiting = [field.annotation]
        while waiting:
            annotation = waiting.pop()
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                found |= sections(annotation) if annotation not in found else set()
            waiting += get_args(annotation)
    return found


def test_every_section_refuses_unknown_keys_and_lax_numbers() -> None:
    names = sections(Scenario)
    assert len(names) > 30
    for section in names:
        assert issubclass(section, Section)
        assert section.model_config.get("extra") == "forbid"
        assert section.model_config.get("strict") is True


def property_names(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        own = set(schema.get("properties", {}))
        return own.union(*(property_names(value) for value in schema.values()), set())
    if isinstance(schema, list):
        return set[str]().union(*(property_names(item) for item in schema))
    return set()


def test_the_json_schema_knows_every_key_and_forbids_others() -> None:
    schema = json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"model", "ring", "workload"}
    keys = {name for section in sections(Scenario) for name in section.model_fields}
    assert keys <= property_names(schema)
    assert "at once" in schema["$defs"]["Ring"]["properties"]["window"]["description"]


def test_the_json_schema_takes_a_model_by_layers_preset_or_path() -> None:
    model = json_schema()["$defs"]["Model"]
    assert model["anyOf"] == [{"required": [key]} for key in ("layers", "preset", "path")]
    assert "layers" not in model["required"]
    assert model["additionalProperties"] is False


def test_the_json_schema_is_the_same_every_time() -> None:
    assert json_schema() == json_schema()


def test_a_mapping_that_is_no_scenario_is_refused_by_name() -> None:
    with pytest.raises(ScenarioError, match=r"x\.yaml:1: .*model, ring, workload"):
        load_text("[1, 2]", label="x.yaml")
