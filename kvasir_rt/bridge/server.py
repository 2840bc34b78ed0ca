"""The bridge on a socket: bound first, served by uvicorn, stopped in order."""

import asyncio
import contextlib
import errno
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator

import uvicorn

from kvasir_core.errors import KvasirError
from kvasir_rt.bridge.app import Bridge
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.bridge.protocol import BridgeProtocol, protocol_for

BACKLOG = 2048
BIND_TRIES_MAX = 8  # Of an automatic port that another process took between bind and listen.
KEEP_ALIVE_S = 30
CLOSING_S = 5  # For answers under way when the drain is over.
DESCRIPTORS_BESIDE_CONNECTIONS = 512


class AddressError(KvasirError):
    """The address cannot be listened on; the message names host, port and why."""

    exit_status = 1  # Of a command that ends with it: another time the address may be free.


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that nobody else can take the port from now on.

    Args:
        host: Name or address.
        port: 0 lets the system choose.

    Raises:
        AddressError: Taken, forbidden or not an address of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(f"cannot listen on {host}:{port}: {error}") from None
    family, kind, protocol, _, address = found[0]
    for _ in range(BIND_TRIES_MAX):
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # A restart need not wait.
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if port == 0 and error.errno == errno.EADDRINUSE:
                continue
            why = os.strerror(error.errno or 0)
            raise AddressError(f"cannot listen on {host}:{port}: {why}") from None
        listener.setblocking(False)
        return listener
    raise AddressError(f"cannot listen on {host}:{port}: no free port was found")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_descriptors(connections: int) -> None:
    """Raises the process's limit of open files so that so many connections fit, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + DESCRIPTORS_BESIDE_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class SignalFreeServer(uvicorn.Server):
    """uvicorn without its own signal handlers: who stops it is decided by `BridgeServer`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class BridgeServer:
    """Serves a bridge on a listening socket until it is stopped."""

    def __init__(self, bridge: Bridge, listener: socket.socket) -> None:
        self.bridge = bridge
        self._listener = listener
        self._server = SignalFreeServer(
            uvicorn.Config(
                bridge.app,
                loop="asyncio",
                http=protocol_for(bridge.limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSING_S,
                h11_max_incomplete_event_size=bridge.limits.header_bytes_max,
            )
        )

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._server.server_state.connections)

    @property
    def bytes_unread(self) -> int:
        """Bytes received and not yet understood, of all connections."""
        connections = self._server.server_state.connections
        return sum(each.bytes_unread for each in connections if isinstance(each, BridgeProtocol))

    async def serve(self) -> None:
        """Until `stop`; then open connections have been closed."""
        await self._server.serve(sockets=[self._listener])

    async def stop(self, drain_s: float, hurry: asyncio.Event | None = None) -> None:
        """Refuses new requests, lets those under way end, then ends the rest with an error.

        Args:
            drain_s: How long requests under way may go on.
            hurry: Set to end the drain early.
        """
        self.bridge.drain()
        waits: list[asyncio.Task[object]] = [asyncio.create_task(self.bridge.idle())]
        if hurry is not None:
            waits.append(asyncio.create_task(hurry.wait()))
        await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self.bridge.fail_all(
            ApiError(503, "This server is shutting down; the request was ended.", code="draining")
        )
        self._server.should_exit = True
