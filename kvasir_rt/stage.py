"""The process of one stage: `python -m kvasir_rt.stage`, its configuration on standard input.

The main thread computes; the agent's thread moves frames. A stage never outlives its parent: the
kernel kills it (PDEATHSIG), and a joined stage exits when its bridge falls silent.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from kvasir_core.errors import KvasirError
from kvasir_core.units import RequestId
from kvasir_rt import wire
from kvasir_rt.agent import Agent, AgentOptions, monotonic
from kvasir_rt.errors import StageStateError
from kvasir_rt.handover import (
    Free,
    Handover,
    Holding,
    Load,
    Outgoing,
    Quit,
    QuitCause,
    Reset,
    Work,
)
from kvasir_rt.overlap import OverlapCompute, OverlapDesk, outgoing_of
from kvasir_rt.ring_errors import JoinError, WireError

CONFIG_BYTES_MAX = 1 << 16
PR_SET_PDEATHSIG = 1
EXIT_LOST = 1
EXIT_REFUSED = 2  # This stage, its model or its configuration is wrong: starting again is no use.
EXIT_NO_BRIDGE = 3


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a spawned stage is told; it holds a secret, so it comes on standard input.

    Attributes:
        control: The bridge's control endpoint.
        secret: The ring's.
        stage: Its index; None if the bridge is to choose.
        listen: Endpoint for the upstream neighbour.
        parent: The process without which this one must not live.
        bridge_key: The bridge's CURVE key; empty on one host.
        core: The one CPU core to run on.
        model_path: A joined stage's own copy of the model.
        sha256: Of that copy.
        wait_s: How long to wait for the bridge; None if it is the parent.
    """

    control: str
    secret: str
    stage: int | None
    listen: str
    parent: int
    bridge_key: str = ""
    core: int | None = None
    model_path: str | None = None
    sha256: str = ""
    wait_s: float | None = None


class Compute(Protocol):
    """What a stage does with a micro-batch. `wire.Lap` was checked against the plan."""

    def step(self, lap: wire.Lap, body: memoryview | None) -> wire.Buffer:
        """The boundary bytes, or at the tail the packed result rows."""

    def release(self, requests: Iterable[RequestId]) -> None:
        """Free these requests' KV; unknown ones are ignored."""

    def reset(self) -> None:
        """Free all KV."""


@runtime_checkable
class OverlapStage(OverlapCompute, Protocol):
    """A stage that holds several micro-batches."""

    def reset(self) -> None:
        """Free all KV."""

    def counts(self) -> wire.ExpertCounts:
        """What its coordinator says of itself, from any thread, at once."""

    def close(self) -> None:
        """End what runs beside."""


def load_compute(assign: wire.Assign, model_path: str | None) -> "Compute | OverlapStage":
    """Build what the assignment asks for; a joined stage brings its own model path."""
    match assign.compute:
        case wire.FixedSpec():
            from kvasir_rt.fixed_stage import FixedStage

            return FixedStage(assign.plan, assign.stage, assign.compute)
        case wire.ModelSpec(experts=None):
            from kvasir_rt.model_stage import ModelStage

            return ModelStage(assign, assign.compute, model_path)
        case wire.ModelSpec():
            from kvasir_rt.expert_stage import ExpertStage

            return ExpertStage(assign, assign.compute, model_path)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class StageLoop:
    """What the compute thread does, from its assignment to the end."""

    def __init__(self, agent: Agent, model_path: str | None) -> None:
        self._agent = agent
        self._handover = agent.handover
        self._model_path = model_path
        self._compute: Compute | None = None
        self._overlapping: OverlapStage | None = None  # Instead, with...
        self._desk: OverlapDesk | None = None
        self._is_tail = False

    def run(self) -> Quit:
        """Run until told to quit; returns that."""
        handover = self._handover
        while True:
            item = handover.take() if self._desk is None else self._desk.next_item()
            match item:
                case Load(assign):
                    self._load(assign)
                case Reset(epoch):
                    holder = self._compute or self._overlapping
                    if holder is not None:
                        holder.reset()
                    handover.report(wire.Idle(epoch))
                case Free(release):
                    assert self._compute is not None
                    self._compute.release(release.requests)
                    outgoing = Outgoing("release", wire.encode(release), None)
                    handover.send(release.epoch, outgoing)
                case Work():
                    assert self._compute is not None
                    run_lap(handover, self._compute, item, is_tail=self._is_tail)
                case Quit():
                    return item

    def _load(self, assign: wire.Assign) -> None:
        self._is_tail = assign.stage == assign.plan.stages - 1
        loaded_compute = load_compute(assign, self._model_path)
        if isinstance(loaded_compute, OverlapStage):
            self._overlapping = loaded_compute
            self._handover.beside = loaded_compute.counts
            self._desk = OverlapDesk(self._handover, loaded_compute, is_tail=self._is_tail)
        else:
            self._compute = loaded_compute
        loaded = wire.Loaded(assign.digest, self._agent.endpoint, resident_bytes())
        self._handover.report(loaded)

    def close(self) -> None:
        """Whatever runs beside the compute thread ends."""
        if self._overlapping is not None:
            self._overlapping.close()


