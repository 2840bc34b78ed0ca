"""From scenario to plan: cases P5 and P7, and the numbers a plan takes from its scenario."""

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_core.plan import Plan
from kvasir_scenario.load import load_text
from kvasir_scenario.planning import StageFacts, plan_of, stages_of
from kvasir_scenario.schema import Scenario


def scenario_of(*, layers: int = 10, ring: str = "stages: 3", rest: str = "") -> Scenario:
    return load_text(
        f"model: {{layers: {layers}, context: 512, hidden: 64, dtype: float32}}\n"
        f"ring: {{{ring}}}\n"
        "workload: {kind: trace, requests: [[0, 1, 40]]}\n" + rest,
        label="p.yaml",
    )


def plan(*, layers: int = 10, ring: str = "stages: 3", rest: str = "") -> Plan:
    return plan_of(scenario_of(layers=layers, ring=ring, rest=rest))


def sizes(made: Plan) -> list[int]:
    return [stop - start for start, stop in made.layers]


def test_p5a_ten_layers_on_three_stages_lose_nothing() -> None:
    made = plan(layers=10, ring="stages: 3")
    assert sorted(sizes(made)) == [3, 3, 4]
    assert [layer for start, stop in made.layers for layer in range(start, stop)] == list(range(10))


def test_p5b_sixty_one_layers_on_eight_stages_spread_the_remainder() -> None:
    assert sorted(sizes(plan(layers=61, ring="stages: 8"))) == [7] * 3 + [8] * 5


def test_p5c_an_explicit_split_is_taken_as_it_is() -> None:
    scenario = scenario_of(
        ring="micro_batch_width: 1, window: 6, stages: [{layers: 5, pass_s: 5}, "
        "{layers: 3, pass_s: 3}, {layers: 2, pass_s: 2}]"
    )
    made = plan_of(scenario)
    assert made.layers == ((0, 5), (5, 8), (8, 10))
    assert [stage.pass_s for stage in stages_of(scenario, made)] == [5, 3, 2]


def test_p5d_a_split_that_is_not_the_model_names_both_numbers() -> None:
    with pytest.raises(ScenarioError, match=r"p\.yaml:2: ring\.stages: .*hold 12 .*layers is 10"):
        plan(layers=10, ring="stages: [{layers: 4}, {layers: 4}, {layers: 4}]")


def test_p5e_more_stages_than_layers_names_both_numbers() -> None:
    with pytest.raises(ScenarioError, match=r"p\.yaml:2: ring\.stages: 3 stages .* 2 layers"):
        plan(layers=2, ring="stages: 3")


def test_p5f_a_device_without_speed_is_refused_where_it_is_described() -> None:
    with pytest.raises(
        ScenarioError, match=r"p\.yaml:4: devices\.slow\.flops: found 0; it must be at least 1"
    ):
        plan(
            ring="stages: 3, device: slow",
            rest="devices: {slow: {flops: 0, bandwidth_bytes_per_s: 1e9}}\n",
        )


@pytest.mark.parametrize("width", [64, 256])
def test_p7_with_chunks_a_row_width_below_the_context_is_fine(width: int) -> None:
    made = plan(ring=f"stages: 2, window: 2, row_width: {width}")
    assert (made.row_width, made.chunked_prefill) == (width, True)


def test_p7_without_chunks_a_row_width_below_the_context_names_both_numbers() -> None:
    with pytest.raises(ScenarioError, match=r"policy\.chunked_prefill: .*\(64\).*\(512\)"):
        plan(ring="stages: 2, row_width: 64", rest="policy: {chunked_prefill: false}\n")
    made = plan(ring="stages: 2, row_width: 512", rest="policy: {chunked_prefill: false}\n")
    assert made.chunked_prefill is False


def test_a_window_of_auto_starts_at_the_stages_and_may_grow_to_four_times_that() -> None:
    made = plan(ring="stages: 3")
    assert (made.window, made.window_max, made.window_auto) == (3, 12, True)
    made = plan(ring="stages: 3, window_max: 2")
    assert (made.window, made.window_max, made.window_auto) == (2, 2, True)


def test_a_fixed_window_is_its_own_bound() -> None:
    made = plan(ring="stages: 3, window: 7, window_max: 20")
    assert (made.window, made.window_max, made.window_auto) == (7, 7, False)


