"""A stage of a model, fed made-up micro-batches and timed, for `kvasir-rt profile`."""

import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, pstdev
from typing import TypeVar

from kvasir_core.microbatch import BindingLimit, MicroBatch
from kvasir_core.units import Epoch, MicroBatchId, RequestId

Point = tuple[int, int]  # Median and spread (standard deviation), nanoseconds.
Key = TypeVar("Key", bound=Hashable)
Timer = Callable[[], int]  # Measures once; nanoseconds.

HEAD_ROOM = 64  # Positions beyond the largest context, for the measured steps themselves.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What is measured. Sizes ascend."""

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    neighbours: int = 0
    repeats: int = 5
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    decodes: tuple[int, ...] = (1, 4, 8, 16)
    contexts: tuple[int, ...] = (16, 128, 512)
    chunks: tuple[int, ...] = (1, 16, 64, 128)
    behind: tuple[int, ...] = (0, 128, 512)

    @property
    def context(self) -> int:
        """Positions a request needs."""
        decoding = spread(max(self.contexts), 2)[-1] + self.repeats
        return max(decoding, max(self.behind) + max(self.chunks)) + HEAD_ROOM


def micro_batch(
    decodes: Sequence[tuple[int, int]], chunk: tuple[int, int, int] | None = None
) -> MicroBatch:
    """Decodes are (request, position); the chunk (request, start, rows) ends its prompt."""
    parts = [(request, at, 1) for request, at in decodes]
    parts += [chunk] if chunk is not None else []
    return MicroBatch(
        id=MicroBatchId(0),
        epoch=Epoch(0),
        requests=tuple(RequestId(request) for request, _, _ in parts),
        starts=tuple(start for _, start, _ in parts),
        rows=tuple(rows for _, _, rows in parts),
        decodes=len(decodes),
        completing=(len(decodes),) if chunk is not None else (),
        row_count=sum(rows for _, _, rows in parts),
        decode_context=sum(at + 1 for _, at in decodes),
        binding=BindingLimit.NOTHING_WAITING,
    )


