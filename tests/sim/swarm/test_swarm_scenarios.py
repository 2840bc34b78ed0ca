"""What the shipped scenarios of the swarm must show."""

from math import log
from pathlib import Path

import pandas as pd
import pytest

from kvasir_scenario.report_schema import Report
from kvasir_scenario.swarm_report import SwarmPart
from kvasir_sim.run import run
from kvasir_sim.simulate import simulate
from tests.sim.shipped import shipped

pytestmark = pytest.mark.timeout(
    1200
)  # A minute of computing each, on a machine that may be crowded.

CERTAIN = 1e-4  # Chance that an honest policy fails a statistical bound.


def part_of(report: Report) -> SwarmPart:
    assert report.swarm is not None
    return report.swarm


def peak(part: SwarmPart) -> float:
    assert part.peak.output_tokens_per_s is not None
    return part.peak.output_tokens_per_s


def test_moe_swarm_helps_at_the_peak_costs_nothing_at_rest_and_goes_again(tmp_path: Path) -> None:
    result = run(shipped("moe_swarm"), tmp_path / "run", plots=True, processes=0)
    swarm, alone = part_of(result.report), part_of(result.report.variants[0].report)
    assert peak(swarm) >= 1.5 * peak(alone)
    assert swarm.bound is not None
    assert peak(swarm) >= 0.8 * swarm.bound.output_tokens_per_s
    assert peak(alone) <= 1.05 * swarm.bound.alone_output_tokens_per_s
    bare = simulate(shipped("moe_swarm", ["experts=null", "run.horizon_s=180"]))
    at_rest = simulate(shipped("moe_swarm", ["run.horizon_s=180"]))
    assert bare.swarm is None
    assert at_rest.latency.itl_s.mean == pytest.approx(bare.latency.itl_s.mean, rel=0.01)
    for moment in (swarm.time_to_first_relief_s, swarm.time_to_full_coverage_s):
        assert moment is not None
        assert moment < 180
    assert swarm.time_to_contraction_s is not None
    assert swarm.wasted_downloads == swarm.recruits_above_target == 0
    timeline: pd.DataFrame = result.swarm
    assert timeline.target.max() == swarm.target_max == 2
    assert timeline.workers_covering.iloc[-1] == 0
    assert timeline.remote_share[timeline.is_engaged].max() > 0.95
    assert (tmp_path / "run" / "elastic_curve.png").stat().st_size > 10_000


def flapping(overrides: list[str], seed: int) -> SwarmPart:
    scenario = shipped("flapping_load", ["what_if={}", *overrides], seed=seed)
    return part_of(simulate(scenario))


def check_flapping(part: SwarmPart) -> None:
    assert part.target_changes_per_hour is not None
    assert part.wasted_downloads_per_hour is not None
    assert part.target_changes_per_hour <= 6
    assert part.wasted_downloads_per_hour <= 2
    assert part.recruits_above_target == 0


def test_flapping_load_moves_the_market_little_and_the_naive_rule_much() -> None:
    part = flapping(["run.horizon_s=21600"], seed=1)
    check_flapping(part)
    rules = [
        "experts.hub.policy=naive", "experts.coordinator.policy=naive",
        "experts.workers.0.keeps_slices=false",
    ]  # fmt: skip
    naive = flapping(["run.horizon_s=3600", *rules], seed=1)
    assert naive.downloads_per_hour is not None
    assert naive.downloads_per_hour > 60
    assert naive.recruits_above_target > 10
    assert naive.wasted_downloads > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_flapping_load_for_twelve_hours(seed: int) -> None:
    check_flapping(flapping([], seed))


def test_every_kind_of_liar_is_quarantined_within_the_statistical_bound() -> None:
    check_liars(seed=1)


def check_liars(seed: int) -> None:
    scenario = shipped("liars", seed=seed)
    part = part_of(simulate(scenario))
    assert scenario.experts is not None
    share = scenario.experts.coordinator.check_share
    bound = log(CERTAIN) / log(1 - share)  # Wrong answers until one is checked.
    for honesty, of_kind in part.quarantined.items():
        if honesty == "honest":
            assert of_kind.quarantined == 0
            continue
        assert of_kind.quarantined == of_kind.workers, honesty
        assert of_kind.wrong_accepted_max is not None
        assert of_kind.wrong_accepted_max <= bound
        if honesty not in ("turncoat", "sometimes"):
            assert of_kind.wrong_accepted_max == 0, "its trial already shows it"
    assert part.output_error_mean is not None
    assert part.output_error_mean <= scenario.experts.coordinator.tolerance


def test_an_outage_of_a_minute_is_not_noticed_until_the_hub_is_back(tmp_path: Path) -> None:
    scenario = shipped("hub_outage", ["run.horizon_s=600"])
    timeline = run(scenario, tmp_path / "run").swarm.set_index("at_s")
    assert timeline.is_engaged.loc[300:].all()
    assert timeline.remote_share.loc[300:360].min() > 0.8, "D6: the last map holds"
    assert timeline.remote_share.loc[390:].min() > 0.8, "everyone has dialled again"


def test_overlap_decides_where_remote_experts_pay() -> None:
    """Over a LAN from one micro-batch on; over a WAN from four on, and with sixteen well."""
    short = "run.horizon_s=70"
    wan = "experts.workers.0.link.latency_s=0.02"
    variants = {
        "alone": ["experts.workers=[]"],
        "lan-1": [short],
        "lan-2": [short, "experts.overlap=2"],
        "wan-1": [wan],
        "wan-4": [wan, "experts.overlap=4"],
        "wan-16": [wan, "experts.overlap=16"],
    }
    rates, paces = {}, {}
    for name, overrides in variants.items():
        part = part_of(simulate(shipped("overlap", ["what_if={}", *overrides])))
        rates[name], paces[name] = peak(part), part.peak.tpot_s
        if part.trips is not None:
            assert part.bound is not None
            assert rates[name] < part.bound.output_tokens_per_s
    assert rates["lan-1"] > 3 * rates["alone"]
    assert rates["lan-2"] > 1.4 * rates["lan-1"]
    assert rates["wan-1"] < 0.5 * rates["alone"]
    assert rates["wan-4"] > rates["alone"]
    assert rates["wan-16"] > 3 * rates["alone"]
    alone, far = paces["alone"], paces["wan-16"]
    assert alone is not None
    assert far is not None
    assert far > alone, "more tokens in total, and each later"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_liars_for_other_seeds(seed: int) -> None:
    check_liars(seed)


@pytest.mark.nightly
def test_phones_help_and_come_and_go() -> None:
    swarm = part_of(simulate(shipped("phone_swarm")))
    alone = part_of(simulate(shipped("phone_swarm", ["experts.workers=[]"])))
    assert peak(swarm) > 1.5 * peak(alone)
    assert swarm.slice_stops > 50
