"""The other packers: drained, greedy, and sarathi's rules that the golden run does not exercise."""

from kvasir_core import BindingLimit, FinishReason, Ring
from tests.core.stories import (
    arrivals,
    arrived,
    check,
    chunk,
    dec,
    deliver,
    finish,
    lap,
    last,
    launch,
    launches,
    measured,
    plan_of,
    preempt,
    release,
    ring_of,
    tell,
)


def test_drained_opens_one_micro_batch_whatever_the_window() -> None:
    ring = ring_of(plan_of("drained", window=4))
    check(
        ring,
        (arrived(0, prompt=8), [launch(0, chunk(0, 0, 4), why=BindingLimit.ROW_WIDTH)]),
        (arrived(1), []),
        (lap(0), [launch(1, last(0, 4, 8), why=BindingLimit.ROW_WIDTH)]),
        (lap(1), [deliver(1, 0), launch(2, dec(0, 8), last(1, 0, 1))]),
    )
    assert ring.statistics().window == 1


def test_greedy_lumps_all_ready_decodes_into_one_micro_batch() -> None:
    ring = ring_of(plan_of("greedy", window=2), *arrivals(range(3), output=3))
    # Requests 1 and 2 waited for nothing: each had a window place, or joined at the first lap.
    check(
        ring,
        (lap(0), [deliver(0, 0), launch(2, dec(0, 1), last(2, 0, 1))]),
        (lap(1), [deliver(1, 1), launch(3, dec(1, 1))]),
        (lap(2), [deliver(2, 0, 2), launch(4, dec(0, 2), dec(2, 1))]),
    )


def test_greedy_starves_prompts_while_decodes_fill_the_width() -> None:
    ring = ring_of(plan_of("greedy", row_width=2), arrived(0), arrived(1, output=4), arrived(2))
    check(
        ring,
        (lap(0), [deliver(0, 0), launch(1, dec(0, 1), last(1, 0, 1), why=BindingLimit.ROW_WIDTH)]),
        (
            lap(1),
            [deliver(1, 0, 1), finish(0), release(0), launch(2, dec(1, 1), last(2, 0, 1))],
        ),
        (arrived(3), []),
        # Width 2 is full of decodes: 3 must wait, laps or no laps.
        (lap(2), [deliver(2, 1, 2), launch(3, dec(1, 2), dec(2, 1), why=BindingLimit.ROW_WIDTH)]),
    )


def gathered(packer: str, *prompts: int, row_width: int = 4, micro_batch_width: int = 4) -> Ring:
    """A ring of window 1 into which requests 0, 1, ... come back last first, the first still open.

    Each went alone into its own micro-batch while the window was wide; then the window shrank.
    """
    count = len(prompts)
    ring = Ring(
        plan_of(
            packer,
            window=count,
            window_auto=True,
            row_width=row_width,
            micro_batch_width=micro_batch_width,
        )
    )
    for request, prompt in enumerate(prompts):
        assert len(launches(tell(ring, arrived(request, prompt, output=9)))) == 1
    tell(ring, measured([5, 0], [0, 0]))
    assert ring.statistics().window == 1
    for micro_batch in range(count - 1, 0, -1):
        assert not launches(tell(ring, lap(micro_batch)))
    return ring


def test_greedy_takes_the_longest_ready_first_and_names_the_narrower_width() -> None:
    check(
        gathered("greedy", 1, 1, 1, row_width=2, micro_batch_width=3),
        (lap(0), [deliver(0, 0), launch(3, dec(2, 1), dec(1, 1), why=BindingLimit.ROW_WIDTH)]),
        (lap(3), [deliver(3, 2, 1), launch(4, dec(0, 1), dec(2, 2), why=BindingLimit.ROW_WIDTH)]),
    )
    check(
        gathered("greedy", 1, 1, 1, row_width=2, micro_batch_width=2),
        (
            lap(0),
            [deliver(0, 0), launch(3, dec(2, 1), dec(1, 1), why=BindingLimit.MICRO_BATCH_WIDTH)],
        ),
    )


def test_sarathi_keeps_one_chunk_of_a_prompt_in_flight() -> None:
    check(
        ring_of(plan_of("sarathi", window=3)),
        (arrived(0, prompt=9, output=1), [launch(0, chunk(0, 0, 4), why=BindingLimit.ROW_WIDTH)]),
        (arrived(1, prompt=5, output=1), [launch(1, chunk(1, 0, 4), why=BindingLimit.ROW_WIDTH)]),
        (lap(0), [launch(2, chunk(0, 4, 8), why=BindingLimit.ROW_WIDTH)]),
        (lap(1), [launch(3, last(1, 4, 5))]),
        (lap(2), [launch(4, last(0, 8, 9))]),
    )