def spread(middle: int, count: int) -> list[int]:
    """So many positions, ascending, within a quarter of their mean, which is `middle`."""
    reach = middle // 4
    if count == 1 or not reach:
        return [middle] * count
    return [middle - reach + 2 * reach * place // (count - 1) for place in range(count)]


class StageBench:
    """A stage that is fed micro-batches and timed.

    Its methods lay a measurement out and return timers; each call of one measures once. What is
    measured `in_rounds`, of several stages too, is measured at the same speed of the machine.

    Args:
        model: The GGUF file.
        layers: Half-open range.
    """

    def __init__(self, model: Path, layers: tuple[int, int], options: ProfileOptions) -> None:
        import torch

        from kvasir_rt.gguf_file import open_gguf
        from kvasir_rt.model.stage_model import StageModel
        from kvasir_rt.sampler import sample
        from kvasir_rt.sampling import SamplingParams

        self._torch, self._sample, self._params = torch, sample, SamplingParams()
        self._options = options
        self._resident = max(*options.rows, 1)  # The first request that stays; those below pass.
        width = sum(options.decodes)
        slots = self._resident + width * len(options.contexts)
        tokens = options.context + width * sum(options.contexts)
        tokens += slots * (HEAD_ROOM + options.repeats)
        with open_gguf(model) as gguf:
            self._stage = StageModel(
                gguf,
                layers,
                running_max=slots,
                context=options.context,
                kv_tokens=tokens,
                device=options.device,
                dtype=options.dtype,
            )

    def rows(self, count: int) -> Timer:
        """Rows whose attention is next to nothing: one of each of so many requests."""
        batch = micro_batch([(request, 0) for request in range(count)])
        return lambda: self._timed(batch, then_free=count)

    def prefill(self, rows: int, behind: int) -> Timer:
        """One chunk with so many positions behind it."""
        batch = micro_batch([], (0, behind, rows))

        def once() -> int:
            self._fill(0, behind)
            return self._timed(batch, then_free=1)

        return once

    def decodes(self, context: int) -> dict[int, Timer]:
        """Decodes of this context, for every width; each width has requests of its own that stay.

        The measured steps lie around the context, half before and half behind it, and so do the
        requests: in a ring no two are as long, so their attention is padded and masked.
        """
        middle = max(0, context - 1 - self._options.repeats // 2)
        timers: dict[int, Timer] = {}
        for width in self._options.decodes:
            requests = range(self._resident, self._resident + width)
            self._resident += width
            starts = spread(middle, width)
            if starts[0]:  # Begun together, so that they lie together, as in a ring.
                self._run(micro_batch([(request, 0) for request in requests]))
            for request, start in zip(requests, starts, strict=True):
                self._fill(request, start, behind=1)
            steps = itertools.count()
            rows = list(zip(requests, starts, strict=True))

            def once(rows: list[Point] = rows, steps: Iterator[int] = steps) -> int:
                step = next(steps)
                return self._timed(micro_batch([(request, at + step) for request, at in rows]))

            timers[width] = once
        return timers

    def _fill(self, request: int, positions: int, behind: int = 0) -> None:
        if positions > behind:
            self._run(micro_batch([], (request, behind, positions - behind)))

    def _timed(self, batch: MicroBatch, then_free: int = 0) -> int:
        self._synchronise()
        start = time.perf_counter_ns()
        self._run(batch)
        self._synchronise()
        elapsed = time.perf_counter_ns() - start
        self._stage.release(RequestId(request) for request in range(then_free))
        return elapsed

    def _run(self, batch: MicroBatch) -> None:
        torch, stage = self._torch, self._stage
        rows = batch.row_count
        if stage.is_head:
            inputs = torch.ones(rows, dtype=torch.int64)
        else:
            inputs = torch.ones(rows, stage.shape.hidden, dtype=stage.boundary)
        output = stage.forward(batch, inputs)
        if stage.is_tail:
            count = output.shape[0]
            self._sample(output, [self._params] * count, [1] * count, [None] * count)

    def _synchronise(self) -> None:
        if self._options.device != "cpu":
            self._torch.cuda.synchronize(self._options.device)


def rounds(
    timers: Mapping[Key, Timer], repeats: int, say: Callable[[str], None] = lambda _: None
) -> dict[Key, list[int]]:
    """Every timer once a round, the first round being to warm up.

    A machine whose speed drifts has then the same speeds for all of them, so that differences
    between them are differences of the work.
    """
    times: dict[Key, list[int]] = {key: [] for key in timers}
    for turn in range(repeats + 1):
        say(f"round {turn} of {repeats}" if turn else "warming up")
        for key, timer in timers.items():
            times[key].append(timer())
    return {key: taken[1:] for key, taken in times.items()}


def point(times: Sequence[int]) -> Point:
    return round(median(times)), round(pstdev(times))


def in_rounds(timers: Mapping[Key, Timer], repeats: int) -> dict[Key, Point]:
    """The points of `rounds`."""
    return {key: point(times) for key, times in rounds(timers, repeats).items()}


def in_pairs(
    timers: Mapping[int, Timer], repeats: int, slowed: Callable[[Timer], int]
) -> list[tuple[int, int, int]]:
    """By rows: how long as usual, and how long when slowed; one right after the other.

    What it costs is the median of the pairs' ratios, at least 1, which a machine whose speed drifts
    does not hide.

    Args:
        timers: By rows.
        repeats: Pairs of each, after one to warm up.
        slowed: Calls a timer so that what is asked about slows it.
    """
    times: dict[int, list[tuple[int, int]]] = {count: [] for count in timers}
    for _ in range(repeats + 1):
        for count, timer in timers.items():
            times[count].append((timer(), slowed(timer)))
    rows = []
    for count, pairs in times.items():
        usual = round(median(one for one, _ in pairs[1:]))
        ratio = median(two / one for one, two in pairs[1:])
        rows.append((count, usual, round(usual * max(1.0, ratio))))
    return rows


def resting(ns: int) -> Callable[[Timer], int]:
    """For `in_pairs`: the core rests before."""

    def rested(timer: Timer) -> int:
        time.sleep(ns / 1e9)
        return timer()

    return rested
