"""What moves a stage's boundaries: one thread that polls all of the stage's sockets.

It receives from upstream, hands over to the compute thread, sends on downstream, and keeps the
control line to the bridge, all beside the computation (ZeroMQ's own thread does the copying). A
stage's life: join, assign, loaded; then per epoch: idle, listening, wired, and laps.
"""

import os
import select
import socket
import threading
import time
import traceback
from dataclasses import dataclass

import zmq

from kvasir_core.plan import Plan
from kvasir_core.units import Epoch, Nanos
from kvasir_rt import frames, wire
from kvasir_rt.handover import Free, Handover, Load, QuitCause, Work
from kvasir_rt.link import (
    Admission,
    CurveKeys,
    Inbox,
    Outlet,
    Traffic,
    open_socket,
    reachable,
    secure_client,
)
from kvasir_rt.ring_errors import JoinError, WireError

BEAT_NS = 200_000_000
SILENCE_NS = 5_000_000_000  # Ten pulses of the bridge.
STOP_LINGER_MS = 500  # So that the reason of a failure still reaches the bridge.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """How a stage finds its bridge.

    Attributes:
        control: The bridge's control endpoint.
        secret: What proves that this stage belongs here.
        stage: Its index, or None to be given one.
        listen: Endpoint for the upstream neighbour; a TCP port may be 0.
        bridge_key: The bridge's CURVE key; None on one host, where nothing is encrypted.
        sha256: Of the model file, if this stage brings its own.
        wait_s: Exit when the bridge has not answered within so long, or falls silent later; None:
            the parent's death ends us.
    """

    control: str
    secret: str
    stage: int | None
    listen: str
    bridge_key: bytes | None = None
    sha256: str = ""
    wait_s: float | None = None


def boot_id() -> str:
    """Processes with equal boot ids share one monotonic clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123 - one line, no path.
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()} unknown"


def monotonic() -> Nanos:
    return Nanos(time.monotonic_ns())


