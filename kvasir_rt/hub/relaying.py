"""Where the relay is mounted: what the hub gives it, and what it must answer.

`kvasir_rt.relay` carries the bytes. The hub hands it every WebSocket of `/api/expert-relay` after
checking nothing, because a relay that runs alone must check everything too; both ask the same
questions, here in process and there over `POST /api/relay-sessions`.
"""

from collections.abc import Mapping
from typing import Protocol

from starlette.types import Receive, Scope, Send

from kvasir_rt.hub.auth import Principal
from kvasir_rt.hub.service import HubService


class RelayMount(Protocol):
    """An ASGI application for WebSocket connections, inside the hub's loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def close(self) -> None:
        """End every connection with a close frame."""
        ...

    def figures(self) -> Mapping[str, float]:
        """Gauges for `/metrics`: name without prefix -> value. The names never change."""
        ...


class RelayGate:
    """What a relay asks the hub. Raises ApiError where the hub refuses."""

    def __init__(self, service: HubService) -> None:
        self._service = service

    def who(self, token: str) -> Principal:
        """Whose token; 401 nobody's. A service is a coordinator's end."""
        return self._service.keeper.principal(token)

    def opened(self, token: str, session: int) -> str:
        """A worker dialled: its name. 401 no node's token, 409 not its current generation."""
        return self._service.admit_relay(token, session).worker

    def closed(self, worker: str, session: int) -> None:
        """That connection is over."""
        self._service.close_relay(worker, session)
