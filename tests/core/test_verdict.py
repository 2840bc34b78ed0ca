"""Each kind of verdict, and each step of its precedence."""

from dataclasses import replace
from typing import Any

import pytest

from kvasir_core.causes import Cause
from kvasir_core.microbatch import BindingLimit
from kvasir_core.verdict import (
    GROWTH_SHARE,
    QueueFacts,
    RunFacts,
    StageTimes,
    VerdictKind,
    judge,
)

ELAPSED = 1_000_000


def stage(
    busy: float, *, credit: float = 0, experts: float = 0, cause: Cause = Cause.DEPENDENCY
) -> StageTimes:
    """Shares of the time; what is left over is starved for one cause."""
    parts = [round(share * ELAPSED) for share in (busy, credit, experts)]
    return StageTimes(
        busy_ns=parts[0],
        blocked_by_credit_ns=parts[1],
        blocked_by_experts_ns=parts[2],
        starved_by_ns={cause: ELAPSED - sum(parts)},
    )


def facts(*busy: float, **changes: Any) -> RunFacts:
    """Four stages at 75 %, half of the micro-batches with nobody else waiting."""
    known: dict[str, Any] = {
        "elapsed_ns": ELAPSED,
        "stages": tuple(stage(share) for share in busy or (0.75,) * 4),
        "binding": {BindingLimit.NOTHING_WAITING: 70, BindingLimit.ROW_WIDTH: 30},
        "spans_mean": 8.0,
        "micro_batch_width": 16,
        "rows_mean": 100.0,
        "row_width": 512,
        "queue": QueueFacts(),
        "offered": 100,
        "finished": 100,
        "waiting": 0,
        "running": 0,
        "kv_blocks_peak": 50,
        "kv_blocks_total": 100,
        "preemptions": 0,
    }
    return RunFacts(**{**known, **changes})


GROWING = QueueFacts(
    arrivals=100, grown=30.0, earlier_mean=5.0, later_mean=20.0, occupied_share=1.0, length_max=31
)
KV_LIMITED = {BindingLimit.KV: 30, BindingLimit.NOTHING_WAITING: 70}
PRESSED = {BindingLimit.MICRO_BATCH_WIDTH: 60, BindingLimit.NOTHING_WAITING: 40}
FED = {BindingLimit.NOTHING_WAITING: 100}


def kind(run: RunFacts) -> VerdictKind:
    return judge(run).kind


def test_a_run_without_a_micro_batch_is_idle() -> None:
    verdict = judge(facts(binding={}, offered=3))
    assert verdict.kind is VerdictKind.IDLE
    assert verdict.evidence == ("no micro-batch was composed; 3 requests were offered",)


def test_a_run_of_no_time_is_idle() -> None:
    assert kind(facts(elapsed_ns=0)) is VerdictKind.IDLE


def test_a_growing_queue_is_overload_and_says_first_that_results_depend_on_the_horizon() -> None:
    verdict = judge(facts(queue=GROWING, waiting=20, running=5, finished=75))
    assert verdict.kind is VerdictKind.OVERLOADED
    assert "was still growing: all results depend on the horizon" in verdict.evidence[0]
    assert "grew by 30.0 requests while 100 arrived" in verdict.evidence[1]
    assert "75 of 100 requests finished; at the end 20 waited and 5 ran" in verdict.evidence[2]


def test_an_overload_that_drained_in_the_end_is_still_one() -> None:
    verdict = judge(facts(queue=GROWING))
    assert verdict.kind is VerdictKind.OVERLOADED
    assert "grew as long as requests arrived: all results depend" in verdict.evidence[0]


@pytest.mark.parametrize(
    "change",
    [
        {"grown": 0.9, "arrivals": 10},  # Less than a request.
        {"grown": GROWTH_SHARE * 100 - 0.01},  # Noise, for so many arrivals.
        {"later_mean": 6.0},  # No longer than before.
        {"occupied_share": 0.79},  # The queue emptied again and again.
    ],
)
def test_a_queue_that_does_not_grow_is_no_overload(change: dict[str, float]) -> None:
    assert kind(facts(queue=replace(GROWING, **change))) is VerdictKind.BALANCED  # type: ignore[arg-type]


