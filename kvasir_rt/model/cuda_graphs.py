"""Decode micro-batches as CUDA graphs: one launch instead of some hundred small ones.

A graph is captured for a few sizes when the stage is loaded; a decode-only micro-batch is padded to
the next size by copying it into the graph's own tensors. Padding rows write to a page that no
request owns and attend to one position of it. What does not fit (prompt chunks, larger
micro-batches, experts, whose shapes depend on the router) is computed step by step as before.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvasir_core.microbatch import MicroBatch
from kvasir_rt.model.attention_cuda import PAGE, PagedBatch, PagedKv

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # Rows; beyond, launches are no longer what costs.
WARM_UPS = 3  # Before a capture, as torch asks: libraries allocate on first use.

Compute = Callable[[Tensor, PagedBatch], Tensor]
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], object]]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: Tensor
    batch: PagedBatch
    output: Tensor
    replay: Callable[[], object]


class DecodeGraphs:
    """The captured sizes of one stage.

    Args:
        compute: The stage's whole work on a decode micro-batch, in tensors only.
        kv: Where its keys and values live.
        row: An input row, for shape and dtype.
        rows_max: Largest micro-batch to capture.
        capture: Records a computation; returns its output and how to repeat it.
    """

    def __init__(
        self, compute: Compute, kv: PagedKv, row: Tensor, rows_max: int, capture: Capture
    ) -> None:
        self._graphs: dict[int, _Graph] = {}
        for size in SIZES:
            if size > rows_max and self._graphs and max(self._graphs) >= rows_max:
                break
            inputs = row.unsqueeze(0).repeat(size, *[1] * row.dim())
            batch = idle_batch(kv, size)
            output, replay = capture(partial(compute, inputs, batch))
            self._graphs[size] = _Graph(inputs, batch, output, replay)

    def run(self, mb: MicroBatch, inputs: Tensor, batch: PagedBatch) -> Tensor | None:
        """The output rows of a decode-only micro-batch; None if no graph fits it."""
        rows = len(inputs)
        if mb.decodes != rows:
            return None
        size = next((each for each in self._graphs if each >= rows), None)
        if size is None:
            return None
        graph = self._graphs[size]
        graph.inputs[:rows] = inputs
        _place(graph.batch, batch, rows)
        graph.replay()
        return graph.output[:rows].clone()


def idle_batch(kv: PagedKv, size: int) -> PagedBatch:
    """A micro-batch of padding rows only, in tensors that stay."""
    device = kv.keys.device
    pages = -(-kv.sizes.context // PAGE)
    return PagedBatch(
        positions=torch.zeros(size, dtype=torch.int64, device=device),
        targets=torch.full((size,), kv.spare_page * PAGE, dtype=torch.int64, device=device),
        starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        lengths=torch.ones(size, dtype=torch.int32, device=device),
        tables=torch.full((size, pages), kv.spare_page, dtype=torch.int32, device=device),
        spans=tuple((row, 1, 1) for row in range(size)),
        rows_max=1,
        length_max=kv.sizes.context,
        memory=kv,
    )


def _place(target: PagedBatch, batch: PagedBatch, rows: int) -> None:
    kv = target.memory
    target.positions[:rows] = batch.positions
    target.positions[rows:] = 0
    target.targets[:rows] = batch.targets
    target.targets[rows:] = kv.spare_page * PAGE
    target.lengths[:rows] = batch.lengths
    target.lengths[rows:] = 1
    target.tables[:rows, : batch.tables.shape[1]] = batch.tables
    target.tables[rows:, :1] = kv.spare_page


def capture_cuda(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    """Record a computation as a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = compute()
    return output, graph.replay


def decode_graphs(compute: Compute, kv: PagedKv, row: Tensor, rows_max: int) -> DecodeGraphs | None:
    """Graphs for a stage on a CUDA device; None, with a warning, where capturing fails."""
    try:
        with torch.cuda.device(kv.keys.device):
            return DecodeGraphs(compute, kv, row, rows_max, capture_cuda)
    except RuntimeError as error:
        logger.warning("no CUDA graphs, decoding goes step by step: %s", error)
        return None
