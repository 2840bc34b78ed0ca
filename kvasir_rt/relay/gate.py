"""What a relay asks the hub: who dials, and may they.

In process where it is embedded, over HTTP where it runs alone.

A worker's token is checked by the hub alone. The service token opens a coordinator's end; a relay
that runs alone has it, since it is one of the hub's services itself.
"""

import hashlib
import hmac
import logging
from typing import Protocol

from kvasir_core.swarm.words import Session, WorkerId
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.hub.auth import Principal, Scope
from kvasir_rt.logs import log_event
from kvasir_rt.swarm import protocol as wire
from kvasir_rt.swarm.hub_http import HubAway, HubError, HubHttp, HubRefused

logger = logging.getLogger("kvasir.relay")

ASK_S_MAX = 5.0


class Gate(Protocol):
    """Every method raises ApiError where the hub refuses."""

    async def admit_coordinator(self, token: str) -> None:
        """401 unless it is the service token."""
        ...

    async def open_worker(self, token: str, session: Session) -> WorkerId:
        """Whose token it is. 401 nobody's, 409 not its current generation."""
        ...

    async def close_worker(self, worker: WorkerId, session: Session) -> None:
        """That connection is over."""
        ...


class HubGate(Protocol):
    """What the hub in this process offers (`kvasir_rt.hub.relaying.RelayGate`)."""

    def who(self, token: str) -> Principal: ...

    def opened(self, token: str, session: int) -> str: ...

    def closed(self, worker: str, session: int) -> None: ...


class EmbeddedGate:
    """The hub is in this process."""

    def __init__(self, hub: HubGate) -> None:
        self._hub = hub

    async def admit_coordinator(self, token: str) -> None:
        if self._hub.who(token).scope is not Scope.SERVICE:
            raise _not_service()

    async def open_worker(self, token: str, session: Session) -> WorkerId:
        return WorkerId(self._hub.opened(token, session))

    async def close_worker(self, worker: WorkerId, session: Session) -> None:
        self._hub.closed(worker, session)


class RemoteGate:
    """The hub is elsewhere.

    Args:
        hub: `http(s)://HOST:PORT`.
        service_token: The hub's, which coordinators show too.
    """

    def __init__(self, hub: str, service_token: str) -> None:
        self._token = service_token
        self._digest = _digest(service_token)
        self._http = HubHttp(hub, ASK_S_MAX)

    async def close(self) -> None:
        await self._http.close()

    async def admit_coordinator(self, token: str) -> None:
        if not hmac.compare_digest(_digest(token), self._digest):
            raise _not_service()

    async def open_worker(self, token: str, session: Session) -> WorkerId:
        body = wire.RelayOpen(token=token, session=session)
        try:
            admitted = await self._http.ask(
                wire.RelayAdmitted, "POST", "/api/relay-sessions", token=self._token, body=body
            )
        except HubRefused as refused:
            status = refused.status if refused.status < 500 else 503
            raise ApiError(status, str(refused), code=refused.code or "refused_by_hub") from None
        except HubAway as away:
            raise ApiError(503, f"The hub cannot be asked: {away}.", code="hub_away") from None
        if admitted.session != session:
            raise ApiError(503, "The hub answered for another session.", code="hub_answer")
        return WorkerId(admitted.worker)

    async def close_worker(self, worker: WorkerId, session: Session) -> None:
        body = wire.RelayClose(worker=worker, session=session)
        try:
            await self._http.ask(
                wire.Done, "POST", "/api/relay-sessions/closed", token=self._token, body=body
            )
        except HubError as error:
            log_event(logger, "the hub was not told", level=logging.WARNING, why=str(error))


def _not_service() -> ApiError:
    return ApiError(
        401,
        "A coordinator's end needs the hub's service token; a worker sends its session too.",
        code="unauthenticated",
    )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
