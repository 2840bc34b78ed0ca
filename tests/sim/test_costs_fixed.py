"""Fixed costs: exact nanoseconds per stage, for the cases that are computed by hand."""

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_sim.costs import build_costs
from kvasir_sim.costs.fixed import FixedCosts
from kvasir_sim.run import run
from tests.sim.cost_inputs import micro_batch, scenario
from tests.sim.shipped import shipped


def test_a_stage_takes_its_pass_and_its_rows() -> None:
    costs = FixedCosts([1.0, 0.5], [0.0, 0.001])
    assert costs.holds(micro_batch((10, 20), ((0, 62),))) == [1_000_000_000, 564_000_000]


def test_the_sum_is_rounded_once_to_the_nearest_nanosecond() -> None:
    costs = FixedCosts([0.4e-9], [0.4e-9])
    assert costs.holds(micro_batch((5,))) == [1]  # 0.8 ns; rounding the parts would give 0.
    assert costs.holds(micro_batch((5, 5))) == [1]  # 1.2 ns


def test_a_scenario_may_give_each_stage_its_own_figures() -> None:
    made, plan = scenario(
        "model: {layers: 10}\n"
        "ring: {stages: [{layers: 5, pass_s: 5}, {layers: 3, pass_s: 3}, {layers: 2}]}\n"
        "costs: {kind: fixed, pass_s: 2, per_token_s: 0.25}\n"
    )
    costs = build_costs(made, plan)
    assert costs.holds(micro_batch((3, 4))) == [5_500_000_000, 3_500_000_000, 2_500_000_000]
    assert costs.provenance == "assumed"


def test_p5c_a_second_per_layer_makes_unequal_stages_unequal() -> None:
    made, plan = scenario(
        "model: {layers: 10}\nring: {stages: [{layers: 5}, {layers: 3}, {layers: 2}]}\n"
        "costs: {kind: fixed, pass_s_per_layer: 1.0}\n"
    )
    assert build_costs(made, plan).holds(micro_batch((3,))) == [5 * 10**9, 3 * 10**9, 2 * 10**9]


def test_a_stage_of_its_own_speed_per_layer() -> None:
    made, plan = scenario(
        "model: {layers: 10}\n"
        "ring: {stages: [{layers: 5, pass_s_per_layer: 0.5}, "
        "{layers: 3, pass_s: 1, pass_s_per_layer: 0.1}, {layers: 2}]}\n"
        "costs: {kind: fixed, pass_s: 4, pass_s_per_layer: 0.25}\n"
    )
    holds = build_costs(made, plan).holds(micro_batch((3,)))
    assert holds == [2_500_000_000, 1_300_000_000, 4_500_000_000]


def test_the_prediction_is_the_longest_stage_of_the_same_micro_batch() -> None:
    costs = FixedCosts([1.0, 2.0], [0.5, 0.1])
    assert costs.predict(3, 300, 7, 64) == max(costs.holds(micro_batch((1, 1, 1), ((64, 7),))))


def test_the_report_says_that_nothing_was_measured() -> None:
    lines = FixedCosts([1.0], [0.001]).describe()
    assert "assumed" in lines[0]
    assert lines[1] == "stage 0: 1 s a pass, 0.001 s a row"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e7])
def test_a_time_that_cannot_be_names_stage_and_value(value: float) -> None:
    with pytest.raises(ScenarioError, match=r"stage 1: per_token_s is .* must be from 0"):
        FixedCosts([1.0, 1.0], [0.0, value])


def test_the_bridge_turns_a_lap_around_in_the_time_given() -> None:
    costs = FixedCosts([1.0], [0.0], 250_000_000)
    assert costs.turnaround_ns == 250_000_000
    assert costs.describe()[-1] == "bridge: 0.25 s a lap"
    load = "{kind: closed, users: 1, prompt_tokens: 1, output_tokens: 4, requests: 1}"
    change = ["what_if={}", f"workload={load}", "costs={kind: fixed, pass_s: 1}"]
    quick, slow = (
        run(shipped("equal_stages", [*change, *more])).report
        for more in ([], ["costs.turnaround_s=0.5"])
    )
    laps = 4
    assert slow.elapsed_s == pytest.approx(quick.elapsed_s + laps * 0.5)
