"""A stage of a model, fed made-up micro-batches and timed, for `kvasir-rt profile`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, pstdev
from typing import Any

from kvasir_core.microbatch import BindingLimit, MicroBatch
from kvasir_core.units import Epoch, MicroBatchId, RequestId

Point = tuple[int, int]  # Median and spread (standard deviation), nanoseconds.

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
        return max(*self.contexts, max(self.behind) + max(self.chunks)) + HEAD_ROOM


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


class StageBench:
    """A stage that is fed micro-batches and timed.

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
        slots = max(*options.rows, sum(options.decodes))
        with open_gguf(model) as gguf:
            self._stage = StageModel(
                gguf,
                layers,
                running_max=slots,
                context=options.context,
                kv_tokens=slots * options.context,
                device=options.device,
                dtype=options.dtype,
            )

    def rows(self, count: int) -> Point:
        """Rows whose attention is next to nothing: one of each of so many requests."""
        batch = micro_batch([(request, 0) for request in range(count)])
        return self._repeated(lambda: self._timed(batch), after=self._stage.reset)

    def prefill(self, rows: int, behind: int) -> Point:
        """One chunk with so many positions behind it."""

        def once() -> int:
            self._fill(0, behind)
            return self._timed(micro_batch([], (0, behind, rows)))

        return self._repeated(once, after=self._stage.reset)

    def decodes(self, context: int) -> dict[int, Point]:
        """Decodes of this context, for every width; each width has requests of its own.

        The measured steps lie around the context, half before and half behind it.
        """
        start = max(0, context - 1 - self._options.repeats // 2)
        points, first = {}, 0
        for width in self._options.decodes:
            requests = range(first, first + width)
            for request in requests:
                self._fill(request, start)
            steps = iter(range(start, start + self._options.repeats + 1))

            def once(requests: range = requests, steps: Any = steps) -> int:
                at = next(steps)
                return self._timed(micro_batch([(request, at) for request in requests]))

            points[width] = self._repeated(once)
            first += width
        self._stage.reset()
        return points

    def _fill(self, request: int, positions: int) -> None:
        if positions:
            self._run(micro_batch([], (request, 0, positions)))

    def _repeated(self, once: Callable[[], int], after: Callable[[], None] | None = None) -> Point:
        """Once to warm up, then `repeats` times."""
        times = []
        for _ in range(self._options.repeats + 1):
            times.append(once())
            if after is not None:
                after()
        return round(median(times[1:])), round(pstdev(times[1:]))

    def _timed(self, batch: MicroBatch) -> int:
        self._synchronise()
        start = time.perf_counter_ns()
        self._run(batch)
        self._synchronise()
        return time.perf_counter_ns() - start

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
