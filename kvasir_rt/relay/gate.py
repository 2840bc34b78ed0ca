"""What a relay asks the hub: who dials, and may they.

In process where it is embedded, over HTTP where it runs alone.

A worker's token is checked by the hub alone. The service token opens a coordinator's end; a relay
that runs alone has it, since it is one of the hub's services itself.
"""

import hashlib
import hmac
import logging
from typing import Protocol

import httpx
import msgspec

from kvasir_core.swarm.words import Session, WorkerId
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.hub.auth import Principal, Scope
from kvasir_rt.logs import log_event

logger = logging.getLogger("kvasir.relay")

ASK_S_MAX = 5.0
ANSWER_BYTES_MAX = 4096


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


class _Admitted(msgspec.Struct):
    worker: str
    session: int


class RemoteGate:
    """The hub is elsewhere.

    Args:
        hub: `http(s)://HOST:PORT`.
        service_token: The hub's, which coordinators show too.
    """

    def __init__(self, hub: str, service_token: str) -> None:
        self._digest = _digest(service_token)
        self._client = httpx.AsyncClient(
            base_url=hub,
            trust_env=False,
            follow_redirects=False,
            timeout=ASK_S_MAX,
            headers={"Authorization": f"Bearer {service_token}", "Accept-Encoding": "identity"},
        )

    async def admit_coordinator(self, token: str) -> None:
        if not hmac.compare_digest(_digest(token), self._digest):
            raise _not_service()

    async def open_worker(self, token: str, session: Session) -> WorkerId:
        answer = await self._ask("/api/relay-sessions", {"token": token, "session": session})
        try:
            admitted = msgspec.json.decode(answer, type=_Admitted)
        except msgspec.MsgspecError as error:
            raise ApiError(503, f"The hub's answer is none: {error}.", code="hub_answer") from None
        if admitted.session != session:
            raise ApiError(503, "The hub answered for another session.", code="hub_answer")
        return WorkerId(admitted.worker)

    async def close_worker(self, worker: WorkerId, session: Session) -> None:
        try:
            await self._ask("/api/relay-sessions/closed", {"worker": worker, "session": session})
        except ApiError as error:  # Its heartbeats will tell the hub in the end.
            log_event(logger, "the hub was not told", level=logging.WARNING, why=error.message)

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, path: str, body: dict[str, object]) -> bytes:
        try:
            async with self._client.stream("POST", path, json=body) as answer:
                data = bytearray()
                async for piece in answer.aiter_raw():
                    data += piece
                    if len(data) > ANSWER_BYTES_MAX:
                        raise ApiError(503, "The hub's answer is too long.", code="hub_answer")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            why = str(error) or type(error).__name__
            raise ApiError(503, f"The hub cannot be asked: {why}.", code="hub_away") from None
        if answer.status_code != httpx.codes.OK:
            status = answer.status_code if answer.status_code < 500 else 503
            raise ApiError(status, _message_of(bytes(data)), code="refused_by_hub")
        return bytes(data)


def _not_service() -> ApiError:
    return ApiError(
        401,
        "A coordinator's end needs the hub's service token; a worker sends its session too.",
        code="unauthenticated",
    )


class _Detail(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Detail


def _message_of(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "The hub refused without a reason."


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