def test_overload_goes_before_everything_and_names_what_holds_the_ring_back() -> None:
    def reason(run: RunFacts) -> str:
        verdict = judge(replace(run, queue=GROWING))
        assert verdict.kind is VerdictKind.OVERLOADED
        return verdict.evidence[3]

    assert "is KV: KV stopped 30.0% of micro-batches" in reason(facts(binding=KV_LIMITED))
    assert "is a link: link 1 carried bytes for 95.0%" in reason(
        facts(link_busy_shares=(0.1, 0.95))
    )
    assert "is one stage: stage 2 worked 95.0%" in reason(facts(0.5, 0.5, 0.95))
    assert "empty-handed 75.0%" in reason(facts(0.25, 0.25))
    assert "stopped filling" in reason(facts())


def test_an_overload_led_by_one_stage_names_it() -> None:
    assert judge(facts(0.5, 0.5, 0.95, queue=GROWING)).stage == 2
    assert judge(facts(queue=GROWING)).stage is None


def test_kv_that_stops_every_fourth_micro_batch_is_the_bound() -> None:
    verdict = judge(facts(binding=KV_LIMITED, kv_blocks_peak=99, preemptions=2))
    assert verdict.kind is VerdictKind.KV_BOUND
    assert "99 of 100 blocks were in use at the peak, and 2 preemptions" in verdict.evidence[0]
    few = {BindingLimit.KV: 24, BindingLimit.NOTHING_WAITING: 76}
    assert kind(facts(binding=few)) is VerdictKind.BALANCED


def test_evictions_from_a_full_cache_are_kv_bound_but_not_those_of_a_lost_stage() -> None:
    assert kind(facts(preemptions=6, kv_blocks_peak=95)) is VerdictKind.KV_BOUND
    assert kind(facts(preemptions=5, kv_blocks_peak=95)) is VerdictKind.BALANCED
    verdict = judge(facts(preemptions=6, kv_blocks_peak=89))
    assert verdict.kind is VerdictKind.BALANCED
    assert "6 requests lost their KV and were recomputed" in verdict.evidence


def test_kv_goes_before_links_and_stages() -> None:
    run = facts(0.5, 0.99, binding=KV_LIMITED, link_busy_shares=(0.999,))
    assert kind(run) is VerdictKind.KV_BOUND


def test_a_link_that_is_busier_than_every_stage_is_the_bound() -> None:
    verdict = judge(facts(0.5, 0.5, link_busy_shares=(0.3, 0.9)))
    assert verdict.kind is VerdictKind.LINK_BOUND
    expected = "link 1 carried bytes for 90.0% of the time; the busiest stage worked 50.0%"
    assert verdict.evidence[0] == expected


def test_a_link_that_blocks_its_sender_and_starves_its_receiver_is_the_bound() -> None:
    late = stage(0.6, cause=Cause.UPSTREAM)
    verdict = judge(facts(stages=(stage(0.6), stage(0.6, credit=0.3), late)))
    assert verdict.kind is VerdictKind.LINK_BOUND
    assert verdict.evidence[0] == (
        "stage 1 waited 30.0% of the time for a credit over link 1, "
        "while stage 2 waited 40.0% for what was on its way"
    )
    seldom = (stage(0.6, credit=0.19), late)
    assert kind(facts(stages=seldom)) is VerdictKind.BALANCED
    fed = (stage(0.6, credit=0.3), stage(0.91, cause=Cause.UPSTREAM))
    assert kind(facts(stages=fed)) is VerdictKind.BOTTLENECKED


def test_a_stage_blocked_by_a_full_neighbour_is_not_blocked_by_the_link() -> None:
    slow = stage(0.95, cause=Cause.UPSTREAM)
    verdict = judge(facts(stages=(stage(0.5, credit=0.4), slow)))
    assert (verdict.kind, verdict.stage) == (VerdictKind.BOTTLENECKED, 1)


def test_a_busy_link_beside_a_busier_stage_is_not_the_bound() -> None:
    assert kind(facts(0.5, 0.95, link_busy_shares=(0.9,))) is VerdictKind.BOTTLENECKED
    assert kind(facts(link_busy_shares=(0.79,))) is VerdictKind.BALANCED


def test_a_stage_that_works_far_more_than_the_others_is_the_bottleneck() -> None:
    verdict = judge(facts(0.996, 0.597, 0.398))  # P5(c).
    assert (verdict.kind, verdict.stage) == (VerdictKind.BOTTLENECKED, 0)
    assert verdict.evidence[0] == ("stage 0 worked 99.6% of the time, the others 49.8% on average")


