"""The KV ledger: blocks by admission and growth, exhaustion, preemption that cannot cycle."""

from collections import Counter, deque

import pytest

from kvasir_core import (
    BindingLimit,
    Cause,
    Deliver,
    Finish,
    FinishReason,
    Launch,
    Nanos,
    Preempt,
    Release,
    Ring,
    RingDecision,
)
from kvasir_core.packers import PACKERS
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
    release,
    released,
    ring_of,
    tell,
)

KV = BindingLimit.KV


def blocks(ring: Ring) -> int:
    return ring.statistics().kv_blocks_in_use


def test_a_prompt_takes_its_blocks_at_admission_and_a_decode_one_when_the_last_is_full() -> None:
    ring = ring_of(plan_of(kv_block=4, row_width=2))
    tell(ring, arrived(0, prompt=7, output=4))
    assert blocks(ring) == 2  # For 7 rows, although 2 are in flight.
    for number, held in ((0, 2), (1, 2), (2, 2), (3, 2), (4, 3)):
        tell(ring, lap(number))
        assert blocks(ring) == held, f"after lap {number}"
    # Position 7 fills the second block, position 8 needs a third.


def test_the_scarcest_stage_rules_and_its_last_partial_block_does_not_count() -> None:
    ring = ring_of(plan_of(stages=3, kv_block=4, kv_tokens=(64, 23, 64)))
    assert ring.statistics().kv_blocks_total == 5


def test_admission_leaves_every_running_request_a_block_to_grow() -> None:
    """5 blocks: 0 holds 2 and may grow by one, so a prompt of 3 blocks must wait, of 2 not."""
    plan = plan_of(kv_block=4, kv_tokens=20, row_width=16, window=2)
    check(ring_of(plan, arrived(0, prompt=8, output=4)), (arrived(1, prompt=12, output=4), []))
    check(
        ring_of(plan, arrived(0, prompt=8, output=4)),
        (arrived(1, prompt=8, output=4), [launch(1, last(1, 0, 8))]),
    )


def test_a_decode_that_takes_its_block_in_this_micro_batch_leaves_less_for_a_newcomer() -> None:
    """5 blocks: 0 holds one and takes one now; 2 + 1 to grow no longer fit into what is left."""
    plan = plan_of(kv_block=4, kv_tokens=16, row_width=16)
    check(
        ring_of(plan, arrived(0, prompt=4, output=4)),
        (arrived(1, prompt=8, output=4), []),
        (lap(0), [deliver(0, 0), launch(1, dec(0, 4), why=KV)]),
    )


def exhausted() -> Ring:
    """4 blocks of 2: request 0 holds 2 and needs a third, 1 holds 2 and is younger, in flight."""
    ring = Ring(plan_of(kv_block=2, kv_tokens=8, window=2, row_width=8))
    check(
        ring,
        (arrived(0, prompt=3, output=4), [launch(0, last(0, 0, 3))]),
        (arrived(1, prompt=1, output=6), [launch(1, last(1, 0, 1))]),
        (lap(0), [deliver(0, 0), launch(2, dec(0, 3))]),
        (lap(1), [deliver(1, 1), launch(3, dec(1, 1))]),
        (lap(3), [deliver(3, 1), launch(4, dec(1, 2))]),
    )
    assert blocks(ring) == 4
    # No block for 0's row at position 4; 1 is in flight and cannot be taken now.
    check(ring, (lap(2), [deliver(2, 0)]))
    return ring


def test_on_exhaustion_the_youngest_is_preempted_when_its_lap_ends() -> None:
    ring = exhausted()
    assert ring.causes.cause is Cause.CAPACITY
    check(
        ring,
        (lap(4), [deliver(4, 1), preempt(1, 3), release(1)]),
        # Its blocks are free when the release has passed every stage, not before.
        (released(1), [launch(5, dec(0, 4), why=KV)]),
        (lap(5), [deliver(5, 0), launch(6, dec(0, 5), why=KV)]),
        # 1 is recomputed: its prompt and the tokens it was given.
        (
            lap(6),
            [deliver(6, 0), finish(0), release(0)],
        ),
        (released(0), [launch(7, last(1, 0, 4))]),
        (lap(7), [deliver(7, 1), launch(8, dec(1, 4))]),
    )
    now = ring.statistics()
    assert (now.preemptions, now.rows_recomputed) == (1, 3)


