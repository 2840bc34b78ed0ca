"""Edges between processes on ZeroMQ sockets: bounded, optionally encrypted, rebuilt each epoch.

The receiver binds one `InLink` for its life; a sender connects a fresh `OutLink` in each epoch, so
what an older epoch left in a socket is never taken for new. Links own no thread: whoever polls one
uses it. Sockets refuse a frame above the plan's bound before they read it; between hosts they speak
CURVE, and an `Admission` (the ZAP of ZeroMQ) lets in only the key that the bridge named.
"""

import os
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kvasir_rt import wire
from kvasir_rt.ring_errors import JoinError

HEARTBEAT_MS = 2000  # On TCP, so that a half-open connection is noticed some day.
HEARTBEAT_TIMEOUT_MS = 30_000  # Answers queue behind a large frame on a slow link.
RECONNECT_MS = 20
EDGE_DOMAIN = "edge"
CONTROL_DOMAIN = "control"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
IPC_PATH_MAX = 100  # A UNIX socket's path holds 107 bytes.

POLLIN, NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)  # Plain numbers: flags are slow to combine.
Buffer = wire.Buffer
Socket = zmq.SyncSocket
Context = zmq.Context[zmq.SyncSocket]


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE key pair, Z85 text as bytes."""

    public: bytes
    secret: bytes

    @classmethod
    def fresh(cls) -> "CurveKeys":
        public, secret = zmq.curve_keypair()
        return cls(public, secret)

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public.decode()})"


class Received(NamedTuple):
    """One message from a socket; `body` stays valid as long as it is referred to."""

    peer: bytes
    header: bytes
    body: memoryview | None


BODY_KINDS = {"lap": "boundary", "result": "tokens"}


class Traffic:
    """Bytes by kind and direction, such as `out_boundary`; law R16 is checked on these."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    def add(self, direction: str, kind: str, header: int, body: int = 0) -> None:
        name, body_name = _names(direction, kind)
        self.bytes[name] += header
        if body:
            self.bytes[body_name] += body


@cache
def _names(direction: str, kind: str) -> tuple[str, str]:
    """Of a header's bytes, and of its body's."""
    return f"{direction}_{kind}", f"{direction}_{BODY_KINDS.get(kind, kind)}"


def is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def reachable(endpoint: str, bridge: str) -> str:
    """`endpoint`, or if its host is a wildcard the same port at the bridge's host.

    Whoever listens on every address is on the bridge's machine, and each stage knows that machine
    by the address it joined.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not is_tcp(endpoint) or host not in {"0.0.0.0", "[::]"}:  # noqa: S104 - Compared, not bound.
        return endpoint
    at = bridge.removeprefix("tcp://").rpartition(":")[0] if is_tcp(bridge) else "127.0.0.1"
    return f"tcp://{at}:{port}"


def open_socket(context: Context, kind: int, endpoint: str, frame_max: int) -> Socket:
    """A socket with our options, not bound or connected yet."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.setsockopt(zmq.MAXMSGSIZE, frame_max)
    socket.setsockopt(zmq.SNDHWM, 0)  # Credits bound what is sent; nothing may be dropped.
    if is_tcp(endpoint):
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
    return socket


def has_input(socket: Socket) -> bool:
    """Whether a message waits; much cheaper than the exception of a vain `recv`."""
    return bool(int(socket.get(zmq.EVENTS)) & POLLIN)