class Agent:
    """Owns the stage's sockets; `run` is its thread."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.handover = Handover(self._wake)
        self._context: zmq.Context[zmq.SyncSocket] = zmq.Context()
        is_secure = options.bridge_key is not None
        self._keys = CurveKeys.fresh() if is_secure else None
        self._admission = Admission(self._context) if is_secure else None
        self._control = open_socket(
            self._context, zmq.DEALER, options.control, wire.CONTROL_BYTES_MAX
        )
        self._control.linger = STOP_LINGER_MS
        if self._keys is not None:
            assert options.bridge_key is not None
            secure_client(self._control, self._keys, options.bridge_key)
        self._poller = zmq.Poller()
        self._assign: wire.Assign | None = None
        self._inbox: Inbox | None = None
        self._outlet: Outlet | None = None
        self._wiring: wire.Wiring | None = None
        self._upstream: bytes | None = None  # The welcomed peer of this epoch.
        self._epoch = Epoch(-1)
        self._traffic = Traffic()
        self._is_over = False
        self._next_beat = Nanos(0)
        self._last_pulse = monotonic()
        self._was_answered = False
        self.thread = threading.Thread(target=self._run, name="agent", daemon=True)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Send what is queued, then stop the thread. Called by the compute thread."""
        self._is_over = True
        self._wake()
        self.thread.join()
        os.close(self._wake_fd)

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            self._connect()
            while not self._is_over:
                self._turn()
            self._send_queued()
        except (WireError, JoinError, zmq.ZMQError) as error:
            self._fail(str(error))
        except Exception:  # noqa: BLE001 - Whatever it was, the bridge must hear of it.
            self._fail(traceback.format_exc()[-wire.TEXT_MAX :])
        finally:
            for link in (self._inbox, self._outlet, self._control, self._admission):
                if link is not None:
                    link.close()
            self._context.term()

    def _connect(self) -> None:
        options = self._options
        self._poller.register(self._wake_fd, select.POLLIN)
        self._poller.register(self._control, zmq.POLLIN)
        if self._admission is not None:
            self._poller.register(self._admission.socket, zmq.POLLIN)
        self._control.connect(options.control)
        keys = self._keys
        self._tell(
            wire.Join(
                protocol=wire.PROTOCOL,
                secret=options.secret,
                stage=options.stage,
                host=socket.gethostname(),
                pid=os.getpid(),
                boot=boot_id(),
                server_key=keys.public if keys else b"",
                client_key=keys.public if keys else b"",
                sha256=options.sha256,
            )
        )

    def _turn(self) -> None:
        wait_ms = max(0, self._next_beat - monotonic()) // 1_000_000 + 1
        ready = dict(self._poller.poll(wait_ms))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._admission is not None and self._admission.socket in ready:
            self._admission.answer()
        if self._control in ready:
            self._hear_bridge()
        if self._inbox is not None and self._inbox.socket in ready:
            self._hear_upstream(self._inbox)
        if self._outlet is not None and self._outlet.socket in ready:
            self._hear_downstream(self._outlet)
        if self._outlet is not None and self._outlet.monitor in ready:
            self._check_outlet(self._outlet)
        self._send_queued()
        self._beat()

    def _fail(self, why: str) -> None:
        self._tell(wire.Failed(why))
        self.handover.quit(QuitCause.FAILED, why)

    def _tell(self, message: wire.ToBridge) -> None:
        data = wire.encode(message)
        self._traffic.add("out", "control", len(data))
        self._control.send(data)

    # ------------------------------------------------------------------ the bridge

    def _hear_bridge(self) -> None:
        while True:
            try:
                frame = self._control.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._traffic.add("in", "control", len(frame))
            self._obey(wire.decode_to_stage(frame))

    def _obey(self, message: wire.ToStage) -> None:
        self._last_pulse = monotonic()
        self._was_answered = True
        match message:
            case wire.Pulse(bridge_ns):
                self._tell(wire.Echo(bridge_ns, monotonic()))
            case wire.Assign():
                self._take_role(message)
            case wire.NewEpoch(epoch):
                self._epoch = epoch
                self._upstream = None
                self._drop_outlet()
                self.handover.begin_epoch(epoch)
            case wire.Wiring(epoch, upstream_key):
                if epoch == self._epoch:
                    self._wiring = message
                    if self._admission is not None:
                        self._admission.upstream_key = upstream_key
                    self._tell(wire.Listening(epoch))
            case wire.Connect(epoch):
                if epoch == self._epoch:
                    self._greet()
            case wire.Slow(factor):
                self.handover.slowdown = factor
            case wire.Stop(why, may_rejoin):
                self.handover.quit(QuitCause.FAILED if may_rejoin else QuitCause.STOPPED, why)

    def _take_role(self, assign: wire.Assign) -> None:
        if assign.protocol != wire.PROTOCOL:
            raise JoinError(
                f"the bridge speaks protocol {assign.protocol}, this stage {wire.PROTOCOL}"
            )
        if assign.plan.digest != assign.digest:
            raise JoinError(
                f"the plan's digest is {assign.plan.digest}, the bridge says {assign.digest}"
            )
        if not 0 <= assign.stage < assign.plan.stages:
            raise JoinError(f"stage {assign.stage} is not one of {assign.plan.stages}")
        self._assign = assign
        self._inbox = Inbox(
            self._context, self._options.listen, frames.boundary_frame_max(assign.plan), self._keys
        )
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self.handover.put(Load(assign))

    @property
    def endpoint(self) -> str:
        """Where the upstream connects, once the plan is known."""
        return self._inbox.endpoint if self._inbox is not None else ""

    def _greet(self) -> None:
        assign, wiring = self._assign, self._wiring
        assert assign is not None
        assert wiring is not None
        self._outlet = Outlet(
            self._context,
            reachable(wiring.next_endpoint, self._options.control),
            frames.header_bytes_max(assign.plan),
            self._keys,
            wiring.next_key,
        )
        self._poller.register(self._outlet.socket, zmq.POLLIN)
        self._poller.register(self._outlet.monitor, zmq.POLLIN)
        self._outlet.send(wire.encode(hello_of(assign, assign.stage, self._epoch)))

    def _drop_outlet(self) -> None:
        if self._outlet is not None:
            self._poller.unregister(self._outlet.socket)
            self._poller.unregister(self._outlet.monitor)
            self._outlet.close()
            self._outlet = None

    def _beat(self) -> None:
        now = monotonic()
        if now < self._next_beat:
            return
        self._next_beat = Nanos(now + BEAT_NS)
        holding = self.handover.holding
        since = holding.computing_since if holding is not None else None
        self._tell(
            wire.Beat(
                epoch=self._epoch,
                holding=holding.micro_batch if holding is not None else None,
                held_ns=now - since if since is not None else 0,
                rows=holding.rows if holding is not None else 0,
                traffic=dict(self._traffic.bytes),
                experts=self.handover.beside(),
            )
        )
        wait_s = self._options.wait_s
        if wait_s is not None and now - self._last_pulse > (
            SILENCE_NS if self._was_answered else wait_s * 1e9
        ):
            where = self._options.control.removeprefix("tcp://")
            if self._was_answered:
                why = f"the bridge at {where} was silent for {SILENCE_NS / 1e9:g} s"
                self.handover.quit(QuitCause.FAILED, why)
            else:
                why = f"no bridge answered at {where} within {wait_s:g} s"
                self.handover.quit(QuitCause.NO_BRIDGE, why)

    # ------------------------------------------------------------------ neighbours

    def _hear_upstream(self, inbox: Inbox) -> None:
        assign = self._assign
        assert assign is not None
        while (message := inbox.receive()) is not None:
            received = monotonic()
            header = wire.decode_edge(message.header)
            body_bytes = len(message.body) if message.body is not None else 0
            kind = type(header).__name__.lower()
            self._traffic.add("in", kind, len(message.header), body_bytes)
            if isinstance(header, wire.Hello):
                self._welcome(inbox, message.peer, header)
            elif message.peer != self._upstream:
                continue  # A neighbour of an older epoch; its frames mean nothing now.
            elif isinstance(header, wire.Lap) and header.micro_batch.epoch == self._epoch:
                if body_bytes != header.body_bytes:
                    raise WireError(
                        f"a body of {body_bytes} bytes came, {header.body_bytes} were announced"
                    )
                frames.check_lap(header, assign.plan, assign.stage)
                if self.handover.waiting >= (assign.plan.credits or 1 << 30):
                    raise WireError(f"upstream sent more than {assign.plan.credits} micro-batches")
                self.handover.put(Work(header, message.body, received))
            elif isinstance(header, wire.Release) and header.epoch == self._epoch:
                self.handover.put(Free(header))
            else:
                raise WireError(f"upstream sent {kind} where a lap or a release was due")

    def _welcome(self, inbox: Inbox, peer: bytes, hello: wire.Hello) -> None:
        assign = self._assign
        assert assign is not None
        why = frames.check_hello(hello, hello_of(assign, assign.stage - 1, self._epoch))
        if why:
            inbox.send(peer, wire.Refusal(why))
            return
        self._upstream = peer
        inbox.send(peer, wire.Welcome(self._epoch, assign.plan.credits))

    def _hear_downstream(self, outlet: Outlet) -> None:
        while (frame := outlet.receive()) is not None:
            self._traffic.add("in", "credit", len(frame))
            match wire.decode_edge(frame):
                case wire.Welcome(epoch, count):
                    if epoch == self._epoch:
                        self.handover.add_credits(count)
                        self._tell(wire.Wired(epoch))
                case wire.Credit(epoch, count):
                    if epoch == self._epoch:
                        self.handover.add_credits(count)
                case wire.Refusal(why):
                    raise JoinError(f"the next stage refused: {why}")
                case other:
                    raise WireError(f"downstream sent {type(other).__name__.lower()}")

    def _check_outlet(self, outlet: Outlet) -> None:
        if outlet.was_disconnected():
            self._tell(wire.LinkLost(self._epoch))

    def _send_queued(self) -> None:
        outgoing, reports, freed = self.handover.drain()
        for report in reports:
            self._tell(report)
        if freed and self._upstream is not None and self._inbox is not None:
            sent = self._inbox.send(self._upstream, wire.Credit(self._epoch, freed))
            self._traffic.add("out", "credit", sent)
        for kind, header, body in outgoing:
            assert self._outlet is not None
            self._traffic.add("out", kind, len(header), len(body) if body is not None else 0)
            self._outlet.send(header, body)


def hello_of(assign: wire.Assign, sender: int, epoch: Epoch) -> wire.Hello:
    """The greeting of stage `sender` (-1: the bridge) in this ring."""
    return hello(assign.plan, assign.digest, assign.dtype, sender, epoch)


def hello(plan: Plan, digest: str, dtype: str, sender: int, epoch: Epoch) -> wire.Hello:
    """The greeting of stage `sender` (-1: the bridge)."""
    return wire.Hello(
        protocol=wire.PROTOCOL,
        digest=digest,
        epoch=epoch,
        sender=sender,
        layers=plan.layers,
        dtype=dtype,
    )
