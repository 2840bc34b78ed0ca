"""The cohort packer: even cohorts, both phases served, capped prompts, the lone cohort's wait."""

from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import BindingLimit, Cause, Deliver, FinishReason, Nanos, Ring, TimePassed
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
    launches,
    lost,
    measured,
    plan_of,
    release,
    ring_of,
    tell,
)

COHORT = BindingLimit.COHORT


def gather(ring: Ring, requests: int, *, output: int, prompt: int = 1) -> None:
    """Requests 0, 1, ... come, one lap at a time, until each has its first token."""
    first: set[int] = set()
    for request in range(requests):
        tell(ring, arrived(request, prompt, output))
    while len(first) < requests:
        for order in tell(ring, lap(ring.open[0].id)):
            if isinstance(order, Deliver):
                first |= set(order.requests)


def decodes_open(ring: Ring) -> list[int]:
    return sorted(batch.decodes for batch in ring.open)


def test_five_decodes_in_a_window_of_four_do_not_settle_at_two_two_one() -> None:
    """A window of three left cohorts of 2, 2 and 1; a fourth place opens beside them."""
    plan = plan_of(
        window=3, window_max=4, window_auto=True, row_width=8, micro_batch_width=8, context=256
    )
    ring = Ring(plan)
    gather(ring, 5, output=200)
    while decodes_open(ring) != [1, 2, 2]:
        tell(ring, lap(ring.open[0].id))
    tell(ring, measured([1, 1], [1, 1]))
    assert ring.statistics().window == 4
    sizes = []
    for _ in range(40):
        tell(ring, lap(ring.open[0].id))
        sizes.append(decodes_open(ring))
    assert sizes[3:] == [[1, 1, 1, 2]] * 37


def test_a_lump_of_decodes_is_spread_over_the_free_window_places() -> None:
    """Eight decodes in one place; when three more open, the lump splits two by two."""
    plan = plan_of(
        window=4, window_auto=True, window_max=4, row_width=16, micro_batch_width=16, stages=4
    )
    ring = Ring(plan)
    tell(ring, measured([1, 0, 0, 0], [0, 0, 0, 0]))
    gather(ring, 8, output=60)
    assert decodes_open(ring) == [8]
    tell(ring, measured([1, 1, 1, 1], [0, 0, 0, 0]))
    orders = tell(ring, lap(ring.open[0].id))
    assert [batch.decodes for batch in launches(orders)] == [2, 2, 2, 2]


