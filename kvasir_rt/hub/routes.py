"""The hub's endpoints: who may ask, what is asked, what is answered.

Each route only checks the form and hands over to `HubService`.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as PathValue
from pydantic import BeforeValidator
from starlette.responses import Response

from kvasir_core.swarm.words import Slice
from kvasir_rt.bridge.errors import ApiError, bad_request
from kvasir_rt.bridge.live_feed import PATH as LIVE_PATH
from kvasir_rt.bridge.live_feed import FeedResponse
from kvasir_rt.bridge.live_page import SWARM_FILES, page_file
from kvasir_rt.hub.access import (
    NEEDS_NOTHING,
    NEEDS_SERVICE,
    NEEDS_VIEW,
    MemberCaller,
    NodeCaller,
    is_peer_local,
)
from kvasir_rt.hub.page import docs_page
from kvasir_rt.hub.service import HubService
from kvasir_rt.swarm import protocol as wire

SHOWN = "what is shown"
"""Tag of what anybody on this machine may see."""

ERROR = {"model": wire.ErrorBody}
COMMON: dict[int | str, dict[str, Any]] = {
    400: {**ERROR, "description": "The request breaks a rule; the message names it."},
    401: {**ERROR, "description": "No token, or nobody's."},
    403: {**ERROR, "description": "Not with this token."},
    429: {**ERROR, "description": "Too often; Retry-After says when."},
}
WITH_BODY: dict[int | str, dict[str, Any]] = {
    **COMMON,
    408: {**ERROR, "description": "The body came too slowly."},
    413: {**ERROR, "description": "The body is too large."},
    415: {**ERROR, "description": "The body is not application/json."},
}
NOT_FOUND: dict[int | str, dict[str, Any]] = {
    404: {**ERROR, "description": "No such model or coordinator here."}
}
CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {**ERROR, "description": "It contradicts what is known, or is over."}
}
FULL: dict[int | str, dict[str, Any]] = {503: {**ERROR, "description": "A limit is reached."}}
SLICE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The slice, a GGUF file. ETag and Repr-Digest are its SHA-256.",
        "content": {"application/octet-stream": {}},
        "headers": {name: {"schema": {"type": "string"}} for name in ("ETag", wire.DIGEST_HEADER)},
    },
    206: {"description": "The range asked for.", "content": {"application/octet-stream": {}}},
    304: {"description": "The slice that If-None-Match names is the current one."},
    416: {**ERROR, "description": "The range lies outside the file."},
}


def _decimal(value: Any) -> Any:
    """Only the one way to write a number; `+1`, `1.0` and ` 1` are refused."""
    if isinstance(value, str) and (not value.isascii() or not value.isdecimal() or len(value) > 10):
        raise ValueError("must be a decimal number")
    return value


Number = Annotated[int, Query(ge=0, le=wire.COUNT_MAX), BeforeValidator(_decimal)]
ModelQuery = Annotated[str, Query(pattern=wire.NAME_PATTERN, max_length=128)]
ModelPath = Annotated[str, PathValue(pattern=wire.NAME_PATTERN, max_length=128)]
CoordinatorPath = Annotated[str, PathValue(pattern=wire.NAME_PATTERN, max_length=128)]


def _check_query(request: Request) -> None:
    """A parameter that the route does not know is a mistake of the caller's."""
    route = request.scope["route"]
    allowed = request.app.state.query_names[request.method, route.path_format]
    for name in request.query_params:
        if name not in allowed:
            known = f"it takes {', '.join(sorted(allowed))}" if allowed else "it takes none"
            raise bad_request(f"{name[:40]!r} is no parameter of this path; {known}.")


def _service(request: Request) -> HubService:
    service: HubService = request.app.state.service
    return service


Service = Annotated[HubService, Depends(_service)]
router = APIRouter(dependencies=[Depends(_check_query)])

# ---------------------------------------------------------------------- who a node is


@router.post(
    "/api/node-challenge", responses=WITH_BODY, dependencies=[NEEDS_NOTHING], tags=["nodes"]
)
async def challenge(
    request: Request, body: wire.ChallengeRequest, service: Service
) -> wire.Challenge:
    """A nonce to sign. Where the hub admits by invitation, with the join token as bearer."""
    scheme, _, join = request.headers.get("authorization", "").partition(" ")
    return service.challenge(body, join.strip() if scheme.lower() == "bearer" else None)


@router.post("/api/node-token", responses=WITH_BODY, dependencies=[NEEDS_NOTHING], tags=["nodes"])
async def node_token(body: wire.TokenRequest, service: Service) -> wire.NodeToken:
    """A short-lived token for who signed the nonce; the try burns the nonce, right or wrong."""
    return service.node_token(body)


# ---------------------------------------------------------------------- workers


@router.post("/api/expert-volunteer", responses={**WITH_BODY, **NOT_FOUND}, tags=["workers"])
async def volunteer(
    body: wire.VolunteerRequest, service: Service, node: NodeCaller
) -> wire.Assigned | wire.Declined:
    """An idle node asks for a slice; asking again returns the same claim."""
    return service.volunteer(node, body)


@router.post("/api/expert-coverage", responses={**WITH_BODY, **NOT_FOUND, **FULL}, tags=["workers"])
async def coverage(
    body: wire.CoverageReport, service: Service, node: NodeCaller
) -> wire.CoverageReply:
    """A heartbeat: all that the worker serves now."""
    return service.cover(node, body)


