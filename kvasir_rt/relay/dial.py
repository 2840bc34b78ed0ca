"""The dialling end: workers and coordinators open a connection to the relay, never the reverse."""

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidStatus,
    WebSocketException,
)

from kvasir_core.errors import KvasirError
from kvasir_rt.relay.channel import ChannelClosed
from kvasir_rt.swarm.frames import MESSAGE_BYTES_MAX, SESSION_HEADER
from kvasir_rt.swarm.protocol import PROTOCOL, PROTOCOL_HEADER

RELAY_PATH = "/api/expert-relay"
OPEN_S_MAX = 10.0
REFUSAL_CHARACTERS_MAX = 300


class DialError(KvasirError):
    """The relay did not let us in, or cannot be reached.

    Attributes:
        status: HTTP status of its refusal; 0 if it could not be reached.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class DialSocket:
    """A `channel.Socket` over a connection of the `websockets` library."""

    connection: ClientConnection

    async def send(self, message: bytes) -> None:
        try:
            await self.connection.send(message)
        except ConnectionClosed as closed:
            raise ChannelClosed(str(closed)) from None

    async def receive(self) -> bytes:
        try:
            message = await self.connection.recv()
        except ConnectionClosed as closed:
            raise ChannelClosed(str(closed)) from None
        if not isinstance(message, bytes):
            await self.close(1003, "only binary messages are frames")
            raise ChannelClosed("the relay sent text; only binary messages are frames")
        return message

    async def close(self, code: int, reason: str) -> None:
        await self.connection.close(code, reason)

    def abort(self) -> None:
        self.connection.transport.abort()


class _Connect(connect):
    """Without redirects: where a token goes is the operator's word."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


def relay_url(hub: str) -> str:
    """The embedded relay of a hub at `http(s)://HOST:PORT`."""
    parts = urlsplit(hub)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + RELAY_PATH, "", ""))


async def dial(url: str, token: str, session: int | None = None) -> DialSocket:
    """Open a connection.

    Args:
        url: `ws(s)://HOST:PORT/api/expert-relay`, without a query: the token is in a header.
        token: A node's, or the hub's service token.
        session: A worker's generation; None dials as a coordinator.

    Raises:
        DialError: It was refused, or the relay cannot be reached.
    """
    headers = {"Authorization": f"Bearer {token}", PROTOCOL_HEADER: str(PROTOCOL)}
    if session is not None:
        headers[SESSION_HEADER] = str(session)
    try:
        connection = await _Connect(
            url,
            additional_headers=headers,
            user_agent_header=None,
            compression=None,
            max_size=MESSAGE_BYTES_MAX,
            max_queue=4,
            ping_interval=None,  # Beats are ours.
            open_timeout=OPEN_S_MAX,
            close_timeout=1,
            proxy=None,
        )
    except InvalidStatus as error:
        status = error.response.status_code
        body = (error.response.body or b"").decode("utf-8", "replace")[:REFUSAL_CHARACTERS_MAX]
        raise DialError(f"the relay at {url} answered {status}: {body}", status) from None
    except (OSError, TimeoutError, WebSocketException, EOFError, ValueError) as error:
        raise DialError(f"the relay at {url} cannot be reached: {error}") from None
    return DialSocket(connection)
