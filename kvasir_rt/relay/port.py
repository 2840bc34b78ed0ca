"""How a relay reaches workers that dialled another relay: one interface, two engines.

With `OneRelay` nobody else is there. `nats_port.NatsPort` joins any number of relays through a NATS
server. What is here is delivered here in both cases, and never touches the port.
"""

from typing import NamedTuple, Protocol

from kvasir_core.swarm.words import Session, WorkerId
from kvasir_rt.swarm.frames import Buffer, Call, Fault, Reply


class Origin(NamedTuple):
    """Where an answer goes: the relay of the coordinator, and that relay's number of the call."""

    relay: str  # Empty: this one.
    number: int


class Sink(Protocol):
    """What a port hands to its relay. Nothing here waits or raises."""

    def deliver_call(self, origin: Origin, call: Call, payload: Buffer) -> None:
        """Somebody elsewhere calls a worker of ours, or one who just left."""
        ...

    def deliver_drop(self, origin: Origin) -> None: ...

    def deliver_answer(self, number: int, header: Reply | Fault, payload: Buffer) -> None:
        """To our call of that number."""
        ...

    def deliver_attached(self, worker: WorkerId, session: Session, *, is_here: bool) -> None:
        """A worker elsewhere came (`is_here`) or went."""
        ...


class RelayPort(Protocol):
    """The way to other relays. Nothing but `open` and `close` waits."""

    async def open(self, sink: Sink) -> None:
        """Raises `PortError`: it cannot be reached."""
        ...

    async def close(self) -> None: ...

    def attach(self, worker: WorkerId, session: Session) -> None:
        """This worker can be called through us from now on."""
        ...

    def detach(self, worker: WorkerId, session: Session) -> None: ...

    def call(self, number: int, call: Call, payload: Buffer) -> Fault | None:
        """Send a call to wherever the worker is; a `Fault` if that is known to be nowhere."""
        ...

    def drop(self, number: int, worker: WorkerId, session: Session) -> None: ...

    def answer(self, origin: Origin, header: Reply | Fault, payload: Buffer) -> None: ...

    def figures(self) -> dict[str, float]: ...


class OneRelay:
    """There is no other relay."""

    async def open(self, sink: Sink) -> None:
        del sink

    async def close(self) -> None:
        pass

    def attach(self, worker: WorkerId, session: Session) -> None:
        pass

    def detach(self, worker: WorkerId, session: Session) -> None:
        pass

    def call(self, number: int, call: Call, payload: Buffer) -> Fault | None:
        del number, payload
        return Fault(call.request, "closed", "that worker is not here under that session")

    def drop(self, number: int, worker: WorkerId, session: Session) -> None:
        pass

    def answer(self, origin: Origin, header: Reply | Fault, payload: Buffer) -> None:
        del header, payload
        raise AssertionError(f"nobody elsewhere can have called: {origin}")

    def figures(self) -> dict[str, float]:
        return {}
