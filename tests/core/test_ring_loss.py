"""A stage is lost at any moment: epochs, replay of prompt and given tokens, late frames dropped."""

import pytest

from kvasir_core import BindingLimit, Cause, FinishReason, IllegalEvent
from tests.core.stories import (
    arrived,
    begin_epoch,
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


def test_an_idle_ring_only_begins_an_epoch() -> None:
    ring = ring_of(plan_of())
    check(
        ring,
        (lost(1), [begin_epoch(1, 1)]),
        (arrived(0), []),  # No stage 1: nothing can be computed.
    )
    assert ring.causes.cause is Cause.CAPACITY
    check(ring, (ready(1), [launch(0, last(0, 0, 1), epoch=1)]))


def test_a_replay_is_a_prefill_of_the_prompt_and_the_tokens_given() -> None:
    check(
        ring_of(plan_of(row_width=8), arrived(0, prompt=3, output=5)),
        (lap(0), [deliver(0, 0), launch(1, dec(0, 3))]),
        (lap(1), [deliver(1, 0), launch(2, dec(0, 4))]),
        # Two tokens given, the third in flight: 3 + 2 rows are replayed, their last gives the third.
        (lost(0), [begin_epoch(1, 0), preempt(0, 5)]),
        (ready(0), [launch(3, last(0, 0, 5), epoch=1)]),
        (lap(3, epoch=1), [deliver(3, 0), launch(4, dec(0, 5), epoch=1)]),
        (lap(4, epoch=1), [deliver(4, 0), launch(5, dec(0, 6), epoch=1)]),
        (lap(5, epoch=1), [deliver(5, 0), finish(0), release(0, epoch=1)]),
    )


def test_frames_and_releases_of_an_older_epoch_are_dropped() -> None:
    check(
        ring_of(plan_of(window=2), arrived(0, output=1), arrived(1, output=9)),
        (lap(0), [deliver(0, 0), finish(0), release(0)]),
        (lost(0), [begin_epoch(1, 0), preempt(1, 1)]),
        (lap(1), []),
        (released(0), []),
        (ready(0), [launch(2, last(1, 0, 1), epoch=1)]),
        (lap(1), []),
        (lap(2), []),  # The right number of the wrong epoch.
        (lap(2, epoch=1), [deliver(2, 1), launch(3, dec(1, 1), epoch=1)]),
    )


def test_everybody_is_replayed_in_order_of_arrival_before_those_who_waited() -> None:
    """0 decodes, 1 is in the middle of its prompt, 2 waits; chunks were in flight."""
    ring = ring_of(plan_of(window=2, running_max=2), arrived(0, output=9))
    check(
        ring,
        (lap(0), [deliver(0, 0), launch(1, dec(0, 1))]),
        (arrived(1, prompt=6, output=1), [launch(2, chunk(1, 0, 2), why=BindingLimit.COHORT)]),
        (arrived(2, output=1), []),
        (lost(1), [begin_epoch(1, 1), preempt(0, 2), preempt(1, 2)]),
        (
            ready(1),
            [
                launch(3, last(0, 0, 2), chunk(1, 0, 2), why=BindingLimit.ROW_WIDTH, epoch=1),
                launch(4, last(1, 2, 6), why=BindingLimit.ROW_WIDTH, epoch=1),
            ],
        ),
    )


def test_a_ready_decode_that_waits_for_its_turn_is_replayed_once() -> None:
    """Micro-batches of one: 0 is ready, 1 flies when the stage is lost."""
    width = BindingLimit.MICRO_BATCH_WIDTH
    check(
        ring_of(plan_of(micro_batch_width=1), arrived(0, output=9)),
        (arrived(1, output=9), []),
        (lap(0), [deliver(0, 0), launch(1, last(1, 0, 1), why=width)]),
        (lost(0), [begin_epoch(1, 0), preempt(0, 1), preempt(1, 1)]),
        (ready(0), [launch(2, last(0, 0, 2), why=width, epoch=1)]),
        (lap(2, epoch=1), [deliver(2, 0), launch(3, last(1, 0, 1), why=width, epoch=1)]),
        (lap(3, epoch=1), [deliver(3, 1), launch(4, dec(0, 2), why=width, epoch=1)]),
    )


def test_a_second_loss_during_recovery_starts_over_and_names_both() -> None:
    check(
        ring_of(plan_of(stages=3), arrived(0, prompt=2, output=9)),
        (lost(2), [begin_epoch(1, 2), preempt(0, 2)]),
        (lost(0), [begin_epoch(2, 0, 2)]),
        (ready(2), []),
        (ready(0), [launch(1, last(0, 0, 2), epoch=2)]),
    )


def test_a_loss_during_the_replay_loses_no_token() -> None:
    ring = ring_of(plan_of(), arrived(0, prompt=2, output=3), lap(0))
    check(
        ring,
        (lost(1), [begin_epoch(1, 1), preempt(0, 3)]),
        (ready(1), [launch(2, last(0, 0, 3), epoch=1)]),
        (lost(1), [begin_epoch(2, 1), preempt(0, 3)]),
        (ready(1), [launch(3, last(0, 0, 3), epoch=2)]),
        (lap(3, epoch=2), [deliver(3, 0), launch(4, dec(0, 3), epoch=2)]),
        (lap(4, epoch=2), [deliver(4, 0), finish(0), release(0, epoch=2)]),
    )


def test_the_same_stage_may_be_declared_lost_twice() -> None:
    check(
        ring_of(plan_of(), arrived(0)),
        (lost(1), [begin_epoch(1, 1), preempt(0, 1)]),
        (lost(1), [begin_epoch(2, 1)]),
        (ready(1), [launch(1, last(0, 0, 1), epoch=2)]),
    )


def test_kv_on_its_way_out_is_free_at_once_because_every_stage_drops_all() -> None:
    ring = ring_of(plan_of(), arrived(0, output=1), lap(0))
    assert not ring.is_idle
    check(ring, (lost(0), [begin_epoch(1, 0)]))
    assert ring.is_idle
    check(ring, (ready(0), []), (arrived(0, output=1), [launch(1, last(0, 0, 1), epoch=1)]))


def test_a_preempted_request_needs_no_release_after_a_loss() -> None:
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
        (lost(0), [begin_epoch(1, 0), preempt(0, 4)]),
        (released(1), []),  # Of the old epoch.
        (
            ready(0),
            [
                launch(5, chunk(0, 0, 4), why=BindingLimit.ROW_WIDTH, epoch=1),
                launch(6, last(0, 4, 5), why=BindingLimit.KV, epoch=1),
            ],
        ),
    )


