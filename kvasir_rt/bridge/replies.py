"""Sends an answer: whole as JSON, or as server-sent events while it grows.

In both, a task watches for the end of the connection; when the client is gone the answer's
requests are cancelled in the ring.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from starlette.types import Receive, Scope, Send

from kvasir_rt.bridge.errors import ApiError, ClientGone, json_response
from kvasir_rt.bridge.generation import Piece
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.shapes import Content, Shape, usage_of
from kvasir_rt.bridge.submissions import Answer
from kvasir_rt.logs import log_event

logger = logging.getLogger("kvasir.bridge")

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@asynccontextmanager
async def watched(answer: Answer, receive: Receive) -> AsyncIterator[None]:
    """Fails the answer with `ClientGone` when the client closes the connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.fail(ClientGone())

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def send_whole(
    answer: Answer, shape: Shape, scope: Scope, receive: Receive, send: Send
) -> None:
    """Waits for every choice, then answers at once.

    Raises:
        ApiError: A choice failed, or the client is gone; nothing was sent.
    """
    with answer:
        async with watched(answer, receive):
            pieces = await answer.finished()
        usage = usage_of(answer.job.prompt_tokens, answer.output_tokens)
        content = shape.whole(pieces, len(answer.generations), usage)
    await json_response(content)(scope, receive, send)


async def send_stream(
    answer: Answer,
    shape: Shape,
    *,
    include_usage: bool,
    limits: Limits,
    receive: Receive,
    send: Send,
) -> None:
    """Sends pieces as they become certain.

    Raises:
        ApiError: Before anything was sent; later errors become an event of the stream.
        ClientGone: There is nobody to answer.
    """
    stream = EventStream(send)
    with answer:
        async with watched(answer, receive):
            opens = asyncio.get_running_loop().call_later(limits.stream_opens_s, answer.nudge)
            await answer.changed()
            opens.cancel()
            pieces = answer.take_pieces()  # An error here still has its own status.
            try:
                await stream.open()
                await stream.events(shape.opening(len(answer.generations)))
                async with comments_when_quiet(stream, limits.comment_s):
                    await _send_pieces(answer, shape, stream, pieces)
            except ClientGone:
                raise
            except ApiError as error:
                log_event(logger, "stream failed", level=logging.WARNING, reason=error.message)
                await stream.events([error.content])
                await stream.close()
                return
        if include_usage:
            usage = usage_of(answer.job.prompt_tokens, answer.output_tokens)
            await stream.events([shape.usage_chunk(usage)])
        await stream.done()


async def _send_pieces(
    answer: Answer, shape: Shape, stream: "EventStream", pieces: list[Piece]
) -> None:
    """Sends until every choice is over."""
    while True:
        await stream.events([shape.chunk(piece) for piece in pieces])
        if not answer.has_news:
            if answer.is_over:
                return
            await answer.changed()
        pieces = answer.take_pieces()


@asynccontextmanager
async def comments_when_quiet(stream: "EventStream", quiet_s: float) -> AsyncIterator[None]:
    """A comment whenever nothing was sent for so long: proxies close streams that are silent."""

    async def comment() -> None:
        while True:
            sent = stream.writes
            await asyncio.sleep(quiet_s)
            if stream.writes == sent:
                await stream.comment("waiting")

    task = asyncio.create_task(comment())
    try:
        yield
    finally:
        task.cancel()


class EventStream:
    """Server-sent events on an ASGI `send`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.writes = 0

    async def open(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})

    async def events(self, contents: Sequence[Content]) -> None:
        """One write, one event each."""
        if contents:
            encode = msgspec.json.encode
            await self._write(b"".join(b"data: %b\n\n" % encode(content) for content in contents))

    async def comment(self, text: str) -> None:
        await self._write(f": {text}\n\n".encode())

    async def done(self) -> None:
        await self._write(b"data: [DONE]\n\n")
        await self.close()

    async def close(self) -> None:
        await self._write(b"", more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        self.writes += 1
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
