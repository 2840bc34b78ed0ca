"""Bodies and queries before the routes see them: bounded, strict JSON, nothing said twice.

Plain ASGI. What passes is handed on as one piece; the router never waits for a slow client.
"""

import json
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir_rt.bridge.errors import ApiError, ClientGone, bad_request, error_response
from kvasir_rt.bridge.middleware import Bodies
from kvasir_rt.bridge.schemas import read_json
from kvasir_rt.hub.limits import HubLimits


class Intake:
    """Refuses bodies that are too large, too slow, no JSON or too deep, and unclear queries.

    Args:
        app: What is behind.
        limits: All of them.
        posts: Paths that take a body with POST; elsewhere a body is never read.
    """

    def __init__(self, app: ASGIApp, *, limits: HubLimits, posts: frozenset[str]) -> None:
        self._app = app
        self._limits = limits
        self._posts = posts
        self._bodies = Bodies(limits.http)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_query(scope["query_string"])
            if scope["method"] == "POST" and scope["path"] in self._posts:
                receive = _replay(await self._body(scope, receive), receive)
        except ClientGone:
            return
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_query(self, query: bytes) -> None:
        if len(query) > self._limits.query_bytes_max:
            raise bad_request(
                f"The query has {len(query)} bytes; at most {self._limits.query_bytes_max}.",
                code="invalid_query",
            )
        names = [name for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True)]
        for name in names:
            if names.count(name) > 1:
                raise bad_request(f"{name[:40]!r} is in the query twice.", code="invalid_query")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        kind = Headers(scope=scope).get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                415,
                f"Content-Type is {kind[:80]!r}; send the body as application/json.",
                code="unsupported_media_type",
            )
        body = bytes(await self._bodies.read(scope, receive))
        containers = body.count(b"[") + body.count(b"{")
        if containers > self._limits.json_containers_max:
            raise bad_request(
                f"The JSON has {containers} opening brackets; at most "
                f"{self._limits.json_containers_max}.",
                code="invalid_json",
            )
        raw = read_json(body)
        self._check_shape(raw)
        json.loads(body, object_pairs_hook=_check_keys)
        # Written anew, so that the router reads exactly what was checked here.
        return msgspec.json.encode(raw)

    def _check_shape(self, raw: Any) -> None:
        """Depth, and keys per object: each unknown one would become an error of its own."""
        level = [raw]
        for _ in range(self._limits.json_depth_max):
            inner: list[Any] = []
            for each in level:
                values = each
                if isinstance(each, dict):
                    values = each.values()
                    if len(each) > self._limits.json_keys_max:
                        raise bad_request(
                            f"An object has {len(each)} keys; at most "
                            f"{self._limits.json_keys_max}.",
                            code="invalid_json",
                        )
                inner += [value for value in values if isinstance(value, dict | list)]
            if not inner:
                return
            level = inner
        raise bad_request(
            f"The JSON is nested more than {self._limits.json_depth_max} levels deep.",
            code="invalid_json",
        )


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    """Readers differ in which of two equal keys counts."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise bad_request(f"{name[:40]!r} is in an object twice.", code="invalid_json")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever the connection says."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