@router.get(
    "/api/models/{model:path}/expert-shard",
    responses={**COMMON, **NOT_FOUND, **FULL, **SLICE},
    response_class=Response,
    tags=["workers"],
)
async def shard(
    model: ModelPath,
    layer: Number,
    begin: Number,
    end: Number,
    service: Service,
    caller: MemberCaller,
) -> Response:
    """Experts `[begin, end)` of a layer as a small GGUF; Range, If-Range and If-None-Match work."""
    return await service.shard(caller.node or "service", model, Slice(layer, begin, end))


# ---------------------------------------------------------------------- coordinators


@router.post(
    "/api/coordinators",
    responses={**WITH_BODY, **NOT_FOUND, **CONFLICT, **FULL},
    dependencies=[NEEDS_SERVICE],
    tags=["coordinators"],
)
async def register(
    request: Request, body: wire.CoordinatorRegistration, service: Service
) -> wire.CoordinatorReply:
    """A coordinator presents itself and its model; again at least once per lease."""
    return await service.registry.register(body, is_peer_local=is_peer_local(request))


@router.delete(
    "/api/coordinators/{coordinator:path}",
    responses={**COMMON, **NOT_FOUND},
    dependencies=[NEEDS_SERVICE],
    tags=["coordinators"],
)
async def leave(coordinator: CoordinatorPath, service: Service) -> wire.Done:
    """A coordinator says goodbye."""
    return service.registry.leave(coordinator)


@router.post(
    "/api/expert-serving",
    responses={**WITH_BODY, **NOT_FOUND},
    dependencies=[NEEDS_SERVICE],
    tags=["coordinators"],
)
async def serving(body: wire.ServingReport, service: Service) -> wire.Done:
    """What a coordinator saw of its workers."""
    return service.registry.report_serving(body)


@router.get(
    "/api/expert-dispatch-map",
    responses={**COMMON, **NOT_FOUND},
    dependencies=[NEEDS_SERVICE],
    tags=["coordinators"],
)
async def dispatch_map(model: ModelQuery, service: Service) -> wire.DispatchMap:
    """Connected workers' slices of a model, and the generation to reach each under."""
    return service.dispatch_map(model)


# ---------------------------------------------------------------------- relays


@router.post(
    "/api/relay-sessions",
    responses={**WITH_BODY, **CONFLICT},
    dependencies=[NEEDS_SERVICE],
    tags=["relays"],
)
async def relay_opened(body: wire.RelayOpen, service: Service) -> wire.RelayAdmitted:
    """A relay that runs alone asks whether to admit who dialled it."""
    return service.admit_relay(body.token, body.session)


@router.post(
    "/api/relay-sessions/closed", responses=WITH_BODY, dependencies=[NEEDS_SERVICE], tags=["relays"]
)
async def relay_closed(body: wire.RelayClose, service: Service) -> wire.Done:
    """That worker's connection is over."""
    return service.close_relay(body.worker, body.session)


@router.get(
    "/api/expert-relay",
    responses={426: {**ERROR, "description": "It is not opened as a WebSocket."}, **COMMON},
    response_class=Response,
    dependencies=[NEEDS_NOTHING],
    tags=["relays"],
)
async def relay_over_http() -> None:
    """The relay speaks WebSocket only."""
    raise ApiError(426, "Open this path as a WebSocket.", code="upgrade_required")


# ---------------------------------------------------------------------- what is shown


@router.get("/api/moe/recruitment", responses=COMMON, dependencies=[NEEDS_VIEW], tags=[SHOWN])
async def recruitment(service: Service) -> wire.Recruitment:
    """Each model's load, target and workers."""
    return service.recruitment()


@router.get(
    "/api/expert-demand",
    responses={**COMMON, **NOT_FOUND},
    dependencies=[NEEDS_VIEW],
    tags=[SHOWN],
)
async def demand(service: Service, model: ModelQuery | None = None) -> wire.Demand:
    """What is wanted of each expert, in runs of equal counts."""
    return service.demand(model)


@router.get("/api/swarm", responses=COMMON, dependencies=[NEEDS_VIEW], tags=[SHOWN])
async def swarm(service: Service) -> dict[str, Any]:
    """Everything for a live page, at most a second old."""
    return service.swarm()


async def live_page(request: Request) -> Response:
    return page_file(SWARM_FILES[request.url.path])


for _path in SWARM_FILES:
    router.add_api_route(
        _path, live_page, methods=["GET"], include_in_schema=False, dependencies=[NEEDS_NOTHING]
    )


@router.get(LIVE_PATH, include_in_schema=False, dependencies=[NEEDS_VIEW])
async def live(request: Request) -> Response:
    """`/api/swarm` again and again, as server-sent events, for the page at `/`."""
    return FeedResponse(request.app.state.live)


@router.get(
    "/metrics",
    responses={**COMMON, 200: {"content": {"text/plain": {}}, "description": "The metrics."}},
    response_class=Response,
    dependencies=[NEEDS_VIEW],
    tags=[SHOWN],
)
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    from kvasir_rt.hub.metrics import CONTENT_TYPE

    text: bytes = request.app.state.meters.text()
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


@router.get(
    "/health",
    responses={status: COMMON[status] for status in (400, 429)},
    dependencies=[NEEDS_NOTHING],
    tags=["operation"],
)
async def health(service: Service) -> dict[Literal["status"], str]:
    """`ok`, or `degraded` while state cannot be written; the log says why."""
    return {"status": "degraded" if service.control.store_problem else "ok"}


@router.get("/openapi.json", include_in_schema=False, dependencies=[NEEDS_VIEW])
async def openapi(request: Request) -> dict[str, Any]:
    schema: dict[str, Any] = request.app.openapi()
    return schema


@router.get("/docs", include_in_schema=False, dependencies=[NEEDS_VIEW])
async def docs(request: Request) -> Response:
    return Response(docs_page(request.app.openapi()), media_type="text/html")
