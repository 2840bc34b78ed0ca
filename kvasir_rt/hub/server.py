"""The hub on a socket: the bridge's bounded HTTP, and WebSockets for the relay."""

import asyncio
import socket
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.protocol import BridgeProtocol
from kvasir_rt.bridge.server import BACKLOG, CLOSING_S, KEEP_ALIVE_S, SignalFreeServer
from kvasir_rt.relay.websocket import RelayWebSocket
from kvasir_rt.swarm.frames import MESSAGE_BYTES_MAX

WEBSOCKET_QUEUE_MAX = 4


class HubProtocol(BridgeProtocol):
    """As the bridge's, and a connection that becomes a WebSocket has no more headers to send."""

    _is_upgraded = False

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._is_upgraded = True
        self._disarm()
        super().handle_websocket_upgrade(event)

    def _arm_header_timer(self) -> None:
        if not self._is_upgraded:
            super()._arm_header_timer()


def _protocol_for(limits: Limits) -> type[HubProtocol]:
    class BoundedProtocol(HubProtocol):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop, limits=limits)

    return BoundedProtocol


class HubServer:
    """Serves the application on a listening socket until it is stopped."""

    def __init__(self, app: ASGIApp, listener: socket.socket, limits: Limits) -> None:
        self._listener = listener
        self._server = SignalFreeServer(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=_protocol_for(limits),
                ws=RelayWebSocket,
                ws_max_size=MESSAGE_BYTES_MAX,
                ws_max_queue=WEBSOCKET_QUEUE_MAX,
                ws_ping_interval=None,  # The relay has heartbeats of its own.
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSING_S,
                h11_max_incomplete_event_size=limits.header_bytes_max,
            )
        )

    async def serve(self) -> None:
        """Until `stop`; then open connections have been closed."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        self._server.should_exit = True