def test_the_youngest_may_be_the_one_that_needs_the_block() -> None:
    """5 blocks of 2; request 1 is the youngest and asks for the sixth: it gives up its own."""
    ring = Ring(plan_of(kv_block=2, kv_tokens=10, window=2, row_width=8))
    check(
        ring,
        (arrived(0, prompt=5, output=2), [launch(0, last(0, 0, 5))]),
        (arrived(1, prompt=1, output=6), [launch(1, last(1, 0, 1))]),
        (lap(1), [deliver(1, 1), launch(2, dec(1, 1))]),
        (lap(2), [deliver(2, 1), launch(3, dec(1, 2))]),
        (lap(3), [deliver(3, 1), launch(4, dec(1, 3))]),
        (lap(4), [deliver(4, 1), preempt(1, 4), release(1)]),
        (lap(0), [deliver(0, 0), launch(5, dec(0, 5), why=KV)]),
    )


def test_a_waiting_request_does_not_overtake_the_preempted_one() -> None:
    ring = exhausted()
    check(
        ring,
        (arrived(2, prompt=1, output=1), []),
        (lap(4), [deliver(4, 1), preempt(1, 3), release(1)]),
        (arrived(3, prompt=1, output=1), []),
        (released(1), [launch(5, dec(0, 4), why=KV)]),
        (cancelled(0), [finish(0, FinishReason.CANCELLED), release(0)]),
        (lap(5), []),
        (released(0), [launch(6, last(1, 0, 4), last(2, 0, 1), why=KV)]),
    )


def test_a_preempted_request_does_not_come_back_before_its_old_kv_is_released() -> None:
    ring = exhausted()
    check(
        ring,
        (lap(4), [deliver(4, 1), preempt(1, 3), release(1)]),
        (cancelled(0), [finish(0, FinishReason.CANCELLED), release(0)]),
        (released(0), []),  # There is room, but stages may still hold 1's old rows.
    )
    assert ring.causes.cause is Cause.CAPACITY
    check(ring, (released(1), [launch(5, last(1, 0, 4))]))


def test_what_ends_meanwhile_saves_the_victim() -> None:
    """Blocks that are on their way out are waited for before anybody is preempted."""
    ring = exhausted()
    check(
        ring,
        (lap(4, 1), [deliver(4, 1), finish(1, FinishReason.STOP), release(1)]),
        (released(1), [launch(5, dec(0, 4))]),
    )
    assert ring.statistics().preemptions == 0


def test_kv_short_and_then_nobody_runs() -> None:
    """The short decode is cancelled, or a stage is lost, while its victim is in flight."""
    ring = exhausted()
    check(
        ring,
        (cancelled(0), [finish(0, FinishReason.CANCELLED), release(0)]),
        (cancelled(1), [finish(1, FinishReason.CANCELLED), release(1)]),
        (lap(4), []),
        (released(0, 1), []),
    )
    assert ring.is_idle
    ring = exhausted()
    orders = tell(ring, lost(1))
    assert [type(order).__name__ for order in orders] == ["BeginEpoch", "Preempt", "Preempt"]
    assert blocks(ring) == 0


def test_short_decodes_that_still_fit_go_and_the_victim_follows() -> None:
    """Of two ready decodes the first has room: it goes, then the youngest is preempted."""
    ring = Ring(plan_of("greedy", kv_block=2, kv_tokens=8, window=2, row_width=8))
    for event in (
        arrived(0, prompt=2, output=6),
        arrived(1, prompt=2, output=6),
    ):
        tell(ring, event)
    check(
        ring,
        (lap(0), [deliver(0, 0), launch(2, dec(0, 2))]),
        (lap(1), [deliver(1, 1), launch(3, dec(1, 2))]),
        (lap(2), [deliver(2, 0), launch(4, dec(0, 3))]),
        (lap(4), [deliver(4, 0)]),
        (lap(3), [deliver(3, 1), preempt(1, 3), release(1)]),
    )


