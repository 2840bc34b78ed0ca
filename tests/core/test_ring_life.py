"""A request's life: admission, prompt chunks, decodes, its end; and what can never fit."""

import pytest

from kvasir_core import BindingLimit, FinishReason, PlanError, Refuse, RequestId, Ring
from tests.core.stories import (
    arrivals,
    arrived,
    begin_epoch,
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
    plan_of,
    preempt,
    ready,
    release,
    released,
    ring_of,
    tell,
)


def test_a_request_is_prefilled_decoded_finished_and_released() -> None:
    ring = ring_of(plan_of())
    check(
        ring,
        (arrived(7, prompt=3, output=3), [launch(0, last(7, 0, 3))]),
        (lap(0), [deliver(0, 7), launch(1, dec(7, 3))]),
        (lap(1), [deliver(1, 7), launch(2, dec(7, 4))]),
        (lap(2), [deliver(2, 7), finish(7), release(7)]),
    )
    assert not ring.is_idle, "its KV is still in the stages"
    check(ring, (released(7), []))
    assert ring.is_idle


def test_one_output_token_ends_the_request_with_its_prompt() -> None:
    check(
        ring_of(plan_of()),
        (arrived(7, prompt=3, output=1), [launch(0, last(7, 0, 3))]),
        (lap(0), [deliver(0, 7), finish(7), release(7)]),
    )


def test_a_stop_ends_the_request_early() -> None:
    check(
        ring_of(plan_of(), arrived(7, output=50)),
        (lap(0), [deliver(0, 7), launch(1, dec(7, 1))]),
        (lap(1, 7), [deliver(1, 7), finish(7, FinishReason.STOP), release(7)]),
    )


def test_a_stop_with_the_last_token_is_a_stop() -> None:
    check(
        ring_of(plan_of(), arrived(7, output=1)),
        (lap(0, 7), [deliver(0, 7), finish(7, FinishReason.STOP), release(7)]),
    )


def test_requests_are_admitted_in_order_of_arrival_and_none_overtakes_a_long_prompt() -> None:
    check(
        ring_of(plan_of(row_width=4)),
        (arrived(3, prompt=10, output=1), [launch(0, chunk(3, 0, 4), why=BindingLimit.ROW_WIDTH)]),
        (arrived(2, prompt=1, output=1), []),
        (arrived(1, prompt=2, output=1), []),
        (lap(0), [launch(1, chunk(3, 4, 8), why=BindingLimit.ROW_WIDTH)]),
        (
            lap(1),
            [launch(2, last(3, 8, 10), last(2, 0, 1), chunk(1, 0, 1), why=BindingLimit.ROW_WIDTH)],
        ),
        (
            lap(2),
            [deliver(2, 3, 2), finish(3), finish(2), release(3, 2), launch(3, last(1, 1, 2))],
        ),
    )


def test_a_long_prompt_fills_the_pipeline_with_chunks() -> None:
    ring = ring_of(plan_of(stages=3, window=3))
    check(
        ring,
        (
            arrived(7, prompt=14, output=2),
            [
                launch(0, chunk(7, 0, 4), why=BindingLimit.ROW_WIDTH),
                launch(1, chunk(7, 4, 8), why=BindingLimit.ROW_WIDTH),
                launch(2, chunk(7, 8, 12), why=BindingLimit.ROW_WIDTH),
            ],
        ),
        (lap(0), [launch(3, last(7, 12, 14))]),
        (lap(1), []),
        (lap(2), []),
        (lap(3), [deliver(3, 7), launch(4, dec(7, 14))]),
    )


def test_prompts_share_a_micro_batch_and_the_rest_of_the_last_goes_first_next_time() -> None:
    check(
        ring_of(plan_of(row_width=6), arrived(0, prompt=6, output=1)),
        (arrived(1, prompt=4, output=1), []),
        (arrived(2, prompt=4, output=1), []),
        (arrived(3, prompt=4, output=1), []),
        (
            lap(0),
            [
                deliver(0, 0),
                finish(0),
                release(0),
                launch(1, last(1, 0, 4), chunk(2, 0, 2), why=BindingLimit.ROW_WIDTH),
            ],
        ),
        (
            lap(1),
            [
                deliver(1, 1),
                finish(1),
                release(1),
                launch(2, last(2, 2, 4), last(3, 0, 4)),
            ],
        ),
    )


def test_a_decode_does_not_enter_again_before_its_token_is_back() -> None:
    check(
        ring_of(plan_of(window=4), arrived(7, output=3)),
        (lap(0), [deliver(0, 7), launch(1, dec(7, 1))]),
        (arrived(8), [launch(2, last(8, 0, 1))]),
        (lap(1), [deliver(1, 7), launch(3, dec(7, 2))]),
    )


def test_no_more_spans_than_the_micro_batch_is_wide() -> None:
    ring = ring_of(plan_of(row_width=64, micro_batch_width=3), arrived(9, prompt=64 - 2))
    check(ring, *[(event, []) for event in arrivals(range(4), prompt=2, output=1)])
    # A decode takes part too: two prompts beside it, and none of the third.
    check(
        ring,
        (
            lap(0),
            [
                deliver(0, 9),
                launch(
                    1,
                    dec(9, 62),
                    last(0, 0, 2),
                    last(1, 0, 2),
                    why=BindingLimit.MICRO_BATCH_WIDTH,
                ),
            ],
        ),
    )


