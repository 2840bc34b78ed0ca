"""A stage that computes: the model's layers, and at the tail the sampler with what it must know.

The tail keeps each request's sampling parameters from its first row to its release, and its tokens
only where a penalty needs them. Both come with the rows themselves, so a replay rebuilds them.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from kvasir_core.units import RequestId
from kvasir_rt import frames, wire
from kvasir_rt.gguf_file import GgufFile, open_gguf
from kvasir_rt.model.linear import Numerics
from kvasir_rt.model.moe import ExpertBackend
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model.stage_model import Run, StageModel
from kvasir_rt.ring_errors import JoinError, WireError
from kvasir_rt.sampler import TokenHistory, sample
from kvasir_rt.sampling import SamplingParams

MakeExperts = Callable[[GgufFile, Numerics], ExpertBackend]


class ModelStage:
    """Loads its layers when made; then computes micro-batches in the ring's order."""

    def __init__(
        self,
        assign: wire.Assign,
        spec: wire.ModelSpec,
        model_path: str | None,
        make_experts: MakeExperts | None = None,
    ) -> None:
        """Load.

        Args:
            assign: The plan and this stage's place in it.
            spec: Which model.
            model_path: This machine's copy; None uses the spec's path.
            make_experts: Makes what computes the routed experts; None computes them here.

        Raises:
            JoinError: The plan is not this model's.
            ModelFileError: The file cannot be used.
            ModelMemoryError: It does not fit.
        """
        plan, stage = assign.plan, assign.stage
        with open_gguf(Path(model_path or spec.path)) as gguf:
            shape = ModelShape.of(gguf)
            if shape.layers != plan.layers[-1][1] or shape.hidden != plan.hidden:
                raise JoinError(
                    f"{gguf.path} has {shape.layers} layers of width {shape.hidden}; the plan "
                    f"says {plan.layers[-1][1]} of width {plan.hidden}"
                )
            device = spec.devices[stage]
            experts = (
                make_experts(gguf, Numerics.of(device, assign.dtype)) if make_experts else None
            )
            self._model = StageModel.of_plan(
                gguf, plan, stage, device=device, dtype=assign.dtype, experts=experts
            )
        boundary = self._model.boundary
        if boundary.itemsize != plan.element_bytes:
            raise JoinError(
                f"a boundary element of {assign.dtype} has {boundary.itemsize} bytes; the plan "
                f"says {plan.element_bytes}"
            )
        self._boundary = boundary
        self._hidden = shape.hidden
        self._sampling: dict[RequestId, SamplingParams] = {}
        self._histories: dict[RequestId, TokenHistory] = {}

    def step(self, lap: wire.Lap, body: memoryview | None) -> wire.Buffer:
        """The boundary as it travels, or at the tail the packed result rows."""
        return self.outgoing(lap, self._model.forward(lap.micro_batch, self._inputs(lap, body)))

    def begin(self, lap: wire.Lap, body: memoryview | None) -> Run:
        """A micro-batch that may wait for experts while others are computed."""
        return self._model.begin(lap.micro_batch, self._inputs(lap, body))

    def outgoing(self, lap: wire.Lap, output: torch.Tensor) -> wire.Buffer:
        """What a computed micro-batch's output is on the wire; the tail samples here."""
        if self._model.is_tail:
            return self._sample(lap, output)
        flat = output.cpu().contiguous().view(torch.uint8).reshape(-1)
        return flat.numpy().data

    def _inputs(self, lap: wire.Lap, body: memoryview | None) -> torch.Tensor:
        if body is None:
            ids = np.frombuffer(lap.ids, np.dtype("<i4")).astype(np.int64)
            return torch.from_numpy(ids)
        return torch.frombuffer(body, dtype=self._boundary).view(-1, self._hidden)

    def _sample(self, lap: wire.Lap, logits: torch.Tensor) -> bytes:
        batch = lap.micro_batch
        for index, params in lap.sampling:
            request = batch.requests[index]
            self._sampling[request] = params
            if params.needs_history:
                self._histories[request] = TokenHistory()
        if lap.keeps_ids:
            self._remember(lap)
        outputs = [*range(batch.decodes), *batch.completing]
        requests = [batch.requests[index] for index in outputs]
        unknown = [request for request in requests if request not in self._sampling]
        if unknown:
            raise WireError(f"requests {unknown} came without their sampling parameters")
        picked = sample(
            logits,
            [self._sampling[request] for request in requests],
            [batch.starts[index] + batch.rows[index] for index in outputs],
            [self._histories.get(request) for request in requests],
        )
        return frames.pack_rows(
            [
                frames.ResultRow(None, 0.0) if row is None else frames.ResultRow(*row)
                for row in picked
            ]
        )

    def _remember(self, lap: wire.Lap) -> None:
        """Add this micro-batch's tokens to the histories that are kept."""
        batch, at = lap.micro_batch, 0
        ids = np.frombuffer(lap.ids, np.dtype("<i4"))
        for request, rows in zip(batch.requests, batch.rows, strict=True):
            history = self._histories.get(request)
            if history is not None:
                history.extend(ids[at : at + rows].tolist())
            at += rows

    def release(self, requests: Iterable[RequestId]) -> None:
        gone = list(requests)
        self._model.release(gone)
        for request in gone:
            self._sampling.pop(request, None)
            self._histories.pop(request, None)

    def reset(self) -> None:
        self._model.reset()
        self._sampling.clear()
        self._histories.clear()
