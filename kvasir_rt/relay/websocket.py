"""The server's end of a WebSocket, over ASGI, with what ASGI lacks: cutting a connection.

`RelayWebSocket` is uvicorn's own protocol over the `websockets` library; it only tells the
application how to abort. With any other server the relay works too, but a frozen peer then keeps
its descriptor until the kernel gives up.
"""

from collections.abc import Callable
from typing import Any, Final

from starlette.types import Message, Receive, Send
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from kvasir_rt.relay.channel import ChannelClosed

ABORT_KEY: Final = "kvasir.abort"


class RelayWebSocket(WebSocketsSansIOProtocol):
    """Puts the transport's `abort` into the scope's extensions; a refusal is no error."""

    async def run_asgi(self) -> None:
        extensions: dict[str, Any] = dict(self.scope["extensions"] or {})
        extensions[ABORT_KEY] = self.transport.abort
        self.scope["extensions"] = extensions
        await super().run_asgi()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # Or the log gets an error from every stranger.


class AsgiSocket:
    """A `channel.Socket` over an accepted ASGI WebSocket."""

    def __init__(self, receive: Receive, send: Send, abort: Callable[[], None] | None) -> None:
        self._receive = receive
        self._send = send
        self._abort = abort

    async def send(self, message: bytes) -> None:
        await self._pass({"type": "websocket.send", "bytes": message})

    async def receive(self) -> bytes:
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            reason = message.get("reason") or "the connection ended"
            raise ChannelClosed(f"{reason} (code {message.get('code', 1005)})")
        data = message.get("bytes")
        if not isinstance(data, bytes):
            await self.close(1003, "only binary messages are frames")
            raise ChannelClosed("it sent text; only binary messages are frames")
        return data

    async def close(self, code: int, reason: str) -> None:
        await self._pass({"type": "websocket.close", "code": code, "reason": reason})
        while (await self._receive())["type"] != "websocket.disconnect":
            pass

    def abort(self) -> None:
        if self._abort is not None:
            self._abort()

    async def _pass(self, message: Message) -> None:
        try:
            await self._send(message)
        except (OSError, RuntimeError) as error:  # uvicorn's own, and what follows a close.
            raise ChannelClosed(f"the connection ended: {type(error).__name__}") from None
