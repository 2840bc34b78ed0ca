"""A stage whose routed experts may be computed by workers: the model, and a coordinator beside it.

The coordinator (`ExpertCaller`) lives in threads of this process: it polls the bridge's slots,
keeps the connection to hub and relay, and decides for each layer of each micro-batch which experts
go where. What is not sent is computed here.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from kvasir_core.units import RequestId
from kvasir_rt import logs, wire
from kvasir_rt.experts.backend import RemoteCall, RemoteExpertBackend, load_local
from kvasir_rt.experts.caller import ExpertCaller
from kvasir_rt.experts.hub_link import CallerOptions
from kvasir_rt.gguf_file import GgufFile
from kvasir_rt.model.linear import Numerics
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model.stage_model import Run
from kvasir_rt.model_stage import ModelStage


class ExpertStage:
    """Loads when made, then registers with the hub. Satisfies `stage.OverlapStage`."""

    def __init__(self, assign: wire.Assign, spec: wire.ModelSpec, model_path: str | None) -> None:
        """As `ModelStage`; raises as it does, and CallerError where an event log cannot be had."""
        assert spec.experts is not None
        self._assign = assign
        self._spec = spec
        self._experts = spec.experts
        self._is_joined = model_path is not None
        self._caller: ExpertCaller | None = None
        logs.configure(level=spec.experts.log_level)
        self._stage = ModelStage(assign, spec, model_path, self._make_experts)
        assert self._caller is not None
        self._caller.start()

    @property
    def overlap(self) -> int:
        """Most micro-batches in hand."""
        return self._experts.overlap

    def begin(self, lap: wire.Lap, body: memoryview | None) -> "ExpertRun":
        """See `overlap.OverlapCompute`."""
        return ExpertRun(self._stage, lap, self._stage.begin(lap, body))

    def release(self, requests: Iterable[RequestId]) -> None:
        self._stage.release(requests)

    def reset(self) -> None:
        self._stage.reset()

    def note_blocked(self, blocked_ns: int) -> None:
        """For the coordinator's measure of gain."""
        if blocked_ns and self._caller is not None:
            self._caller.measure(blocked_ns=blocked_ns)

    def counts(self) -> wire.ExpertCounts:
        """As of the last half second."""
        assert self._caller is not None
        return self._caller.counts

    def close(self) -> None:
        """Say goodbye to the hub."""
        if self._caller is not None:
            self._caller.close()

    def _make_experts(self, gguf: GgufFile, numerics: Numerics) -> RemoteExpertBackend:
        layers = self._assign.plan.layers[self._assign.stage]
        options = self._options(ModelShape.of(gguf), str(gguf.path.resolve()))
        self._caller = ExpertCaller(options, load_local(gguf, layers, numerics))
        return RemoteExpertBackend(self._caller)

    def _options(self, shape: ModelShape, path: str) -> CallerOptions:
        experts, stage = self._experts, self._assign.stage
        events = None
        if experts.events is not None:
            name = f"coordinator-{stage}-{os.getpid()}.jsonl"  # A successor keeps the old one.
            events = Path(experts.events) / name
        return CallerOptions(
            hub=experts.hub,
            relay=experts.relay,
            service_token=experts.service_token,
            coordinator=coordinator_name(experts.slots_url, stage),
            model=experts.model,
            model_file=path if experts.brings_file and not self._is_joined else None,
            layers=tuple(range(shape.layers)),
            experts=shape.experts,
            hidden=shape.hidden,
            slots_url=experts.slots_url,
            slots_key=experts.slots_key,
            dtype=experts.dtype,
            policy=experts.policy,
            seed=experts.seed + stage,
            events=events,
        )


class ExpertRun:
    """A micro-batch under way. Satisfies `overlap.Run`."""

    def __init__(self, stage: ModelStage, lap: wire.Lap, run: Run) -> None:
        self._stage = stage
        self._lap = lap
        self._run = run

    def advance(self) -> RemoteCall | None:
        """See `overlap.Run`."""
        call = self._run.advance()
        assert call is None or isinstance(call, RemoteCall)
        return call

    def finish(self) -> wire.Buffer:
        """See `overlap.Run`."""
        return self._stage.outgoing(self._lap, self._run.output)


def coordinator_name(slots_url: str, stage: int) -> str:
    """The same for a stage's successor: at one address there is one ring."""
    return f"{slots_url.partition('://')[2]}/{stage}"
