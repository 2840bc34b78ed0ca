"""One stage of a model: its layers, its KV memory, and head or tail where it is one.

`forward` computes a micro-batch exactly as composed. It does not sample, queue or move data; the
agent beside it does. One thread computes at a time.
"""

from collections.abc import Callable, Generator, Iterable

import torch
from torch import Tensor

from kvasir_core.microbatch import MicroBatch
from kvasir_core.plan import Plan
from kvasir_rt.errors import StageStateError
from kvasir_rt.gguf_file import GgufFile
from kvasir_rt.model.attention import Batch, KvMemory, SlotKv
from kvasir_rt.model.attention_cuda import PagedBatch, PagedKv
from kvasir_rt.model.block import Rotary, attend, dense
from kvasir_rt.model.cuda_graphs import DecodeGraphs, decode_graphs
from kvasir_rt.model.linear import Numerics
from kvasir_rt.model.moe import ExpertBackend, ExpertCall, MoeBlock
from kvasir_rt.model.places import KvSizes
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model.weights import StageLoader


class Run:
    """A micro-batch under way; a stage may have several, where experts are computed elsewhere."""

    def __init__(self, steps: Generator[ExpertCall, None, Tensor]) -> None:
        self._steps = steps
        self._output: Tensor | None = None

    @torch.inference_mode()
    def advance(self) -> ExpertCall | None:
        """Compute until experts must be awaited (their call) or the output is there (None)."""
        try:
            return next(self._steps)
        except StopIteration as end:
            self._output = end.value
            return None

    @property
    def output(self) -> Tensor:
        """The stage's output, once `advance` has returned None."""
        assert self._output is not None
        return self._output


