"""Cancel in every state; a release behind the laps; KV is free when every stage has freed it."""

import pytest

from kvasir_core import BindingLimit, FinishReason, IllegalEvent, Release, ReleaseEnded, RequestId
from tests.core.stories import (
    arrived,
    cancelled,
    check,
    chunk,
    dec,
    deliver,
    finish,
    lap,
    last,
    launch,
    lost,
    plan_of,
    preempt,
    ready,
    release,
    released,
    ring_of,
    tell,
)

GONE = FinishReason.CANCELLED


def test_a_waiting_request_ends_without_a_release() -> None:
    ring = ring_of(plan_of(), arrived(0))
    check(
        ring,
        (arrived(1), []),
        (arrived(2), []),
        (cancelled(1), [finish(1, GONE)]),
        (lap(0), [deliver(0, 0), launch(1, dec(0, 1), last(2, 0, 1))]),
    )
    assert not ring.is_live(RequestId(1))


def test_a_ready_decode_leaves_its_list() -> None:
    ring = ring_of(plan_of(micro_batch_width=1), arrived(0, output=9))
    check(
        ring,
        (arrived(1, prompt=3), []),
        (lap(0), [deliver(0, 0), launch(1, chunk(1, 0, 2), why=BindingLimit.COHORT)]),
        (cancelled(0), [finish(0, GONE), release(0)]),
        (lap(1), [launch(2, last(1, 2, 3))]),
        (released(0), []),
    )


def test_a_prompt_with_rows_left_leaves_its_list() -> None:
    ring = ring_of(plan_of(window=2), arrived(0, prompt=30))
    check(
        ring,
        (cancelled(0), [finish(0, GONE), release(0)]),
        (arrived(1), []),
        (lap(0), [launch(2, last(1, 0, 1))]),
        (lap(1), []),
        (released(0), []),
    )
    assert ring.statistics().kv_blocks_in_use == 1


def test_a_request_in_flight_ends_at_once_and_its_late_token_is_dropped() -> None:
    check(
        ring_of(plan_of(micro_batch_width=2), arrived(0, output=9)),
        (arrived(1, output=9), []),
        (lap(0), [deliver(0, 0), launch(1, dec(0, 1), last(1, 0, 1))]),
        (cancelled(0), [finish(0, GONE), release(0)]),
        # The micro-batch keeps its membership; only 1 gets its token, unchanged.
        (lap(1), [deliver(1, 1), launch(2, dec(1, 1))]),
        (cancelled(1), [finish(1, GONE), release(1)]),
        (lap(2), []),
        (released(0), []),
        (released(1), []),
    )


def test_a_late_end_of_sequence_of_a_cancelled_request_ends_nothing_twice() -> None:
    check(
        ring_of(plan_of(), arrived(0, output=9)),
        (cancelled(0), [finish(0, GONE), release(0)]),
        (lap(0, 0), []),
        (released(0), []),
    )


def test_all_chunks_of_a_cancelled_prompt_come_back_late() -> None:
    ring = ring_of(plan_of(window=3), arrived(0, prompt=12))
    check(
        ring,
        (cancelled(0), [finish(0, GONE), release(0)]),
        (lap(2), []),  # Nobody waits for their order any more.
        (lap(0), []),
        (lap(1), []),
        (released(0), []),
    )
    assert ring.is_idle


def test_a_request_whose_release_is_on_its_way_cannot_be_cancelled_again() -> None:
    ring = ring_of(plan_of(), arrived(0, output=1), lap(0))
    with pytest.raises(IllegalEvent):
        tell(ring, cancelled(0))
    check(ring, (released(0), []))
    with pytest.raises(IllegalEvent):
        tell(ring, cancelled(0))


def test_a_preempted_request_that_waits_can_be_cancelled_before_its_release_is_back() -> None:
    """8 tokens of KV: 1 is preempted, then cancelled; its old blocks return with the release."""
    ring = ring_of(
        plan_of(kv_block=2, kv_tokens=8, window=2),
        arrived(0, prompt=3, output=4),
        arrived(1, prompt=1, output=6),
        lap(0),
        lap(1),
        lap(3),
        lap(2),
    )
    check(
        ring,
        (lap(4), [deliver(4, 1), preempt(1, 3), release(1)]),
        (cancelled(1), [finish(1, GONE)]),
    )
    with pytest.raises(IllegalEvent):
        tell(ring, arrived(1))  # Its number is still in the stages.
    check(ring, (released(1), [launch(5, dec(0, 4))]), (arrived(1), []))


def test_kv_is_not_given_again_before_its_release_has_passed_every_stage() -> None:
    """2 blocks: 0 holds both; the next prompt needs one and waits for the release, not the end."""
    ring = ring_of(plan_of(kv_block=4, kv_tokens=8, row_width=8), arrived(0, prompt=7, output=1))
    check(
        ring,
        (arrived(1, prompt=4), []),
        (lap(0), [deliver(0, 0), finish(0), release(0)]),
        (released(0), [launch(1, last(1, 0, 4))]),
    )


def test_a_release_is_back_only_behind_the_laps_of_its_requests() -> None:
    ring = ring_of(plan_of(), arrived(0), cancelled(0))
    with pytest.raises(IllegalEvent):
        tell(ring, released(0))
    check(ring, (lap(0), []), (released(0), []))


def test_two_that_end_in_one_lap_share_a_release_which_may_come_back_in_parts() -> None:
    ring = ring_of(plan_of(), arrived(0))
    check(
        ring,
        (arrived(1, output=1), []),
        (lap(0), [deliver(0, 0), launch(1, dec(0, 1), last(1, 0, 1))]),
        (lap(1), [deliver(1, 0, 1), finish(0), finish(1), release(0, 1)]),
        (released(1), []),
    )
    assert not ring.is_idle
    check(ring, (released(0), []))
    assert ring.is_idle


@pytest.mark.parametrize(
    ("reason", "counted"),
    [
        (FinishReason.CANCELLED, "cancelled"),
        (FinishReason.DEADLINE, "cancelled"),
        (FinishReason.FAILED, "failed"),
        (FinishReason.STOP, "finished"),
    ],
)
def test_every_reason_is_counted_as_itself(reason: FinishReason, counted: str) -> None:
    ring = ring_of(plan_of(), arrived(0))
    check(ring, (cancelled(0, reason), [finish(0, reason), release(0)]))
    now = ring.statistics()
    assert getattr(now, counted) == now.ended[reason] == sum(now.ended.values()) == 1


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.REFUSED])
def test_only_the_ring_itself_can_say_length_or_refused(reason: FinishReason) -> None:
    ring = ring_of(plan_of(), arrived(0))
    with pytest.raises(IllegalEvent, match=reason.name):
        tell(ring, cancelled(0, reason))


def test_cancel_while_a_stage_is_lost() -> None:
    ring = ring_of(plan_of(), arrived(0, output=9))
    tell(ring, lost(1))
    check(
        ring,
        (cancelled(0), [finish(0, GONE)]),  # It waits for its replay: no stage holds its KV.
        (ready(1), []),
        (arrived(1), [launch(1, last(1, 0, 1), epoch=1)]),
    )


def test_a_number_is_free_again_when_its_release_is_back() -> None:
    ring = ring_of(plan_of(), arrived(0, output=1), lap(0))
    with pytest.raises(IllegalEvent):
        tell(ring, arrived(0))
    tell(ring, ReleaseEnded((RequestId(0),), ring.epoch))
    assert not [o for o in tell(ring, arrived(0)) if isinstance(o, Release)]
