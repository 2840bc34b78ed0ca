"""Variants of a swarm side by side: what is compared, against what, and which sentence follows."""

from kvasir_scenario.report_schema import Report
from kvasir_scenario.swarm_report import SpanPart
from kvasir_scenario.swarm_variants import columns, labels, what_pays
from tests.sim.swarm.swarms import Run, scenario_of


def run_of(*, workers: int, tokens_per_s: float | None, tpot_s: float, policy: str) -> Report:
    """A short run's report with other figures."""
    report = SHORT.model_copy(deep=True)
    assert report.swarm is not None
    peak = SpanPart(start_s=0, stop_s=1, output_tokens_per_s=tokens_per_s, tpot_s=tpot_s)
    swarm = report.swarm.model_copy(update={"workers": workers, "peak": peak, "policy": policy})
    return report.model_copy(update={"swarm": swarm})


SHORT = Run(scenario_of(run={"horizon_s": 5})).report
ALONE = run_of(workers=0, tokens_per_s=100, tpot_s=0.2, policy="dwell")
FAST = run_of(workers=8, tokens_per_s=150, tpot_s=0.1, policy="dwell")
LATE = run_of(workers=8, tokens_per_s=120, tpot_s=0.5, policy="dwell")
SLOW = run_of(workers=8, tokens_per_s=50, tpot_s=0.9, policy="naive")


def test_gain_and_price_are_told_against_the_run_without_workers() -> None:
    shown = {column.heading: column for column in columns([("base", SLOW), ("alone", ALONE)])}
    assert shown["of alone"].values == [0.5, 1.0]
    assert shown["of alone"].texts == ["0.50 x", "1.00 x"]
    assert shown["per token against alone"].texts == ["+700 ms", "0 s"]
    assert shown["peak tokens/s"].values == [50, 100]


def test_without_a_run_without_workers_there_is_nothing_to_tell_gains_against() -> None:
    runs = [("base", FAST), ("other", SLOW)]
    assert not any("alone" in column.heading for column in columns(runs))
    assert what_pays(runs) is None


def test_figures_that_are_nothing_in_every_run_are_left_out() -> None:
    headings = [column.heading for column in columns([("base", FAST), ("alone", ALONE)])]
    assert "wasted/h" not in headings
    assert "peak tokens/s" in headings


def test_a_run_without_a_swarm_has_dashes() -> None:
    bare = SHORT.model_copy(update={"swarm": None})
    for column in columns([("base", FAST), ("bare", bare)]):
        assert column.texts[1] == "-"
        assert column.values[1] is None
    assert labels([("base", FAST), ("bare", bare)]) == ["base", "bare"]


def test_policies_are_named_where_they_differ() -> None:
    assert labels([("a", FAST), ("b", ALONE)]) == ["a", "b"]
    assert labels([("a", FAST), ("b", SLOW)]) == ["a (dwell)", "b (naive)"]


def test_the_sentence_says_who_gains_who_pays_with_time_and_who_loses() -> None:
    runs = [("base", FAST), ("far", LATE), ("farther", SLOW), ("none", ALONE)]
    assert what_pays(runs) == (
        "Remote experts give more tokens, and each sooner: base. "
        "More tokens in total, but each later: far. "
        "Fewer tokens than without workers: farther."
    )


def test_policy_and_distance_are_in_the_report() -> None:
    far = [{"name": "far", "count": 2, "per_expert_s": 0.001, "link": {"latency_s": 0.04},
            "jitter_s": 0.02, "download_bytes_per_s": 1e8}]  # fmt: skip
    short = {"horizon_s": 5}
    part = Run(scenario_of(workers=far, run=short, section={"overlap": 3})).part
    assert part.policy == "dwell + warm rejoin"
    assert part.trips is not None
    assert part.trips.layer_s == 0.1
    assert part.trips.micro_batch_s == 0.2, "two layers in each stage"
    assert part.trips.computing_s > 0.1, "two layers of 50 ms"
    assert part.trips.overlap_needed == 3
    assert part.trips.overlap == 3
    assert part.bound is not None
    assert part.bound.terms["overlap"] < 3 * part.bound.terms["stages"]
    policies = [
        Run(scenario_of(run=short, has_hub=has_hub, hub=hub, coordinator=coordinator)).part.policy
        for has_hub, hub, coordinator in (
            (False, None, None),
            (True, {"warm_rejoin": False}, None),
            (True, {"policy": "naive"}, {"policy": "naive"}),
            (True, {"policy": "naive"}, None),
        )
    ]
    assert policies == ["dwell, no market", "dwell", "naive", "naive, coordinator dwell"]


def test_without_workers_there_is_no_distance() -> None:
    assert Run(scenario_of(workers=[], run={"horizon_s": 5})).part.trips is None
