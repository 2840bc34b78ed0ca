"""Plans: what contradicts itself is refused with both numbers; sizes and digest follow from it."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import MicroBatch, Plan, PlanError, Span, split_evenly
from kvasir_core.plan import LOGPROBS_MAX, RESULT_ROW_BYTES, STAGES_MAX, WIDTH_MAX, blocks_for
from tests.core.stories import chunk, dec, last, launch, launches, plan_of

PLAN = plan_of(stages=3, window=2, window_max=5, row_width=8, kv_tokens=(64, 40, 64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ((0, 4),)}, f"from 2 to {STAGES_MAX} stages, not 1: head and tail"),
        ({"layers": ()}, "stages, not 0"),
        ({"layers": ((0, 2), (3, 4), (4, 5))}, r"stage 1 has layers \[3, 4\); it must start at 2"),
        ({"layers": ((0, 2), (1, 4), (4, 5))}, r"stage 1 has layers \[1, 4\); it must start at 2"),
        ({"layers": ((0, 2), (2, 2), (2, 5))}, "stage 1 .* at least one layer"),
        ({"layers": ((0, 2), (2, 1), (1, 5))}, "stage 1 .* at least one layer"),
        ({"layers": ((1, 2), (2, 3), (3, 5))}, r"stage 0 has layers \[1, 2\); it must start at 0"),
        ({"row_width": 0}, f"row_width is 0; it must be from 1 to {WIDTH_MAX}"),
        ({"row_width": WIDTH_MAX + 1}, f"row_width is {WIDTH_MAX + 1}"),
        ({"micro_batch_width": -1}, "micro_batch_width is -1"),
        ({"window": 0}, "window is 0"),
        ({"window_max": 0}, "window_max is 0"),
        ({"window": 6}, "window 6 is above window_max 5"),
        ({"running_max": 0}, "running_max is 0"),
        ({"context": 0}, "context is 0"),
        ({"kv_block": 0}, "kv_block is 0"),
        ({"hidden": 0}, "hidden is 0"),
        ({"element_bytes": 0}, "element_bytes is 0"),
        ({"credits": 0}, "credits is 0; it must be at least 1, or unbounded"),
        ({"kv_tokens": (64, 64)}, "kv_tokens has 2 entries for 3 stages"),
        ({"kv_tokens": (64, 3, 64)}, "kv_tokens 3 is less than one block of 4"),
        ({"kv_tokens": (64, -9, 64)}, "kv_tokens -9 is less than one block of 4"),
        ({"chunked_prefill": False}, "row_width 8 is less than context 64"),
        ({"prefill_rows_max": 0}, "prefill_rows_max is 0"),
        ({"cohort_wait_ns": -1}, "cohort_wait_ns is -1"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **changes)


def test_the_longest_ring_is_accepted_and_one_more_stage_is_not() -> None:
    layers = split_evenly(STAGES_MAX + 1, STAGES_MAX + 1)
    kv = (64,) * STAGES_MAX
    assert replace(PLAN, layers=layers[:-1], kv_tokens=kv).stages == STAGES_MAX
    with pytest.raises(PlanError, match=f"not {STAGES_MAX + 1}"):
        replace(PLAN, layers=layers, kv_tokens=(*kv, 64))


def test_whole_prompts_need_a_row_width_of_the_context() -> None:
    plan = replace(PLAN, chunked_prefill=False, row_width=64)
    assert plan.row_width == plan.context


def test_unbounded_credits_and_the_widest_plan_are_accepted() -> None:
    assert replace(PLAN, credits=None).credits is None
    assert replace(PLAN, row_width=WIDTH_MAX).row_width == WIDTH_MAX


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 8192), st.sampled_from([1, 2, 4]))
def test_the_largest_messages_in_closed_form(
    rows: int, spans: int, hidden: int, element: int
) -> None:
    plan = replace(PLAN, row_width=rows, micro_batch_width=spans, hidden=hidden, element_bytes=element)  # fmt: skip
    assert plan.boundary_bytes_max == rows * hidden * element
    assert plan.result_bytes_max == min(rows, spans) * RESULT_ROW_BYTES


def test_a_result_row_holds_a_token_and_all_alternatives() -> None:
    assert RESULT_ROW_BYTES >= 4 + 4 + LOGPROBS_MAX * (4 + 4)


def test_the_scarcest_stage_gives_the_blocks() -> None:
    assert PLAN.kv_blocks == 10
    assert replace(PLAN, kv_tokens=(64, 43, 64)).kv_blocks == 10


@pytest.mark.parametrize(
    ("packer", "is_auto", "wait_ns", "wanted"),
    [
        ("greedy", False, 5, False),
        ("greedy", True, 0, True),
        ("cohort", False, 0, False),
        ("cohort", False, 5, True),
    ],
)
def test_stage_times_are_wanted_where_the_ring_decides_by_them(
    packer: str, is_auto: bool, wait_ns: int, wanted: bool
) -> None:
    plan = plan_of(packer, window_auto=is_auto, cohort_wait_ns=wait_ns)
    assert plan.wants_stage_times is wanted


@pytest.mark.parametrize(
    ("positions", "numbers"),
    [(40, None), (41, (11, 10)), (64, (16, 10)), (65, (65, 64))],
)
def test_why_never_names_both_numbers(positions: int, numbers: tuple[int, int] | None) -> None:
    why = PLAN.why_never(positions)
    found = tuple(int(text) for text in re.findall(r"\d+", why))
    assert (found or None) == numbers


def test_the_digest_depends_on_every_field() -> None:
    other: dict[str, Any] = {
        "layers": ((0, 1), (1, 2), (2, 4)),
        "kv_tokens": (64, 40, 65),
        "window_auto": True,
        "credits": 3,
        "packer": "greedy",
        "prefill_rows_max": 7,
        "chunked_prefill": False,
    }
    plan = replace(PLAN, row_width=64)  # So that prompts may go whole.
    digests = {plan.digest}
    for field in fields(Plan):
        value = other.get(field.name)
        if value is None:
            value = getattr(plan, field.name) + 1
        digests.add(replace(plan, **{field.name: value}).digest)
    assert len(digests) == 1 + len(fields(Plan))


def test_an_equal_plan_has_the_same_digest() -> None:
    """Another process's digest is compared in `test_determinism.py`."""
    assert replace(PLAN).digest == PLAN.digest
    assert re.fullmatch("[0-9a-f]{64}", PLAN.digest)