def test_decodes_behind_the_victim_that_have_room_go_on() -> None:
    """4 blocks of 2, one decode a micro-batch: 1 is the longest ready, short, and the youngest."""
    ring = Ring(plan_of(kv_block=2, kv_tokens=8, micro_batch_width=1))
    width = BindingLimit.MICRO_BATCH_WIDTH
    check(
        ring,
        (arrived(0, prompt=3, output=4), [launch(0, last(0, 0, 3))]),
        (arrived(1, prompt=1, output=5), []),
        (lap(0), [deliver(0, 0), launch(1, last(1, 0, 1), why=width)]),
        (lap(1), [deliver(1, 1), launch(2, dec(0, 3), why=width)]),
        (lap(2), [deliver(2, 0), launch(3, dec(1, 1), why=width)]),
        (lap(3), [deliver(3, 1), launch(4, dec(0, 4), why=width)]),
        (lap(4), [deliver(4, 0), preempt(1, 2), release(1), launch(5, dec(0, 5), why=KV)]),
    )


def test_a_prompt_in_flight_is_a_victim_when_all_its_chunks_are_back() -> None:
    """6 blocks of 2: 0 grows to its fourth while 1, with three, has two chunks in the ring."""
    ring = Ring(plan_of(kv_block=2, kv_tokens=12, window=3, prefill_rows_max=3))
    check(
        ring,
        (arrived(0, prompt=2, output=10), [launch(0, last(0, 0, 2))]),
        (lap(0), [deliver(0, 0), launch(1, dec(0, 2))]),
        (
            arrived(1, prompt=6, output=2),
            [launch(2, chunk(1, 0, 3), why=BindingLimit.COHORT), launch(3, last(1, 3, 6))],
        ),
        (lap(1), [deliver(1, 0), launch(4, dec(0, 3))]),
        (lap(4), [deliver(4, 0), launch(5, dec(0, 4))]),
        (lap(5), [deliver(5, 0), launch(6, dec(0, 5))]),
        (lap(6), [deliver(6, 0)]),
        (lap(2), []),
        (lap(3), [deliver(3, 1), preempt(1, 6), release(1)]),
        (released(1), [launch(7, dec(0, 6), why=KV)]),
    )


@pytest.mark.parametrize("packer", sorted(PACKERS))
@pytest.mark.parametrize("block", [1, 10, 16])
def test_p3_three_requests_that_do_not_fit_together_all_finish(packer: str, block: int) -> None:
    """KV for 100 tokens, three requests that need 70 each at their end."""
    plan = plan_of(
        packer, kv_tokens=100, kv_block=block, window=2, row_width=64, context=256,
        micro_batch_width=8,
    )  # fmt: skip
    ring = Ring(plan)
    preempted: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    todo: deque[RingDecision] = deque()
    for request in range(3):
        todo += tell(ring, arrived(request, prompt=30, output=40))
    ended = []
    while todo:
        order = todo.popleft()
        match order:
            case Launch(batch):
                todo += tell(ring, lap(batch.id))
            case Release(requests):
                todo += tell(ring, released(*requests))
            case Preempt(request, rows_lost):
                preempted[request] += 1
                assert rows_lost >= 30
            case Deliver(_, requests):
                tokens.update(requests)
            case _:
                assert isinstance(order, Finish)
                ended.append((order.request, order.reason))
        assert blocks(ring) * block <= 100
    assert sorted(ended) == [(request, FinishReason.LENGTH) for request in range(3)]
    assert tokens == {0: 40, 1: 40, 2: 40}
    assert preempted[0] == 0, "the oldest is never preempted"
    assert preempted.total() <= 12
    assert ring.is_idle
    peak = ring.statistics().kv_blocks_peak
    assert plan.kv_blocks - 1 <= peak <= plan.kv_blocks


def test_p3_preempts_at_all() -> None:
    """Two of the three run together until the ledger is full: not a reservation policy."""
    ring = Ring(plan_of(kv_tokens=100, kv_block=1, window=2, row_width=64, context=256))
    for request in range(3):
        tell(ring, arrived(request, prompt=30, output=40))
    while ring.open and not ring.statistics().preemptions:
        ring.handle(lap(ring.open[0].id), Nanos(ring.now + 1))
    assert ring.statistics().kv_blocks_peak == 100