def bind(socket: Socket, endpoint: str) -> str:
    """Bind and return the real endpoint (a port of 0 is replaced).

    Raises:
        JoinError: The address cannot be had; it is named.
    """
    if endpoint.startswith("ipc://") and len(endpoint) - 6 > IPC_PATH_MAX:
        raise JoinError(f"socket path {endpoint[6:]} is longer than {IPC_PATH_MAX} bytes")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise JoinError(f"cannot listen on {endpoint}: {os.strerror(error.errno or 0)}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def secure_server(socket: Socket, keys: CurveKeys, domain: str) -> None:
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public
    socket.zap_domain = domain.encode()


def secure_client(socket: Socket, keys: CurveKeys, server_key: bytes) -> None:
    socket.curve_serverkey = server_key
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret


class Admission:
    """Answers ZAP requests: which CURVE client keys may connect to which kind of socket.

    Edges admit the one upstream key the bridge named; the control line admits any key, since a
    joining stage proves itself by the secret in its first message.
    """

    def __init__(self, context: Context) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)
        self.upstream_key = b""

    def answer(self) -> None:
        """Answer all requests that wait."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            version, request_id, domain, _address, _identity, mechanism = frames[:6]
            is_admitted = False
            if mechanism == b"CURVE" and len(frames) == 7:
                key = z85.encode(frames[6])
                is_edge = domain == EDGE_DOMAIN.encode()
                is_admitted = not is_edge or key == self.upstream_key
            status, text = (b"200", b"OK") if is_admitted else (b"400", b"not your ring")
            self.socket.send_multipart([version, request_id, status, text, b"", b""])

    def close(self) -> None:
        self.socket.close()


class Inbox:
    """A bound ROUTER: many may knock, messages are taken without blocking or copying bodies."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        frame_max: int,
        keys: CurveKeys | None = None,
        domain: str = EDGE_DOMAIN,
    ) -> None:
        self.socket = open_socket(context, zmq.ROUTER, endpoint, frame_max)
        if keys is not None:
            secure_server(self.socket, keys, domain)
        try:
            self.endpoint = bind(self.socket, endpoint)
        except JoinError:
            self.socket.close()
            raise

    def receive(self, *, is_there: bool = False) -> Received | None:
        """The next whole message, or None. Messages of a wrong shape are dropped here.

        Args:
            is_there: The socket was polled, and one waits.
        """
        socket = self.socket
        while is_there or has_input(socket):
            is_there = False
            peer = socket.recv(NOBLOCK)  # Put by our end before whatever was sent.
            header = last = socket.recv(NOBLOCK, copy=False)
            body: memoryview | None = None
            if header.more:
                last = socket.recv(NOBLOCK, copy=False)
                body = last.buffer
            if not last.more:
                return Received(peer, header.bytes, body)
            while last.more:
                last = socket.recv(NOBLOCK, copy=False)
        return None

    def send(self, peer: bytes, message: wire.Wire) -> int:
        """Queue a message for a peer; one that has gone loses it. Returns its bytes."""
        data = wire.encode(message)
        self.socket.send_multipart([peer, data], zmq.NOBLOCK)
        return len(data)

    def close(self) -> None:
        self.socket.close()


class Outlet:
    """A connected DEALER: ordered, never blocking; replies come back on it."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        frame_max: int,
        keys: CurveKeys | None = None,
        server_key: bytes = b"",
    ) -> None:
        self.socket = open_socket(context, zmq.DEALER, endpoint, frame_max)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        if server_key:
            assert keys is not None
            secure_client(self.socket, keys, server_key)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(endpoint)

    def send(self, header: bytes, body: Buffer | None = None) -> None:
        """Queue a message. A body is not copied: it must not change any more."""
        if body is None:
            self.socket.send(header)
        else:
            self.socket.send(header, zmq.SNDMORE)
            self.socket.send(body, copy=False)

    def receive(self, *, is_due: bool = False) -> bytes | None:
        """The next reply, or None. `is_due`: one is expected, so it costs more if there is none."""
        if is_due:
            try:
                return self.socket.recv(NOBLOCK)
            except zmq.Again:
                return None
        return self.socket.recv(NOBLOCK) if has_input(self.socket) else None

    def was_disconnected(self) -> bool:
        """Whether the connection broke since the last call (ZeroMQ reconnects by itself)."""
        is_broken = False
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            is_broken = True
        return is_broken

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