@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_equal_decodes_keep_even_cohorts_within_one_lap_per_window_place(
    requests: int, before: int, window: int, laps: int
) -> None:
    """Law R10, from the cohorts that another window left behind, wherever they are."""
    plan = plan_of(
        window=before, window_max=6, window_auto=True, row_width=32, micro_batch_width=32,
        context=4096,
    )  # fmt: skip
    ring = Ring(plan)
    gather(ring, requests, output=2000)
    for _ in range(laps):
        tell(ring, lap(ring.open[0].id))
    link = window - 1  # Holds of 1 and 0 and a return of so much: one lap is `window` holds.
    tell(ring, measured([100, 0], [0, 100 * link]))
    assert ring.statistics().window == window
    for _ in range(max(before, window)):
        tell(ring, lap(ring.open[0].id))
    for _ in range(3 * window):
        assert len(ring.open) == min(requests, window)
        assert max(decodes_open(ring)) <= -(-requests // window)
        tell(ring, lap(ring.open[0].id))


def test_a_waiting_prompt_gets_a_row_beside_any_number_of_decodes() -> None:
    ring = Ring(plan_of(row_width=4, micro_batch_width=4, window=1))
    gather(ring, 4, output=9)
    check(ring, (arrived(7, prompt=3, output=1), []))
    number = ring.open[0].id
    assert ring.open[0].decodes == 4
    orders = tell(ring, lap(number))
    assert [(b.decodes, b.prefill_rows) for b in launches(orders)] == [(3, 1)]


def test_at_width_one_the_phases_take_turns() -> None:
    width = BindingLimit.MICRO_BATCH_WIDTH
    check(
        ring_of(plan_of(micro_batch_width=1), arrived(0, output=9)),
        (arrived(1, prompt=5, output=9), []),
        (lap(0), [deliver(0, 0), launch(1, chunk(1, 0, 2), why=COHORT)]),
        (lap(1), [launch(2, dec(0, 1), why=width)]),
        (lap(2), [deliver(2, 0), launch(3, chunk(1, 2, 4), why=COHORT)]),
        (lap(3), [launch(4, dec(0, 2), why=width)]),
        (lap(4), [deliver(4, 0), launch(5, last(1, 4, 5), why=width)]),
        (lap(5), [deliver(5, 1), launch(6, dec(0, 3), why=width)]),
        (lap(6), [deliver(6, 0), launch(7, dec(1, 5), why=width)]),
    )


def test_a_row_width_of_one_names_itself() -> None:
    row = BindingLimit.ROW_WIDTH
    ring = ring_of(plan_of(row_width=1), arrived(0, output=9))
    check(
        ring,
        (arrived(1, prompt=2, output=1), []),
        (lap(0), [deliver(0, 0), launch(1, chunk(1, 0, 1), why=row)]),
        (lap(1), [launch(2, dec(0, 1), why=row)]),
        (lap(2), [deliver(2, 0), launch(3, last(1, 1, 2), why=row)]),
    )
    # Two decodes at row width 1: the second waits for its turn, not for a cohort.
    check(
        ring_of(plan_of(row_width=1), arrived(0, output=9)),
        (arrived(1, output=9), []),
        (lap(0), [deliver(0, 0), launch(1, last(1, 0, 1), why=row)]),
        (lap(1), [deliver(1, 1), launch(2, dec(0, 1), why=row)]),
        (lap(2), [deliver(2, 0), launch(3, dec(1, 1), why=row)]),
    )


def test_prompt_rows_are_capped_while_any_decode_is_live_anywhere() -> None:
    """By default at half the row width; the only decode is in flight when the chunks are cut."""
    ring = ring_of(plan_of(row_width=16, window=3), arrived(0, output=9))
    check(
        ring,
        (lap(0), [deliver(0, 0), launch(1, dec(0, 1))]),
        (
            arrived(1, prompt=18, output=1),
            [launch(2, chunk(1, 0, 8), why=COHORT), launch(3, chunk(1, 8, 16), why=COHORT)],
        ),
        (lap(1, 0), [deliver(1, 0), finish(0, FinishReason.STOP), release(0), launch(4, last(1, 16, 18))]),
    )  # fmt: skip
    # No decode is live any more: chunks are as wide as the micro-batch.
    check(
        ring,
        (lap(2), []),
        (lap(3), []),
        (arrived(2, prompt=30, output=1), [
            launch(5, chunk(2, 0, 16), why=BindingLimit.ROW_WIDTH), launch(6, last(2, 16, 30)),
        ]),
    )  # fmt: skip


def test_the_plans_cap_on_prompt_rows_is_kept() -> None:
    ring = ring_of(plan_of(row_width=16, prefill_rows_max=3), arrived(0, output=9))
    check(
        ring,
        (arrived(1, prompt=2), []),
        (arrived(2, prompt=7), []),
        (lap(0), [deliver(0, 0), launch(1, dec(0, 1), last(1, 0, 2), chunk(2, 0, 1), why=COHORT)]),
        (
            lap(1),
            [deliver(1, 0, 1), launch(2, dec(0, 2), dec(1, 2), chunk(2, 1, 4), why=COHORT)],
        ),
    )


def costly_context(decodes: int, context: int, rows: int, start: int) -> int:
    """A row costs 10, and 1 more for every 10 rows of context before it."""
    return 100 + 10 * decodes + context + rows * (10 + start // 10)


def test_with_a_cost_model_the_chunk_shrinks_as_its_context_grows() -> None:
    """Each micro-batch takes no longer than a full chunk at context 0 beside an even cohort."""
    plan = plan_of(row_width=32, context=256, prefill_rows_max=16)
    ring = ring_of(plan, arrived(0, output=99), predict=costly_context)
    tell(ring, arrived(1, prompt=150))
    chunks = []
    tell(ring, lap(0))
    while ring.open[0].prefill_rows:
        batch = ring.open[0]
        start, rows = batch.starts[-1], batch.rows[-1]
        chunks.append(rows)
        target = costly_context(1, batch.decode_context, 16, 0)
        took = costly_context(1, batch.decode_context, rows, start)
        more = costly_context(1, batch.decode_context, rows + 1, start)
        is_last = start + rows == 150
        assert took <= target or rows == 2, "a solved chunk is at least 1/8 of the cap"
        assert is_last or rows == 16 or more > target
        tell(ring, lap(batch.id))
    assert chunks[0] == 16
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert 2 < chunks[-2] < 16


def test_a_solved_chunk_is_at_least_an_eighth_of_the_cap() -> None:
    plan = plan_of(row_width=32, prefill_rows_max=16, context=256)
    ring = ring_of(plan, arrived(0, output=99), predict=lambda _d, _c, rows, start: rows * start)
    tell(ring, arrived(1, prompt=100))
    tell(ring, lap(0))
    tell(ring, lap(1))
    # The target at context 0 is 0; nothing at a later start meets it.
    assert ring.open[0].rows == (1, 2)


def test_chunks_are_cut_before_any_decode_is_taken_by_the_prompts_own_context() -> None:
    """With the only decode in flight the even cohort's context is taken from the prompt."""
    seen: list[tuple[int, int, int, int]] = []

    def predict(decodes: int, context: int, rows: int, start: int) -> int:
        seen.append((decodes, context, rows, start))
        return rows

    plan = plan_of(row_width=8, window=2)
    ring = ring_of(plan, arrived(0, output=9), lap(0), predict=predict)
    check(ring, (arrived(1, prompt=7), [launch(2, chunk(1, 0, 4), why=COHORT)]))
    assert seen == [(1, 7, 4, 0), (0, 0, 4, 0)]


def test_whole_prompts_are_not_capped() -> None:
    """Without chunked prefill there is nothing to cut, cost model or not."""
    plan = plan_of(row_width=64, context=64, chunked_prefill=False, prefill_rows_max=4)
    ring = ring_of(plan, arrived(0, output=9), predict=costly_context)
    check(
        ring,
        (arrived(1, prompt=50, output=1), []),
        (lap(0), [deliver(0, 0), launch(1, dec(0, 1), last(1, 0, 50))]),
    )


WAIT = 2_000_000


def lone_decode(holds: tuple[int, ...] = ()) -> Ring:
    """Four live decodes in a window of two: three fly together, the fourth is ready, alone."""
    ring = Ring(plan_of(window=2, row_width=8, micro_batch_width=8, cohort_wait_ns=WAIT))
    check(
        ring,
        (arrived(0, 1, 9), [launch(0, last(0, 0, 1))]),
        (arrived(1, 1, 9), [launch(1, last(1, 0, 1))]),
        (arrived(2, 1, 9), []),
        (arrived(3, 1, 9), []),
        (arrived(4, 1, 9), []),
        (
            lap(0),
            [deliver(0, 0), launch(2, dec(0, 1), last(2, 0, 1), last(3, 0, 1), last(4, 0, 1))],
        ),
        (lap(1), [deliver(1, 1), launch(3, dec(1, 1))]),
        (
            lap(2),
            [deliver(2, 0, 2, 3, 4), launch(4, dec(0, 2), dec(2, 1), dec(3, 1), why=COHORT)],
        ),
        (lap(3), [deliver(3, 1), launch(5, dec(4, 1), dec(1, 2))]),
    )
    assert ring.next_wakeup() is None
    if holds:
        tell(ring, measured(holds, [0] * len(holds)))
    check(ring, (lap(5, 4), [deliver(5, 4, 1), finish(4, FinishReason.STOP), release(4)]))
    return ring


def test_a_fast_ring_waits_a_quarter_of_its_longest_hold() -> None:
    ring = lone_decode(holds=(20_000, 40_000))
    assert ring.next_wakeup() == ring.now + 10_000
    ring = lone_decode(holds=(20_000_000, 40_000_000))
    assert ring.next_wakeup() == ring.now + WAIT


def test_a_lone_cohort_waits_two_milliseconds_and_no_longer() -> None:
    ring = lone_decode()
    due = Nanos(ring.now + WAIT)
    assert ring.next_wakeup() == due
    assert ring.causes.cause is Cause.DEPENDENCY
    assert ring.handle(TimePassed(), Nanos(due - 1)) == []
    assert ring.next_wakeup() == due, "the wait does not start anew"
    assert ring.handle(TimePassed(), due) == [launch(6, dec(1, 3))]
    assert ring.next_wakeup() is None


def test_a_lone_cohort_is_joined_by_those_that_come_back_and_by_prompts() -> None:
    check(
        lone_decode(),
        (
            lap(4),
            [
                deliver(4, 0, 2, 3),
                launch(6, dec(1, 3), dec(0, 3), why=COHORT),
                launch(7, dec(2, 2), dec(3, 2)),
            ],
        ),
    )
    check(lone_decode(), (arrived(9), [launch(6, dec(1, 3), last(9, 0, 1))]))


def test_a_lone_decode_that_is_cancelled_or_replayed_leaves_no_wakeup_behind() -> None:
    ring = lone_decode()
    check(ring, (cancelled(1), [finish(1, FinishReason.CANCELLED), release(1)]))
    assert ring.next_wakeup() is None
    assert ring.causes.cause is Cause.DEPENDENCY
    ring = lone_decode()
    tell(ring, lost(0))
    assert ring.next_wakeup() is None
    assert ring.causes.cause is Cause.CAPACITY


def test_a_full_window_ends_the_wait() -> None:
    """Its place is gone: auto made the window smaller. It goes with the next lap."""
    plan = plan_of(
        window=2, window_auto=True, row_width=8, micro_batch_width=8, cohort_wait_ns=WAIT
    )
    ring = Ring(plan)
    for event in (arrived(k, 1, 9) for k in range(5)):
        tell(ring, event)
    for event in (lap(0), lap(1), lap(2), lap(3), lap(5, 4)):
        tell(ring, event)
    assert ring.next_wakeup() is not None
    check(ring, (measured([9, 0], [0, 0]), []))
    assert ring.next_wakeup() is None
    check(
        ring,
        (
            lap(4),
            [deliver(4, 0, 2, 3), launch(6, dec(1, 3), dec(0, 3), dec(2, 2), dec(3, 2))],
        ),
    )


def test_without_a_wait_a_lone_decode_goes_at_once() -> None:
    ring = Ring(plan_of(window=2, row_width=8, micro_batch_width=8))
    for event in (arrived(k, 1, 9) for k in range(5)):
        tell(ring, event)
    for event in (lap(0), lap(1), lap(2), lap(3)):
        tell(ring, event)
    assert launches(tell(ring, lap(5, 4))) == launches([launch(6, dec(1, 3))])
