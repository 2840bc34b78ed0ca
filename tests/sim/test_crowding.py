"""Stages of one machine cost each other while they compute together, and a rest costs too."""

import json
from pathlib import Path

import pytest

from kvasir_scenario.planning import plan_of
from kvasir_scenario.profile import Crowd, Rest
from kvasir_scenario.report_schema import Report
from kvasir_sim.crowding import Crowding, Resting
from kvasir_sim.simulate import simulate
from tests.sim.profile_inputs import PROFILE
from tests.sim.rings import scenario_of

CROWD = {"neighbours": 1, "rows": [[1, 1_000, 1_500], [64, 1_000, 1_100]]}
BUSY = {"kind": "closed", "users": 8, "prompt_tokens": 1, "output_tokens": 200, "requests": 8}


REST = {"ns": 100_000, "rows": [[1, 1_000, 1_200]]}


def simulated(
    tmp_path: Path,
    *,
    crowd: bool = False,
    rest: bool = False,
    packer: str = "cohort",
    slow: float = 1.0,
) -> Report:
    profile = {**PROFILE, "dtype": "bfloat16"}
    profile |= ({"crowd": CROWD} if crowd else {}) | ({"rest": REST} if rest else {})
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    faults = [{"at_s": 0, "kind": "stage_slow", "stage": 1, "factor": slow, "for_s": 1000}]
    scenario = scenario_of(
        layers=30,
        stages=2,
        base=tmp_path,
        costs={"kind": "profile", "file": "profile.json"},
        policy={"packer": packer},
        workload=BUSY,
        micro_batch_width=4,
        faults=faults if slow > 1 else [],
    )
    return simulate(scenario)


def mean_holds(report: Report) -> list[float]:
    return [stage.busy_s / stage.micro_batches for stage in report.stages]


def test_a_drained_ring_is_as_fast_as_a_stage_alone(tmp_path: Path) -> None:
    crowded = simulated(tmp_path, crowd=True, packer="drained")
    alone = simulated(tmp_path, crowd=False, packer="drained")
    assert mean_holds(crowded) == mean_holds(alone)
    assert any("share a machine" in note for note in crowded.costs.notes)
    assert not any("share a machine" in note for note in alone.costs.notes)


def test_stages_that_always_compute_together_take_as_long_as_was_measured(tmp_path: Path) -> None:
    """Four rows: 1 + 0.5 - 0.4 * 3 / 63 times as long, while both are busy all the time."""
    crowded, alone = (mean_holds(simulated(tmp_path, crowd=crowd)) for crowd in (True, False))
    slowdown = 1.5 - 0.4 * 3 / 63
    tail = max(range(2), key=lambda stage: alone[stage])  # Always busy; the other waits for it.
    assert crowded[1 - tail] == pytest.approx(slowdown * alone[1 - tail], rel=0.01)
    assert alone[tail] < crowded[tail] < slowdown * alone[tail]


def test_a_stage_that_a_fault_slows_crowds_the_others_less(tmp_path: Path) -> None:
    alone = mean_holds(simulated(tmp_path, crowd=False, slow=4))
    crowded = mean_holds(simulated(tmp_path, crowd=True, slow=4))
    assert crowded[0] / alone[0] == pytest.approx(1 + 0.48 / 4, rel=0.03)


def test_slowdowns_are_linear_between_the_measured_sizes_and_flat_beyond() -> None:
    crowd = Crowd.model_validate(CROWD)
    crowding = Crowding(plan_of(scenario_of([[0, 1, 1]])), crowd)
    for rows, slowdown in ((1, 1.5), (64, 1.1), (500, 1.1), (32, 1.5 - 0.4 * 31 / 63)):
        assert crowding.grown([100.0, 10.0], rows) == pytest.approx([100 * slowdown, 10 * slowdown])


def test_every_hold_of_a_drained_ring_follows_a_rest(tmp_path: Path) -> None:
    rested = simulated(tmp_path, rest=True, packer="drained")
    hot = simulated(tmp_path, packer="drained")
    assert mean_holds(rested) == pytest.approx([1.2 * hold for hold in mean_holds(hot)], rel=1e-3)
    assert any("rested for 0.1 ms" in note for note in rested.costs.notes)
    assert not any("rested" in note for note in hot.costs.notes)


def test_a_stage_that_is_always_busy_never_rests_and_one_that_waits_for_it_does(
    tmp_path: Path,
) -> None:
    rested, hot = (mean_holds(simulated(tmp_path, rest=rest, slow=4)) for rest in (True, False))
    assert rested[0] == pytest.approx(1.2 * hot[0], rel=0.03)
    assert rested[1] == pytest.approx(hot[1], rel=0.03)


def test_a_short_rest_costs_its_share() -> None:
    rest = Rest(ns=1_000, rows=[(1, 100, 200)])
    resting = Resting(plan_of(scenario_of([[0, 1, 1]])), rest)
    assert resting.grown([100.0, 100.0], 1) == [100.0, 100.0]
    for lap in range(100):  # The first stage is free for 250 ns before each hold, the second not.
        at = 1_000 * lap
        resting.note([at, at + 250, at + 1_000, at + 1_000, at, at, at + 1_000, at + 1_000])
    assert resting.grown([100.0, 100.0], 1) == pytest.approx([125.0, 100.0], abs=0.01)
