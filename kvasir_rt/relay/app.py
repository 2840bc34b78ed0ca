"""The relay's door: an ASGI application that checks a dial before it is a WebSocket.

The token is in `Authorization`, never in the URL; a worker names its session in `Kvasir-Session`,
a coordinator has none. Refusals are HTTP answers in the one error form.
"""

import logging
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvasir_core.swarm.words import Session
from kvasir_rt.bridge.errors import ApiError, bad_request, error_response
from kvasir_rt.logs import log_event
from kvasir_rt.relay.gate import Gate
from kvasir_rt.relay.relay import Relay
from kvasir_rt.relay.websocket import ABORT_KEY, AsgiSocket
from kvasir_rt.swarm.frames import SESSION_HEADER
from kvasir_rt.swarm.protocol import PROTOCOL, PROTOCOL_HEADER

logger = logging.getLogger("kvasir.relay")

TOKEN_CHARACTERS_MAX = 512
SESSION_MAX = 1 << 31


class RelayApp:
    """For WebSocket scopes of any path; mount it at `/api/expert-relay`."""

    def __init__(self, relay: Relay, gate: Gate) -> None:
        self.relay = relay
        self._gate = gate
        self._knocking = 0
        self.refused = 0

    async def close(self) -> None:
        await self.relay.close()

    def figures(self) -> Mapping[str, float]:
        return {**self.relay.figures(), "refused_total": self.refused}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "websocket"
        if (await receive())["type"] != "websocket.connect":
            return
        extensions = scope.get("extensions") or {}
        socket = AsgiSocket(receive, send, extensions.get(ABORT_KEY))
        try:
            await self._admit(scope, socket, send)
        except ApiError as refusal:
            self.refused += 1
            log_event(logger, "dial refused", status=refusal.status, why=refusal.message)
            await _refuse(refusal, scope, receive, send)

    async def _admit(self, scope: Scope, socket: AsgiSocket, send: Send) -> None:
        """Raises ApiError before the WebSocket is accepted, or serves it to its end."""
        relay = self.relay
        if self._knocking >= relay.limits.knocking_max:
            raise ApiError(503, "Too many dials at once; try again.", code="overloaded")
        self._knocking += 1
        try:
            token, session = _credentials(scope)
            if session is None:
                _check_room(len(relay.coordinators), relay.limits.coordinators_max, "coordinators")
                await self._gate.admit_coordinator(token)
                worker = None
            else:
                _check_room(len(relay.workers), relay.limits.workers_max, "workers")
                worker = await self._gate.open_worker(token, session)
        finally:
            self._knocking -= 1
        if worker is None or session is None:
            await send({"type": "websocket.accept"})
            await relay.serve_coordinator(socket)
            return
        try:
            await send({"type": "websocket.accept"})
            await relay.serve_worker(socket, worker, session)
        finally:
            await self._gate.close_worker(worker, session)


def _credentials(scope: Scope) -> tuple[str, Session | None]:
    if scope.get("query_string"):
        raise bad_request("The relay's URL has no query; the token is sent in Authorization.")
    headers = Headers(scope=scope)
    if "origin" in headers:
        raise ApiError(403, "Browsers have no business here.", code="origin_not_allowed")
    spoken = headers.get(PROTOCOL_HEADER, str(PROTOCOL))
    if spoken != str(PROTOCOL):
        raise bad_request(
            f"{PROTOCOL_HEADER} is {spoken[:32]!r}, here it is {PROTOCOL}: use one release."
        )
    given = headers.getlist("authorization")
    if len(given) > 1 or len(headers.getlist(SESSION_HEADER)) > 1:
        raise bad_request(f"Authorization and {SESSION_HEADER} are sent once.")
    kind, _, token = (given[0] if given else "").partition(" ")
    token = token.strip()
    if kind.lower() != "bearer" or not 0 < len(token) <= TOKEN_CHARACTERS_MAX:
        raise ApiError(401, "Send 'Authorization: Bearer TOKEN'.", code="unauthenticated")
    return token, _session(headers.get(SESSION_HEADER))


def _session(text: str | None) -> Session | None:
    if text is None:
        return None
    is_number = text.isascii() and text.isdecimal() and len(text) <= 10
    if not is_number or int(text) > SESSION_MAX:
        raise bad_request(
            f"{SESSION_HEADER} is {text[:32]!r}; it is the relay_session of the last heartbeat."
        )
    return Session(int(text))


def _check_room(found: int, most: int, what: str) -> None:
    if found >= most:
        raise ApiError(503, f"{most} {what} are connected, the most.", code="full")


async def _refuse(refusal: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """An HTTP answer where the server can send one, else a closed door (403)."""
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    answer = error_response(refusal)

    async def send_http(message: Mapping[str, object]) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await answer({"type": "http", "method": "GET", "headers": []}, receive, send_http)