def test_waiting_for_experts_is_work_and_waiting_for_credit_is_not() -> None:
    rest = (stage(0.4), stage(0.4))
    held = facts(stages=(*rest, stage(0.3, experts=0.6)))
    assert judge(held).stage == 2
    full = facts(stages=(*rest, stage(0.3, credit=0.6)))
    assert kind(full) is not VerdictKind.BOTTLENECKED


def test_under_pressure_a_slow_stage_leads_at_half_of_the_time() -> None:
    assert kind(facts(0.6, 0.4, binding=PRESSED)) is VerdictKind.BOTTLENECKED
    assert kind(facts(0.6, 0.4)) is VerdictKind.STARVED


def test_equal_stages_have_no_bottleneck() -> None:
    assert kind(facts(0.99, 0.98, 0.99, binding=PRESSED)) is VerdictKind.SATURATED


def test_a_ring_that_hardly_ran_for_want_of_requests_is_idle() -> None:
    idle = (stage(0.005, cause=Cause.NO_DEMAND), stage(0.005))
    verdict = judge(facts(stages=idle))
    assert verdict.kind is VerdictKind.IDLE
    assert "the head had no request for 99.5% of it" in verdict.evidence[0]
    busier = (stage(0.02, cause=Cause.NO_DEMAND), stage(0.02))
    assert kind(facts(stages=busier)) is VerdictKind.STARVED


def test_a_ring_that_hardly_ran_though_requests_waited_is_not_idle() -> None:
    assert kind(facts(0.005, 0.005)) is VerdictKind.STARVED


def test_one_request_in_a_ring_of_four_is_starved_by_dependency_not_saturated() -> None:
    verdict = judge(facts(0.25, 0.25, 0.25, 0.25, binding=FED))  # P1(a).
    assert verdict.kind is VerdictKind.STARVED
    assert verdict.evidence[0] == ("stages were empty-handed 75.0% of the time (dependency 75.0%)")


def test_busy_share_alone_does_not_decide() -> None:
    """The golden ring is as busy at 23 % of its capacity as at 100 %."""
    assert kind(facts(binding=FED)) is VerdictKind.STARVED
    assert kind(facts()) is VerdictKind.BALANCED
    assert kind(facts(binding=PRESSED)) is VerdictKind.SATURATED
    assert kind(facts(binding=PRESSED, queue=GROWING)) is VerdictKind.OVERLOADED


def test_a_ring_with_little_time_to_spare_is_not_starved() -> None:
    assert kind(facts(0.84, 0.84, binding=FED)) is VerdictKind.STARVED
    assert kind(facts(0.86, 0.86, binding=FED)) is VerdictKind.BALANCED


def test_a_busy_ring_that_takes_all_that_comes_is_balanced() -> None:
    verdict = judge(facts(0.93, 0.93, binding=FED))
    assert verdict.kind is VerdictKind.BALANCED
    assert verdict.evidence[0] == "stages worked 93.0% to 93.0% of the time"


@pytest.mark.parametrize(
    "change", [{"spans_mean": 15.0}, {"rows_mean": 480.0}, {"binding": PRESSED}]
)
def test_full_micro_batches_are_saturation_though_nobody_is_left_behind(
    change: dict[str, Any],
) -> None:
    assert kind(facts(**{"binding": FED, **change})) is VerdictKind.SATURATED


def test_a_width_of_one_is_always_full_and_says_nothing() -> None:
    one = {"spans_mean": 1.0, "micro_batch_width": 1, "rows_mean": 1.0, "row_width": 1}
    assert kind(facts(binding=FED, **one)) is VerdictKind.STARVED


def test_the_cohort_cap_spreads_decodes_and_is_no_pressure() -> None:
    assert kind(facts(binding={BindingLimit.COHORT: 100})) is VerdictKind.STARVED


def test_unfinished_requests_and_the_commonest_limits_are_part_of_the_evidence() -> None:
    verdict = judge(facts(waiting=2, running=1))
    assert verdict.evidence[-1] == "3 of 100 requests were unfinished at the end"
    assert verdict.evidence[-2] == (
        "micro-batches stopped filling because of: nothing waiting 70.0%, row width 30.0%"
    )


def test_evidence_does_not_depend_on_the_order_of_the_counts() -> None:
    limits = [(limit, 10) for limit in BindingLimit]
    forward, backward = dict(limits), dict(reversed(limits))
    assert judge(facts(binding=forward)) == judge(facts(binding=backward))