class StageModel:
    """Layers `[start, stop)` of a model on one device.

    Args:
        gguf: The opened model; read while loading only.
        layers: Half-open range; from 0 the stage is the head, to the last layer it is the tail.
        running_max: Most requests at once.
        context: Most positions of one request; at most the model's.
        kv_tokens: Most positions of all requests together.
        device: "cpu" or "cuda:N".
        dtype: "float32" or "bfloat16"; see `linear.Numerics` for what that means on this device.
        experts: Where routed experts are computed; None computes them here.
        progress: Called with (layers loaded, layers in all).
        decode_rows_max: On CUDA, decode micro-batches up to this many rows run as graphs.

    Attributes:
        shape: The whole model's shape.
        boundary: dtype of hidden states in and out.

    Raises:
        ModelFileError: The file lacks what these layers need, or asks for what is not supported.
        ModelMemoryError: KV memory cannot fit.
    """

    def __init__(
        self,
        gguf: GgufFile,
        layers: tuple[int, int],
        *,
        running_max: int,
        context: int,
        kv_tokens: int,
        device: str = "cpu",
        dtype: str = "float32",
        experts: ExpertBackend | None = None,
        progress: Callable[[int, int], None] | None = None,
        decode_rows_max: int = 0,
    ) -> None:
        self.shape = ModelShape.of(gguf)
        start, stop = layers
        assert 0 <= start < stop <= self.shape.layers
        assert 1 <= context <= self.shape.context
        self.layers = layers
        self.is_head = start == 0
        self.is_tail = stop == self.shape.layers
        numerics = Numerics.of(device, dtype)
        self.numerics = numerics
        self.boundary = numerics.boundary
        sizes = KvSizes(
            slots=running_max,
            context=context,
            tokens=kv_tokens,
            layers=stop - start,
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
        )
        self.kv = _kv_memory(sizes, numerics)
        with torch.inference_mode():
            weights = StageLoader(gguf, self.shape, numerics, progress).load(layers, experts)
            self._rotary = Rotary(self.shape, weights.rope_factors, numerics)
        self._layers = weights.layers
        self._embedding = weights.embedding
        self._output_norm = weights.output_norm
        self._lm_head = weights.lm_head
        self._graphs = self._decode_graphs(decode_rows_max)

    @classmethod
    def of_plan(
        cls,
        gguf: GgufFile,
        plan: Plan,
        stage: int,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        experts: ExpertBackend | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "StageModel":
        """The plan's stage number `stage`, sized as the plan says."""
        return cls(
            gguf,
            plan.layers[stage],
            running_max=plan.running_max,
            context=plan.context,
            kv_tokens=plan.kv_blocks * plan.kv_block,
            device=device,
            dtype=dtype,
            experts=experts,
            progress=progress,
            decode_rows_max=plan.micro_batch_width,
        )

    def forward(self, mb: MicroBatch, inputs: Tensor) -> Tensor:
        """Compute one micro-batch, waiting for experts where they are elsewhere.

        Args:
            mb: The composition; its rows must continue what this stage holds of each request.
            inputs: `int64[rows]` token ids at the head, else `boundary[rows, hidden]`.

        Returns:
            `boundary[rows, hidden]`; at the tail `float32[outputs, vocab]`, in the order of
            `mb.outputs`.

        Raises:
            StageStateError: Rows that do not continue what this stage holds, or a wrong shape.
        """
        run = self.begin(mb, inputs)
        while (call := run.advance()) is not None:
            call.result()
        return run.output

    def begin(self, mb: MicroBatch, inputs: Tensor) -> Run:
        """Begin a micro-batch that may wait for experts while others are computed.

        Arguments as for `forward`. Rows are noted in the order in which runs are begun, and each
        layer writes KV before it attends: a later chunk of a prompt must not overtake an earlier.
        """
        self._check_inputs(mb, inputs)
        return Run(self._steps(mb, inputs, self.kv.batch(mb)))

    def release(self, requests: Iterable[int]) -> None:
        """Free the KV of these requests; those never seen here are ignored."""
        self.kv.release(requests)

    def reset(self) -> None:
        """Forget every request (a new epoch)."""
        self.kv.reset()

    def _check_inputs(self, mb: MicroBatch, inputs: Tensor) -> None:
        expected = (mb.row_count,) if self.is_head else (mb.row_count, self.shape.hidden)
        if tuple(inputs.shape) != expected:
            raise StageStateError(
                f"micro-batch {mb.id} came with a tensor of shape {list(inputs.shape)}; "
                f"its composition asks for {list(expected)}"
            )

    def _steps(
        self, mb: MicroBatch, inputs: Tensor, batch: Batch
    ) -> Generator[ExpertCall, None, Tensor]:
        inputs = inputs.to(self.numerics.device)
        if self._graphs is not None and isinstance(batch, PagedBatch):
            output = self._graphs.run(mb, inputs, batch)
            if output is not None:
                return output
        if batch.order is not None:
            inputs = inputs[batch.order]
        x = self._entered(inputs)
        angles = self._rotary.at(batch.positions)
        for index, layer in enumerate(self._layers):
            x = attend(layer.attention, self.shape, x, angles, batch, index)
            normalised = layer.ffn_norm(x)
            if isinstance(layer.ffn, MoeBlock):
                call = layer.ffn.start(normalised, mb)
                if not call.is_done:
                    yield call
                x = x + call.result()
            else:
                x = dense(layer.ffn, x, normalised)
        if batch.restore is not None:
            x = x[batch.restore]
        return self._logits(mb, x) if self.is_tail else x.to(self.boundary)

    def _decode(self, inputs: Tensor, batch: PagedBatch) -> Tensor:
        """The whole stage on decode rows, without experts and without a look at any value."""
        x = self._entered(inputs)
        angles = self._rotary.at(batch.positions)
        for index, layer in enumerate(self._layers):
            assert not isinstance(layer.ffn, MoeBlock)
            x = attend(layer.attention, self.shape, x, angles, batch, index)
            x = dense(layer.ffn, x, layer.ffn_norm(x))
        return self._head(x) if self.is_tail else x.to(self.boundary)

    def _decode_graphs(self, rows_max: int) -> DecodeGraphs | None:
        kv = self.kv
        if not isinstance(kv, PagedKv) or kv.varlen is None or self.shape.experts or not rows_max:
            return None
        row = (
            torch.zeros((), dtype=torch.int64)
            if self.is_head
            else torch.zeros(self.shape.hidden, dtype=self.boundary)
        )
        with torch.inference_mode():
            return decode_graphs(self._decode, kv, row.to(self.numerics.device), rows_max)

    def _entered(self, inputs: Tensor) -> Tensor:
        x = inputs if self._embedding is None else self._embedding[inputs]
        return x.to(self.numerics.compute)

    def _logits(self, mb: MicroBatch, x: Tensor) -> Tensor:
        rows = output_rows(mb)
        if not rows:
            return torch.empty(0, self.shape.vocab, device=x.device)
        if len(rows) != len(x):
            x = x[torch.tensor(rows, device=x.device)]
        return self._head(x)

    def _head(self, x: Tensor) -> Tensor:
        assert self._lm_head is not None
        assert self._output_norm is not None
        return self._lm_head(self._output_norm(x)).float()


def output_rows(mb: MicroBatch) -> list[int]:
    """Rows that the tail samples: every decode and the last of each completing chunk."""
    rows = list(range(mb.decodes))
    completing = set(mb.completing)
    end = 0
    for span, count in enumerate(mb.rows):
        end += count
        if span in completing:
            rows.append(end - 1)
    return rows


def _kv_memory(sizes: KvSizes, numerics: Numerics) -> KvMemory:
    if numerics.device.type == "cpu":
        return SlotKv(sizes, numerics.compute)
    return PagedKv(sizes, numerics)