def test_stop_and_cancel_work_on_in_the_next_epoch() -> None:
    check(
        ring_of(plan_of(), arrived(0, output=9), lost(0)),
        (arrived(1, output=9), []),
        (cancelled(1), [finish(1, FinishReason.CANCELLED)]),
        (ready(0), [launch(1, last(0, 0, 1), epoch=1)]),
        (
            lap(1, 0, epoch=1),
            [deliver(1, 0), finish(0, FinishReason.STOP), release(0, epoch=1)],
        ),
        (released(0, epoch=1), []),
    )


def test_sarathi_replays_a_prompt_whose_only_chunk_was_in_flight() -> None:
    check(
        ring_of(plan_of("sarathi"), arrived(0, prompt=6)),
        (lost(0), [begin_epoch(1, 0), preempt(0, 4)]),
        (ready(0), [launch(1, chunk(0, 0, 4), why=BindingLimit.ROW_WIDTH, epoch=1)]),
        (lap(1, epoch=1), [launch(2, last(0, 4, 6), epoch=1)]),
    )


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_that_the_plan_does_not_have_cannot_be_lost(stage: int) -> None:
    with pytest.raises(IllegalEvent):
        tell(ring_of(plan_of()), lost(stage))


def test_only_a_lost_stage_can_become_ready() -> None:
    ring = ring_of(plan_of())
    with pytest.raises(IllegalEvent):
        tell(ring, ready(0))
    tell(ring, lost(0))
    with pytest.raises(IllegalEvent):
        tell(ring, ready(1))
    tell(ring, ready(0))
    with pytest.raises(IllegalEvent):
        tell(ring, ready(0))


def test_a_frame_of_an_epoch_to_come_is_illegal() -> None:
    ring = ring_of(plan_of(), arrived(0, output=1))
    with pytest.raises(IllegalEvent):
        tell(ring, lap(0, epoch=1))
    tell(ring, lap(0))
    with pytest.raises(IllegalEvent):
        tell(ring, released(0, epoch=1))


def test_statistics_name_the_lost_stages_and_count_replays() -> None:
    ring = ring_of(plan_of(stages=3), arrived(0, prompt=3), lost(2), lost(1))
    now = ring.statistics()
    assert (now.lost, now.epoch, now.preemptions, now.rows_recomputed) == ((1, 2), 2, 1, 3)