def run_lap(handover: Handover, compute: Compute, work: Work, *, is_tail: bool) -> None:
    """Compute one micro-batch and send it on as soon as the next stage has a slot for it."""
    lap, batch = work.lap, work.lap.micro_batch
    start = monotonic()
    handover.holding = Holding(batch.id, batch.row_count, start)
    body = compute.step(lap, work.body)
    end = monotonic()
    if handover.slowdown > 1:
        time.sleep((handover.slowdown - 1) * (end - start) / 1e9)
        end = monotonic()
    handover.holding = Holding(batch.id, batch.row_count, None)
    if handover.wait_credit(batch.epoch):
        sent = monotonic()
        stamps = (*lap.stamps, work.received, start, end, sent)
        handover.send(batch.epoch, outgoing_of(lap, stamps, body, is_tail=is_tail))
    handover.holding = None


def run_stage(options: AgentOptions, model_path: str | None = None) -> Quit:
    """Take part in a ring until it ends; returns how.

    Raises:
        KvasirError: The stage cannot take part, or its model cannot be loaded.
    """
    agent = Agent(options)
    agent.thread.start()
    loop = StageLoop(agent, model_path)
    try:
        return loop.run()
    except KvasirError as error:
        agent.handover.report(wire.Failed(str(error)[: wire.TEXT_MAX]))
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        agent.handover.report(wire.Failed(text[: wire.TEXT_MAX]))
        raise
    finally:
        agent.close()
        loop.close()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill us when our parent dies.

    Raises:
        JoinError: It is dead already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise JoinError(f"the parent process {parent} is gone")


def main() -> int:
    """Entry of a spawned stage. Returns its exit status."""
    try:
        config = msgspec.json.decode(sys.stdin.buffer.read(CONFIG_BYTES_MAX), type=StageConfig)
        die_with_parent(config.parent)
        if config.core is not None:
            os.sched_setaffinity(0, {config.core})
        options = AgentOptions(
            control=config.control,
            secret=config.secret,
            stage=config.stage,
            listen=config.listen,
            bridge_key=config.bridge_key.encode() or None,
            sha256=config.sha256,
            wait_s=config.wait_s,
        )
        end = run_stage(options, config.model_path)
    except (KvasirError, msgspec.MsgspecError) as error:
        print(f"kvasir stage: {error}", file=sys.stderr)
        return EXIT_LOST if isinstance(error, WireError | StageStateError) else EXIT_REFUSED
    if end.why:
        print(f"kvasir stage: {end.why}", file=sys.stderr)
    match end.cause:
        case QuitCause.STOPPED:
            return EXIT_REFUSED if end.why else 0
        case QuitCause.NO_BRIDGE:
            return EXIT_NO_BRIDGE
        case QuitCause.FAILED:
            return EXIT_LOST


if __name__ == "__main__":
    sys.exit(main())
