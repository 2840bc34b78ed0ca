"""The bridge: HTTP on one side, submissions and tokens on the other.

The life of a request: (1) the protocol bounds headers and connections, (2) `Surround` names it,
(3) `Door` asks for the key, (4) `Bodies` reads it within the limits, (5) `schemas` checks every
field, (6) `jobs` tokenises and checks lengths, (7) `submissions` admits it and hands it to the
engine, (8) `replies` sends what `generation` has made of its tokens. Before the model is loaded
every path but `/metrics` and the live page's files answers 503.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvasir_rt.bridge.errors import (
    ApiError,
    ClientGone,
    json_response,
    on_api_error,
    on_http_exception,
)
from kvasir_rt.bridge.health import Health
from kvasir_rt.bridge.jobs import JobMaker, Served
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.live_feed import PATH as LIVE_PATH
from kvasir_rt.bridge.live_feed import LiveFeed
from kvasir_rt.bridge.live_page import RING_FILES, page_file
from kvasir_rt.bridge.live_view import LiveView
from kvasir_rt.bridge.meters import CONTENT_TYPE, Meters
from kvasir_rt.bridge.middleware import Bodies, Door, Surround
from kvasir_rt.bridge.replies import send_stream, send_whole
from kvasir_rt.bridge.ring_view import RingCollector, ring_view, slots_view
from kvasir_rt.bridge.schemas import (
    ChatRequest,
    CompletionRequest,
    chat_request,
    completion_request,
    read_json,
    tokenize_request,
)
from kvasir_rt.bridge.shapes import ChatShape, CompletionShape, Shape
from kvasir_rt.bridge.submissions import Answer, Job, Submissions
from kvasir_rt.ring_errors import RingDown
from kvasir_rt.snapshot import RingSnapshot

LOADING_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Ready:
    """What exists once the model is loaded."""

    served: Served
    submissions: Submissions
    jobs: JobMaker
    health: Health
    view: LiveView


class Bridge:
    """The HTTP side of one served model.

    Args:
        limits: Every bound.
        api_key: Needed on every path but `/health`; None only on loopback.
    """

    def __init__(self, limits: Limits | None = None, *, api_key: str | None = None) -> None:
        self.limits = limits or Limits()
        self._ready: Ready | None = None
        self._closed: ApiError | None = None
        self._bodies = Bodies(self.limits)
        self._live = LiveFeed(self._now)
        routes = [
            *(Route(path, self._page, methods=["GET"]) for path in RING_FILES),
            Route(LIVE_PATH, Endpoint(self._listen), methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/slots", self._slots, methods=["GET"]),
            Route("/api/ring", self._ring, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/v1/completions", Endpoint(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(self._chat), methods=["POST"]),
        ]
        self.meters = Meters(route.path for route in routes)
        self.app = Starlette(
            routes=routes,
            middleware=[
                Middleware(Surround, counted=self.meters.answered),
                Middleware(Door, api_key=api_key, header_bytes_max=self.limits.header_bytes_max),
            ],
            exception_handlers={ApiError: on_api_error, HTTPException: on_http_exception},
        )
        self.app.router.redirect_slashes = False

    def open(self, served: Served) -> None:
        """The model is loaded: serve it. Called on the loop."""
        submissions = Submissions(
            served.engine,
            served.tokenizer,
            running_max=served.plan.running_max,
            limits=self.limits,
            meters=self.meters,
        )
        self._ready = Ready(
            served,
            submissions,
            JobMaker(served, self.limits),
            Health(served, submissions, self.limits),
            LiveView(served.model),
        )
        self.meters.add(RingCollector(served.engine.snapshot))

    def drain(self) -> None:
        """New requests are refused; those admitted go on."""
        self.close(ApiError(503, "This server is shutting down.", code="draining"))

    def close(self, error: ApiError) -> None:
        """New requests are refused with this error."""
        self._closed = error
        self._live.close()
        if self._ready is not None:
            self._ready.submissions.refuse_new(error)

    def fail_all(self, error: ApiError) -> None:
        """Ends every request that is still in the ring."""
        if self._ready is not None:
            self._ready.submissions.fail_all(error)

    async def idle(self) -> None:
        """Returns when no submission is in the ring or waiting for it."""
        if self._ready is not None:
            await self._ready.submissions.idle.wait()

    @property
    def live(self) -> int:
        """Submissions in the ring or waiting for it."""
        return self._ready.submissions.live if self._ready is not None else 0

    def _loaded(self) -> Ready:
        if self._closed is not None:
            raise self._closed
        if self._ready is None:
            raise ApiError(
                503,
                "The model is still being loaded.",
                code="loading",
                retry_after_s=LOADING_RETRY_S,
            )
        return self._ready

    async def _health(self, _request: Request) -> Response:
        proof = await self._loaded().health.prove()
        return json_response(
            {"status": "ok", "lap_age_s": round(proof.lap_age_s, 3), "by_probe": proof.by_probe}
        )

    async def _metrics(self, _request: Request) -> Response:
        text = await asyncio.to_thread(self.meters.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def _slots(self, _request: Request) -> Response:
        return json_response(slots_view(await self._snapshot()))

    async def _ring(self, _request: Request) -> Response:
        snapshot = await self._snapshot()
        return json_response(ring_view(self._loaded().served.model, snapshot))

    async def _page(self, request: Request) -> Response:
        return page_file(RING_FILES[request.url.path])

    async def _listen(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loaded()
        await self._live(scope, receive, send)

    async def _now(self) -> dict[str, Any]:
        """The live page's next message."""
        return self._loaded().view.take(await self._snapshot())

    async def _snapshot(self) -> RingSnapshot:
        served = self._loaded().served
        try:
            return await asyncio.to_thread(served.engine.snapshot)
        except RingDown as error:
            raise ApiError(503, f"The ring does not answer: {error}", code="ring_down") from None

    async def _models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [_model_card(self._loaded().served)]})

    async def _model(self, request: Request) -> Response:
        served = self._loaded().served
        asked = request.path_params["model"]
        if asked != served.model:
            raise ApiError(
                404,
                f"There is no model {asked[:80]!r} here; this server has {served.model!r}.",
                code="model_not_found",
            )
        return json_response(_model_card(served))

    async def _tokenize(self, request: Request) -> Response:
        ready = self._loaded()
        raw = await self._json(request.scope, request.receive)
        ids = await ready.jobs.tokenize(tokenize_request(raw, self.limits))
        return json_response(
            {"count": len(ids), "max_model_len": ready.served.positions_max, "tokens": ids}
        )

    async def _completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        ready = self._loaded()
        request = completion_request(await self._json(scope, receive), self.limits)
        job = await ready.jobs.completion(request)
        shape = CompletionShape(
            answer_id=f"cmpl-{secrets.token_hex(12)}",
            model=ready.served.model,
            tokenizer=ready.served.tokenizer,
            has_logprobs=job.wants_logprobs,
            top=request.logprobs or 0,
            has_usage_chunk=_includes_usage(request),
        )
        await self._reply(request, job, shape, scope, receive, send)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        ready = self._loaded()
        request = chat_request(await self._json(scope, receive), self.limits)
        job = await ready.jobs.chat(request)
        shape = ChatShape(
            answer_id=f"chatcmpl-{secrets.token_hex(12)}",
            model=ready.served.model,
            tokenizer=ready.served.tokenizer,
            has_logprobs=job.wants_logprobs,
            top=request.top_logprobs or 0,
            has_usage_chunk=_includes_usage(request),
        )
        await self._reply(request, job, shape, scope, receive, send)

    async def _reply(
        self,
        request: ChatRequest | CompletionRequest,
        job: Job,
        shape: Shape,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        answer = Answer(self._loaded().submissions, job)
        try:
            if request.stream:
                await send_stream(
                    answer,
                    shape,
                    include_usage=_includes_usage(request),
                    limits=self.limits,
                    receive=receive,
                    send=send,
                )
            else:
                await send_whole(answer, shape, scope, receive, send)
        finally:
            scope["kvasir.fields"] = {
                "prompt_tokens": job.prompt_tokens,
                "output_tokens": answer.output_tokens,
                "choices": len(answer.generations),
                "finish": ",".join(sorted({g.finish or "none" for g in answer.generations})),
                "user": request.user,
            }

    async def _json(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        kind = Request(scope).headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                415,
                f"Content-Type is {kind[:80]!r}; send the body as application/json.",
                code="unsupported_media_type",
            )
        return read_json(await self._bodies.read(scope, receive))


class Endpoint:
    """A route as plain ASGI, which can watch its client while it answers."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except ClientGone:
            return


def _includes_usage(request: ChatRequest | CompletionRequest) -> bool:
    options = request.stream_options
    return options is not None and bool(options.include_usage)


def _model_card(served: Served) -> dict[str, Any]:
    return {
        "id": served.model,
        "object": "model",
        "created": served.created,
        "owned_by": "kvasir",
        "max_model_len": served.positions_max,
    }
