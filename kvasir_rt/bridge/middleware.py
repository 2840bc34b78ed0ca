"""What surrounds every request: its id, its key, its body's bounds, its log line and its count.

Plain ASGI, so that streams pass untouched.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir_rt.bridge.errors import (
    ApiError,
    ClientGone,
    error_content,
    error_response,
    json_response,
)
from kvasir_rt.bridge.limits import HEADER_BYTES_MAX, Limits
from kvasir_rt.bridge.live_page import RING_FILES, SWARM_FILES
from kvasir_rt.logs import log_event, request_id_of_task

logger = logging.getLogger("kvasir.bridge")

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
OPEN_PATHS = frozenset({"/health", *RING_FILES, *SWARM_FILES})
"""A load balancer has no key, and health tells nothing; a page's files are the same everywhere."""

Counted = Callable[[Scope, int, float], None]
"""Called once per answer with its scope, status and seconds."""


class Surround:
    """Outermost: gives the request its id, logs and counts its answer, turns a crash into a 500."""

    def __init__(self, app: ASGIApp, *, counted: Counted) -> None:
        self._app = app
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.match(given) else f"req-{secrets.token_hex(8)}"
        token = request_id_of_task.set(request_id)
        scope["kvasir.request_id"] = request_id
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request crashed", extra={"fields": {"path": scope["path"]}})
            if status:
                raise  # The answer had begun: the server cuts the connection.
            content = error_content(
                500, f"Internal error; the log has it under request id {request_id}.", "internal"
            )
            await json_response(content, status=500)(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - started
            self._counted(scope, status or 499, seconds)
            log_event(
                logger,
                "request answered" if status else "client left before the answer",
                level=logging.DEBUG if scope["path"] in {"/health", "/metrics"} else logging.INFO,
                method=scope["method"],
                path=scope["path"],
                status=status or None,
                seconds=round(seconds, 4),
                **scope.get("kvasir.fields", {}),
            )
            request_id_of_task.reset(token)


class Door:
    """Refuses who has no key, browsers sent here by another site, and long headers.

    Args:
        app: What is behind the door.
        api_key: The key every path but `/health` needs; None leaves the door open (loopback only).
        header_bytes_max: The server looks only at headers that do not come whole.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, header_bytes_max: int = HEADER_BYTES_MAX
    ) -> None:
        self._app = app
        self._header_bytes_max = header_bytes_max
        self._digest = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._too_long(scope)
            refusal = refusal or self._refusal(scope["path"], Headers(scope=scope))
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _too_long(self, scope: Scope) -> ApiError | None:
        line = len(scope["raw_path"]) + len(scope["query_string"])
        found = line + sum(len(name) + len(value) for name, value in scope["headers"])
        if found <= self._header_bytes_max:
            return None
        return ApiError(
            400,
            f"The headers have {found} bytes; the limit is {self._header_bytes_max}.",
            code="invalid_http",
        )

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if path in OPEN_PATHS:
            return None
        if self._digest is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._digest)
            if scheme.lower() != "bearer" or not is_right:
                return ApiError(
                    401,
                    "This server needs an API key: send the header 'Authorization: Bearer KEY'.",
                    code="invalid_api_key",
                )
            return None
        return _foreign_page(headers)


def _digest(key: bytes) -> bytes:
    """Digests have one length, so comparing them tells nothing about the key, its length either."""
    return hashlib.sha256(key).digest()


def _foreign_page(headers: Headers) -> ApiError | None:
    """Without a key, only the machine's own programs are trusted, not what its browser visits."""
    host = headers.get("host", "")
    name = urlsplit(f"//{host}").hostname if _is_host(host) else None
    if host and (name is None or not (name == "localhost" or _is_address(name))):
        return ApiError(
            403,
            f"Host {host[:80]!r} is neither localhost nor an IP address; without an API key other "
            "names are refused (a web page could have chosen them).",
            code="host_not_allowed",
        )
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return ApiError(
            403,
            f"Origin {origin[:80]!r} is another site; set an API key to allow it.",
            code="origin_not_allowed",
        )
    return None


def _is_host(text: str) -> bool:
    return (
        re.fullmatch(r"[A-Za-z0-9.-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?", text) is not None
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Bodies:
    """Reads request bodies within the limits, counting the bytes of all of them together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes_held = 0

    async def read(self, scope: Scope, receive: Receive) -> bytearray:
        """The whole body.

        Raises:
            ApiError: 400 for a bad length, 408 too slow, 413 too large, 429 all bodies too large.
            ClientGone: The connection ended before the body did.
        """
        stated = self._stated_bytes(Headers(scope=scope))
        limit = self._limits.body_bytes_max
        if stated is not None and stated > limit:
            raise _too_large(stated, limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s_max):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    self._take(len(message.get("body", b"")), body)
                    body += message.get("body", b"")
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            raise ApiError(
                408,
                f"The body did not arrive within {self._limits.body_s_max:g} s "
                f"({len(body)} bytes did).",
                code="body_timeout",
            ) from None
        finally:
            self._bytes_held -= len(body)

    def _take(self, more: int, body: bytearray) -> None:
        if len(body) + more > self._limits.body_bytes_max:
            raise _too_large(len(body) + more, self._limits.body_bytes_max)
        if self._bytes_held + more > self._limits.bodies_bytes_max:
            raise ApiError(
                429,
                "Too many large bodies are being received at once; try again.",
                code="bodies_full",
                retry_after_s=1,
            )
        self._bytes_held += more

    @staticmethod
    def _stated_bytes(headers: Headers) -> int | None:
        text = headers.get("content-length")
        return int(text) if text is not None and text.isdecimal() else None


def _too_large(found: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body has at least {found} bytes; the limit is {limit}.",
        code="body_too_large",
    )