def test_admitted_and_unfinished_requests_are_capped_by_running_max() -> None:
    check(
        ring_of(plan_of(running_max=2), arrived(0, output=1)),
        (arrived(1, output=2), []),
        (arrived(2, output=2), []),
        (arrived(3, output=2), []),
        (
            lap(0),
            [
                deliver(0, 0),
                finish(0),
                release(0),
                launch(1, last(1, 0, 1), last(2, 0, 1), why=BindingLimit.RUNNING_CAP),
            ],
        ),
        (
            lap(1),
            [deliver(1, 1, 2), launch(2, dec(1, 1), dec(2, 1), why=BindingLimit.RUNNING_CAP)],
        ),
        # The cap counts the unfinished, not the unreleased.
        (
            lap(2),
            [deliver(2, 1, 2), finish(1), finish(2), release(1, 2), launch(3, last(3, 0, 1))],
        ),
    )


def test_the_running_cap_is_no_cap_on_one_micro_batch() -> None:
    """Three may run, two fit into a micro-batch: the third goes into the next one."""
    ring = ring_of(plan_of(running_max=3, micro_batch_width=2, window=2), arrived(0))
    check(
        ring,
        (arrived(1), [launch(1, last(1, 0, 1))]),
        (arrived(2), []),
        (arrived(3), []),
        (lap(0), [deliver(0, 0), launch(2, dec(0, 1), last(2, 0, 1), why=BindingLimit.MICRO_BATCH_WIDTH)]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "output", "numbers"),
    [(60, 5, ("65", "64")), (33, 8, ("11", "10")), (10**12, 10**12, (str(2 * 10**12), "64"))],
    ids=["over the context", "over all KV", "absurd"],
)
def test_what_can_never_fit_is_refused_at_arrival_with_both_numbers(
    prompt: int, output: int, numbers: tuple[str, str]
) -> None:
    ring = ring_of(plan_of(context=64, kv_tokens=(64, 40)), arrived(0, prompt=4))
    orders = tell(ring, arrived(1, prompt, output))
    assert len(orders) == 1
    refusal = orders[0]
    assert isinstance(refusal, Refuse)
    assert refusal.request == RequestId(1)
    assert all(number in refusal.why for number in numbers)
    check(ring, (arrived(2), []), (lap(0), [deliver(0, 0), launch(1, dec(0, 4), last(2, 0, 1))]))
    assert (ring.statistics().refused, ring.statistics().offered) == (1, 3)


def test_what_fits_exactly_is_served() -> None:
    ring = ring_of(plan_of(context=40, kv_tokens=40, row_width=40))
    assert launches(tell(ring, arrived(0, prompt=38, output=2)))
    tell(ring, lap(0))
    check(ring, (lap(1), [deliver(1, 0), finish(0), release(0)]))


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    plan = plan_of(row_width=8, context=8, chunked_prefill=False)
    check(
        ring_of(plan, arrived(0, output=3)),
        (arrived(1, prompt=7, output=1), []),
        (lap(0), [deliver(0, 0), launch(1, dec(0, 1), last(1, 0, 7))]),
        (arrived(2, prompt=6, output=2), []),
        (arrived(3, prompt=2, output=1), []),
        # 6 + 1 rows fit beside the decode, the last prompt does not fit whole any more.
        (
            lap(1),
            [
                deliver(1, 0, 1),
                finish(1),
                release(1),
                launch(2, dec(0, 2), last(2, 0, 6), why=BindingLimit.ROW_WIDTH),
            ],
        ),
    )


def test_rows_that_a_prefix_cache_holds_are_not_computed_but_take_their_blocks() -> None:
    ring = ring_of(plan_of(row_width=3))
    check(
        ring,
        (arrived(7, 9, 3, cached=4), [launch(0, chunk(7, 4, 7), why=BindingLimit.ROW_WIDTH)]),
        (lap(0), [launch(1, last(7, 7, 9))]),
        (lap(1), [deliver(1, 7), launch(2, dec(7, 9))]),
    )
    assert ring.statistics().kv_blocks_in_use == 3


def test_a_lost_stage_takes_the_prefix_cache_with_it_for_everybody() -> None:
    """0 runs, 1 waits; both came with a cached prefix, both are computed from position 0."""
    check(
        ring_of(plan_of(row_width=8, running_max=1), arrived(0, 5, 2, cached=4)),
        (arrived(1, 6, 1, cached=5), []),
        (lost(1), [begin_epoch(1, 1), preempt(0, 5)]),
        (ready(1), [launch(1, last(0, 0, 5), why=BindingLimit.RUNNING_CAP, epoch=1)]),
        (
            lap(1, 0, epoch=1),
            [
                deliver(1, 0),
                finish(0, FinishReason.STOP),
                release(0, epoch=1),
                launch(2, last(1, 0, 6), epoch=1),
            ],
        ),
    )


def test_statistics_follow_every_request() -> None:
    ring = ring_of(plan_of(running_max=2, window=2), *arrivals(range(4), output=2))
    before = ring.statistics()
    assert (before.offered, before.running, before.waiting) == (4, 2, 2)
    assert (before.open, before.live_decodes, before.kv_blocks_in_use) == (2, 0, 2)
    tell(ring, lap(0))
    now = ring.statistics()
    assert (now.live_decodes, now.kv_blocks_in_use, now.kv_blocks_total) == (1, 2, 1024)
    assert ring.load == (2, 2, 2)
    assert now.in_system_ns == 0 + 1 + 2 + 3 + 4  # One more live request after each arrival.
    assert [batch.id for batch in ring.open] == [1, 2]
    assert ring.is_live(RequestId(3))
    assert not ring.is_live(RequestId(4))


def test_an_unknown_packer_is_refused_before_anything_runs() -> None:
    with pytest.raises(PlanError, match=r"'tetris'.*cohort.*sarathi"):
        Ring(plan_of("tetris"))
