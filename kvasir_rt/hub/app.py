"""The hub's HTTP application.

The life of a request: (1) the protocol bounds headers and connections, (2) `Surround` names it,
(3) on loopback `Door` turns away what a web page sends, (4) `Intake` bounds the body and checks
that it is JSON, (5) FastAPI checks every field, (6) `access` asks who it is and how often, (7) the
route hands over to `HubService`, which tells the core. Every refusal has one form.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from kvasir_rt.bridge.errors import (
    ApiError,
    bad_request,
    error_response,
    on_api_error,
    on_http_exception,
)
from kvasir_rt.bridge.live_feed import PATH as LIVE_PATH
from kvasir_rt.bridge.live_feed import LiveFeed
from kvasir_rt.bridge.live_page import SWARM_FILES
from kvasir_rt.bridge.middleware import Door, Surround
from kvasir_rt.hub.access import Gate
from kvasir_rt.hub.intake import Intake
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.metrics import HubCollector, HubMeters
from kvasir_rt.hub.relaying import RelayMount
from kvasir_rt.hub.routes import SHOWN, router
from kvasir_rt.hub.service import HubService

RELAY_PATH = "/api/expert-relay"
NO_RELAY_CODE = 1013  # Try again later.
DESCRIPTION = (
    "Demand market, wiring and slices of a Kvasir swarm. Ranges are half-open: [a, b) is written "
    "[a, b]. Nodes sign a challenge and send the token they get; coordinators send the hub's "
    "service token."
)


def make_app(
    service: HubService, limits: HubLimits, *, is_exposed: bool, relay: RelayMount | None = None
) -> FastAPI:
    """The application.

    Args:
        service: Has started, or will before the first request.
        limits: Of bodies, queries and rates.
        is_exposed: It will listen beyond this machine.
        relay: Answers WebSockets at `/api/expert-relay`; None refuses them.
    """
    app = FastAPI(
        title="Kvasir hub",
        description=DESCRIPTION,
        version="1",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.include_router(router)
    app.router.routes.append(WebSocketRoute(RELAY_PATH, _RelayEnd(relay)))
    gate = Gate(service.keeper, limits, is_exposed=is_exposed)
    schema = app.openapi()
    _tell_truth(schema, is_exposed=is_exposed)
    meters = HubMeters(schema["paths"])
    meters.add(HubCollector(service, gate, relay))

    async def shown() -> dict[str, Any]:
        return service.swarm()

    app.state.live = LiveFeed(shown)
    app.state.service = service
    app.state.gate = gate
    app.state.meters = meters
    app.state.query_names = _query_names(schema)
    posts = frozenset(path for path, methods in schema["paths"].items() if "post" in methods)
    app.add_middleware(Intake, limits=limits, posts=posts)
    if not is_exposed:
        app.add_middleware(Door, api_key=None)
    app.add_middleware(Surround, counted=meters.answered)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    return app


class _RelayEnd:
    """The mounted relay, or a refusal."""

    def __init__(self, relay: RelayMount | None) -> None:
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._relay is not None:
            await self._relay(scope, receive, send)
            return
        socket = WebSocket(scope, receive, send)
        await socket.close(NO_RELAY_CODE, "This hub carries no relay.")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals: no such path, no such method, a body it cannot read."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(
            ApiError(404, "There is no such path here; GET /docs lists them.", code="not_found")
        )
    return await on_http_exception(request, error)


async def _on_invalid(_request: Request, error: Exception) -> Response:
    """FastAPI's 422 as our 400: the first field that is wrong, and why."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])[:120]
    more = len(error.errors()) - 1
    message = f"{first['msg']}" if not where else f"{where}: {first['msg']}"
    if more:
        message += f" (and {more} more)"
    return error_response(bad_request(message[:400] + "."))


def _query_names(schema: dict[str, Any]) -> dict[tuple[str, str], frozenset[str]]:
    """What each route takes in its query; of paths outside the schema nothing."""
    names = {
        (method.upper(), path): frozenset(
            each["name"] for each in found.get("parameters", ()) if each["in"] == "query"
        )
        for path, methods in schema["paths"].items()
        for method, found in methods.items()
    }
    others = ("/openapi.json", "/docs", LIVE_PATH, *SWARM_FILES)
    return {**names, **{("GET", path): frozenset() for path in others}}


def _tell_truth(schema: dict[str, Any], *, is_exposed: bool) -> None:
    """What FastAPI cannot know: we send no 422, and on loopback looking needs no token."""
    for methods in schema["paths"].values():
        for found in methods.values():
            found["responses"].pop("422", None)
            if SHOWN in found["tags"] and not is_exposed:
                found["security"].append({})
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
