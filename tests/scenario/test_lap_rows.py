"""Laps go in one by one and come out as columns."""

import random
import struct

import numpy as np
import pytest

from kvasir_core import BindingLimit, Epoch, MicroBatch, MicroBatchId, RequestId
from kvasir_scenario.lap_rows import LIMITS, STAMPS, LapRows

Lap = tuple[MicroBatch, int, int, tuple[RequestId, ...], list[int]]


def micro_batch(number: int, decodes: int, chunks: int) -> MicroBatch:
    """Decodes of requests 0, 1, ... and behind them chunks of `number` rows each."""
    spans = decodes + chunks
    return MicroBatch(
        id=MicroBatchId(number), epoch=Epoch(0),
        requests=tuple(RequestId(index) for index in range(spans)), starts=(0,) * spans,
        rows=(1,) * decodes + (number,) * chunks, decodes=decodes, completing=(),
        row_count=decodes + chunks * number, decode_context=decodes,
        binding=LIMITS[number % len(LIMITS)],
    )  # fmt: skip


def some_laps(count: int, stages: int, seed: int) -> list[Lap]:
    dice = random.Random(seed)
    laps: list[Lap] = []
    for number in range(count):
        batch = micro_batch(number, dice.randrange(4), dice.randrange(3))
        delivered = batch.requests[: dice.randint(0, len(batch.requests))]
        times = sorted(dice.randrange(1 << 60) for _ in range(STAMPS * stages))
        laps.append((batch, times[0], dice.choice([-1, times[-1]]), delivered, times))
    return laps


@pytest.mark.parametrize("stages", [2, 5])
def test_columns_say_what_was_added_whatever_comes_after(stages: int) -> None:
    rows = LapRows(stages, laps_max=7)
    first, second = some_laps(7, stages, seed=1), some_laps(4, stages, seed=2)
    assert [rows.add(*lap) for lap in first] == [False] * 6 + [True]
    assert len(rows) == 7
    taken = rows.take()
    assert len(rows) == 0
    for lap in second:
        rows.add(*lap)
    for laps, columns in ((first, taken), (second, rows.take())):
        batches = [lap[0] for lap in laps]
        assert columns.ids.tolist() == [batch.id for batch in batches]
        assert columns.composed.tolist() == [lap[1] for lap in laps]
        assert columns.returned.tolist() == [lap[2] for lap in laps]
        assert columns.rows.tolist() == [batch.row_count for batch in batches]
        assert columns.decodes.tolist() == [batch.decodes for batch in batches]
        assert columns.spans.tolist() == [len(batch.spans) for batch in batches]
        assert [LIMITS[code] for code in columns.limits] == [batch.binding for batch in batches]
        assert columns.token_counts.tolist() == [len(lap[3]) for lap in laps]
        assert columns.tokens.tolist() == [request for lap in laps for request in lap[3]]
        prompts = [request for batch in batches for request in batch.requests[batch.decodes :]]
        assert columns.prompts.tolist() == prompts
        assert columns.stamps.shape == (len(laps), stages, STAMPS)
        assert columns.stamps.reshape(len(laps), -1).tolist() == [lap[4] for lap in laps]


@pytest.mark.parametrize("kept_max", [0, 2, 4])
def test_only_the_first_micro_batches_are_kept_after_each_take(kept_max: int) -> None:
    rows = LapRows(2, laps_max=9)
    rows.kept_max = kept_max
    for seed in (3, 4):
        laps = some_laps(3, 2, seed)
        for lap in laps:
            rows.add(*lap)
        assert rows.take().batches == [lap[0] for lap in laps][:kept_max]


def test_every_binding_limit_has_its_code() -> None:
    assert set(LIMITS) == set(BindingLimit)


def test_times_may_be_as_large_as_int64_and_no_larger() -> None:
    rows = LapRows(2, laps_max=2)
    largest = int(np.iinfo(np.int64).max)
    rows.add(micro_batch(0, 1, 0), -largest - 1, largest, (), [largest] * 8)
    with pytest.raises((struct.error, OverflowError)):
        rows.add(micro_batch(1, 1, 0), 0, largest + 1, (), [0] * 8)
    columns = rows.take()
    assert (columns.composed.tolist(), columns.returned.tolist()) == ([-largest - 1], [largest])


@pytest.mark.parametrize("stamps", [7, 9])
def test_a_lap_with_stamps_missing_or_too_many_is_our_bug(stamps: int) -> None:
    rows = LapRows(2, laps_max=2)
    with pytest.raises(struct.error, match="expected"):
        rows.add(micro_batch(0, 1, 0), 0, 1, (), [0] * stamps)
    assert len(rows) == 0