def test_the_plan_takes_its_other_numbers_from_the_scenario() -> None:
    made = plan(
        ring="stages: 2, row_width: 100, micro_batch_width: 9, running_max: 20, credits: unbounded,"
        " kv_tokens: [4096, 2048], kv_block: 32",
        rest="policy: {packer: sarathi, prefill_rows_max: 50, cohort_wait_s: 0.001}\n",
    )
    assert (made.row_width, made.micro_batch_width, made.running_max) == (100, 9, 20)
    assert made.credits is None
    assert (made.kv_tokens, made.kv_block, made.kv_blocks) == ((4096, 2048), 32, 64)
    assert (made.hidden, made.element_bytes, made.context) == (64, 4, 512)
    assert made.boundary_bytes_max == 100 * 64 * 4
    assert (made.packer, made.prefill_rows_max, made.cohort_wait_ns) == ("sarathi", 50, 1_000_000)


def test_kv_counts_for_every_stage_or_for_each() -> None:
    assert plan(ring="stages: 3, kv_tokens: 1000").kv_tokens == (1000, 1000, 1000)


def test_unbounded_kv_holds_every_running_request_at_full_context() -> None:
    made = plan(ring="stages: 2, running_max: 10, kv_block: 100")
    assert made.kv_blocks == 10 * 6


def test_stages_take_the_rings_defaults() -> None:
    scenario = scenario_of(
        ring="device: big, stages: [{layers: 6, device: small}, {layers: 4, per_token_s: 0.5}]",
        rest="costs: {kind: fixed, pass_s: 2, per_token_s: 0.25}\n"
        "devices: {big: {preset: a100-80g}, small: {preset: l40s}}\n",
    )
    assert stages_of(scenario, plan_of(scenario)) == (
        StageFacts(index=0, layers=(0, 6), device="small", pass_s=2, per_token_s=0.25),
        StageFacts(index=1, layers=(6, 10), device="big", pass_s=2, per_token_s=0.5),
    )


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("[{layers: [0, 4]}, {layers: [3, 10]}]", r"stages\.1\.layers: .*\[3, 10\).*4.*overlap"),
        ("[{layers: [0, 4]}, {layers: [5, 10]}]", r"stages\.1\.layers: .*\[5, 10\).*4.*gap"),
        ("[{layers: [1, 4]}, {layers: [4, 10]}]", r"stages\.0\.layers: .*start at 0"),
        ("[{layers: [0, 4]}, {layers: [4, 11]}]", r"stages: .*hold 11 .*is 10"),
        ("[{layers: [0, 4]}, {layers: [4, 9]}]", r"stages: .*hold 9 .*is 10"),
        ("[{layers: 4}, {}]", r"stages\.1\.layers: missing, while other stages"),
        ("[{layers: 4}, {layers: auto}]", r"stages\.1\.layers: found auto, while other"),
    ],
)
def test_layers_that_are_not_a_partition_are_refused(stages: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        plan(layers=10, ring=f"stages: {stages}")


def test_counts_and_ranges_may_stand_side_by_side() -> None:
    made = plan(ring="stages: [{layers: 4}, {layers: [4, 7]}, {layers: 3}]")
    assert made.layers == ((0, 4), (4, 7), (7, 10))


def test_stages_without_layers_share_the_model_evenly() -> None:
    assert sizes(plan(ring="stages: [{pass_s: 1}, {pass_s: 2}, {}]")) == [4, 3, 3]


@pytest.mark.parametrize(
    "ring", ["stages: 2, layers: auto", "stages: [{layers: auto}, {layers: auto}]"]
)
def test_auto_layers_need_a_planner(ring: str) -> None:
    with pytest.raises(ScenarioError, match=r"layers: found auto, and nobody here can solve it"):
        plan(ring=ring)


def test_a_planner_decides_auto_layers() -> None:
    def planner(scenario: Scenario) -> tuple[tuple[int, int], ...]:
        return ((0, scenario.model.layers - 1), (scenario.model.layers - 1, scenario.model.layers))

    scenario = load_text(
        "model: {layers: 10}\nring: {stages: 2, layers: auto}\n"
        "workload: {kind: trace, requests: [[0, 1, 40]]}\n",
        planner=planner,
    )
    assert plan_of(scenario, planner).layers == ((0, 9), (9, 10))


def test_a_planner_that_errs_is_not_believed() -> None:
    with pytest.raises(ScenarioError, match="stage 1 has layers"):
        load_text(
            "model: {layers: 10}\nring: {stages: 2, layers: auto}\n"
            "workload: {kind: trace, requests: [[0, 1, 40]]}\n",
            planner=lambda _: ((0, 5), (6, 10)),
        )


def test_the_same_scenario_has_the_same_digest_and_another_has_another() -> None:
    assert plan(ring="stages: 3").digest == plan(ring="stages: 3").digest
    assert plan(ring="stages: 3").digest != plan(ring="stages: 3, row_width: 511").digest