def test_sarathi_admits_to_the_cap_and_not_beyond() -> None:
    check(
        ring_of(plan_of("sarathi", running_max=2, window=3), *arrivals([0, 1], output=3)),
        (arrived(2), []),  # A window place is free and two run.
        (lap(0), [deliver(0, 0), launch(2, dec(0, 1), why=BindingLimit.RUNNING_CAP)]),
        (
            lap(1, 1),
            [
                deliver(1, 1),
                finish(1, FinishReason.STOP),
                release(1),
                launch(3, last(2, 0, 1)),
            ],
        ),
    )


def test_sarathi_takes_several_set_aside_prompts_in_the_order_of_their_return() -> None:
    """Rows: 2 for the end of one prompt, 1 for another's, the rest of the width for the third."""
    check(
        gathered("sarathi", 9, 5, 6, row_width=4),
        (
            lap(0),
            [launch(3, last(2, 4, 6), last(1, 4, 5), chunk(0, 4, 5), why=BindingLimit.ROW_WIDTH)],
        ),
    )


def test_sarathi_skips_a_prompt_without_a_row_left_and_sorts_what_is_left_by_arrival() -> None:
    check(
        gathered("sarathi", 9, 9, 9, row_width=4),
        (lap(0), [launch(3, chunk(2, 4, 8), why=BindingLimit.ROW_WIDTH)]),
        # Left: 1, then 0 by their return; 0, then 1 by arrival; and now 2 behind them.
        (lap(3), [launch(4, chunk(0, 4, 8), why=BindingLimit.ROW_WIDTH)]),
        (lap(4), [launch(5, chunk(1, 4, 8), why=BindingLimit.ROW_WIDTH)]),
        # 2 has one row left and 0 too: sorted when 1 was taken, then 1 came back behind them.
        (lap(5), [launch(6, last(0, 8, 9), last(2, 8, 9), last(1, 8, 9))]),
    )


def test_sarathi_leaves_decodes_beyond_the_width_sorted_by_arrival() -> None:
    width = BindingLimit.MICRO_BATCH_WIDTH
    check(
        gathered("sarathi", 1, 1, 1, 1, micro_batch_width=2),
        (lap(0), [deliver(0, 0), launch(4, dec(3, 1), dec(2, 1), why=width)]),
        (lap(4), [deliver(4, 3, 2), launch(5, dec(0, 1), dec(1, 1), why=width)]),
    )


def test_sarathi_walks_past_set_aside_prompts_to_the_decodes_behind_them() -> None:
    """2 is set aside, 1 and 0 decode: decodes come first, prompts fill what is left of the rows."""
    check(
        gathered("sarathi", 1, 1, 9, row_width=4),
        (
            lap(0),
            [
                deliver(0, 0),
                launch(3, dec(1, 1), dec(0, 1), chunk(2, 4, 6), why=BindingLimit.ROW_WIDTH),
            ],
        ),
    )


def test_sarathi_lets_decodes_fill_the_width_and_keeps_the_set_aside() -> None:
    check(
        gathered("sarathi", 1, 1, 9, micro_batch_width=2),
        (
            lap(0),
            [deliver(0, 0), launch(3, dec(1, 1), dec(0, 1), why=BindingLimit.MICRO_BATCH_WIDTH)],
        ),
    )


def test_sarathi_preempts_nobody_while_the_first_of_the_sorted_rest_has_room() -> None:
    """6 blocks of 2, ready 0, 2, 1: 2 lacks a block, but sorted by arrival 1 is next, with room."""
    plan = plan_of("sarathi", window=3, window_auto=True, kv_block=2, kv_tokens=12)
    ring = ring_of(plan, arrived(0, 1, 9), arrived(1, 1, 9), arrived(2, 2, 9))
    kv = BindingLimit.KV
    check(
        ring,
        (measured([5, 0], [0, 0]), []),
        (lap(0), [deliver(0, 0)]),
        (lap(2), [deliver(2, 2)]),
        (lap(1), [deliver(1, 1), launch(3, dec(0, 1), dec(2, 2), dec(1, 1))]),
        (lap(3), [deliver(3, 0, 2, 1), launch(4, dec(0, 2), dec(2, 3), dec(1, 2))]),
        (lap(4), [deliver(4, 0, 2, 1), launch(5, dec(0, 3), why=kv)]),
        (lap(5), [deliver(5, 0), launch(6, dec(1, 3), why=kv), preempt(2, 4), release(2)]),
    )
