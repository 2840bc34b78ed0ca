"""A page's feed: one message a period, made once for all who listen, as server-sent events.

Nobody listens: nothing is made. Somebody reads slowly: they get the newest message, never a queue
of old ones. Listeners are bounded, and a server that shuts down ends their streams.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvasir_rt.bridge.errors import ApiError, error_response
from kvasir_rt.bridge.replies import EventStream

PERIOD_S = 1.0  # What an eye follows; a snapshot of the ring takes well under a millisecond.
LISTENERS_MAX = 32  # Each holds a connection for as long as it likes.
RETRY_S = 5.0
PATH = "/api/live"


class LiveFeed:
    """An ASGI endpoint.

    Args:
        take: Makes the message's content; an `ApiError` becomes the message.
    """

    def __init__(
        self,
        take: Callable[[], Awaitable[Any]],
        *,
        period_s: float = PERIOD_S,
        listeners_max: int = LISTENERS_MAX,
    ) -> None:
        self._take = take
        self._period_s = period_s
        self._listeners_max = listeners_max
        self._ears: set[asyncio.Event] = set()
        self._message: list[Any] = []  # The newest, encoded; empty before the first.
        self._maker: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def listeners(self) -> int:
        return len(self._ears)

    def close(self) -> None:
        """Ends every stream and lets nobody in. Called on the loop."""
        self._is_closed = True
        self._rest()
        for ear in self._ears:
            ear.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal()
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        ear = asyncio.Event()
        self._ears.add(ear)
        if self._maker is None or self._maker.done():
            self._message = []
            self._maker = asyncio.create_task(self._make())
        elif self._message:
            ear.set()
        try:
            async with _gone(receive) as gone:
                await self._tell(EventStream(send), ear, gone)
        finally:
            self._ears.discard(ear)
            if not self._ears:
                self._rest()

    def _refusal(self) -> ApiError | None:
        if self._is_closed:
            return ApiError(503, "This server is shutting down.", code="draining")
        if len(self._ears) >= self._listeners_max:
            return ApiError(
                503,
                f"{self._listeners_max} pages are open, the most; close one or try again.",
                code="listeners_full",
                retry_after_s=RETRY_S,
            )
        return None

    async def _tell(
        self, stream: EventStream, ear: asyncio.Event, gone: "asyncio.Task[None]"
    ) -> None:
        await stream.open()
        while True:
            heard = asyncio.create_task(ear.wait())
            try:
                await asyncio.wait({heard, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                heard.cancel()
            if gone.done():
                return
            ear.clear()
            if self._is_closed:
                await stream.close()
                return
            await stream.events(self._message)

    async def _make(self) -> None:
        """Until nobody listens."""
        while True:
            try:
                content = await self._take()
            except ApiError as error:
                content = error.content
            self._message = [msgspec.Raw(msgspec.json.encode(content))]
            for ear in self._ears:
                ear.set()
            await asyncio.sleep(self._period_s)

    def _rest(self) -> None:
        if self._maker is not None:
            self._maker.cancel()
            self._maker = None


class FeedResponse(Response):
    """A feed as what a route returns.

    Args:
        feed: Answers in its own time.
    """

    def __init__(self, feed: LiveFeed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._feed(scope, receive, send)


@asynccontextmanager
async def _gone(receive: Receive) -> AsyncIterator["asyncio.Task[None]"]:
    """A task that ends when the client has left."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(watch())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