@given(st.integers(1, 2000), st.integers(1, 64))
def test_an_even_split_is_contiguous_covers_all_and_differs_by_one_at_most(
    layers: int, stages: int
) -> None:
    if stages > layers:
        with pytest.raises(PlanError, match=f"{stages} stages .* {layers} layers"):
            split_evenly(layers, stages)
        return
    split = split_evenly(layers, stages)
    assert len(split) == stages
    assert [layer for start, stop in split for layer in range(start, stop)] == list(range(layers))
    sizes = [stop - start for start, stop in split]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("layers", "stages", "sizes"), [(10, 3, [4, 3, 3]), (61, 8, [8] * 5 + [7] * 3)])  # fmt: skip
def test_p5_the_remainder_is_spread(layers: int, stages: int, sizes: list[int]) -> None:
    assert [stop - start for start, stop in split_evenly(layers, stages)] == sizes


@pytest.mark.parametrize("stages", [0, -1, 3])
def test_p5_two_layers_cannot_be_split_so(stages: int) -> None:
    with pytest.raises(PlanError, match=f"{stages} stages .* 2 layers"):
        split_evenly(2, stages)


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_blocks_hold_the_rows_and_no_block_is_empty(rows: int, block: int) -> None:
    blocks = blocks_for(rows, block)
    assert blocks * block >= rows > (blocks - 1) * block


spans_of_a_request = st.one_of(
    st.builds(dec, st.just(0), st.integers(0, 99)),
    st.builds(lambda start, rows: chunk(0, start, start + rows), st.integers(0, 99), st.integers(1, 9)),
    st.builds(lambda start, rows: last(0, start, start + rows), st.integers(0, 99), st.integers(1, 9)),
)  # fmt: skip


@given(st.lists(spans_of_a_request, min_size=1, max_size=9))
def test_a_micro_batch_gives_its_spans_and_outputs_back(spans: list[Span]) -> None:
    """Its columns are composed from spans by the stories' words; its properties undo that."""
    spans.sort(key=lambda span: not span.is_decode)
    spans = [span._replace(request=type(span.request)(k)) for k, span in enumerate(spans)]
    batch: MicroBatch = launches([launch(0, *spans)])[0]
    assert list(batch.spans) == spans
    assert batch.outputs == tuple(span.request for span in spans if span.has_output)
    assert batch.prefill_rows == sum(span.rows for span in spans if not span.is_decode)
