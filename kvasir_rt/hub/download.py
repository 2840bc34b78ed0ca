"""A file as an answer: whole or one range of it, with its digest, so that a download can resume."""

import asyncio
import base64
import os
import re
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvasir_rt.bridge.errors import ApiError, error_response
from kvasir_rt.hub.cutting import CutSlice, Outcome
from kvasir_rt.swarm.protocol import DIGEST_HEADER

PIECE_BYTES: Final = 256 << 10
RANGE = re.compile(r"bytes=(?:(\d{1,15})-(\d{0,15})|-(\d{1,15}))\Z")


def range_of(header: str | None, size: int) -> tuple[int, int] | None:
    """`[start, stop)` of a Range header; None where it asks for the whole (RFC 9110, 14.2).

    Several ranges, other units and nonsense are answered with the whole, as the RFC allows.

    Raises:
        ApiError: 416 if it lies outside the file.
    """
    match = RANGE.match(header or "")
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        start, stop = max(0, size - int(suffix)), size
    else:
        start, stop = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= stop:
        raise ApiError(
            416, f"The range {header!r} lies outside the {size} bytes.", code="invalid_range"
        )
    return start, stop


class SliceResponse(Response):
    """Sends an open slice and closes it.

    Args:
        cut: What the descriptor is of.
        descriptor: Closed when the answer is over, whatever became of it.
        ended: Called then with the bytes sent, and what became of it.
    """

    def __init__(
        self, cut: CutSlice, descriptor: int, ended: Callable[[int, Outcome], None]
    ) -> None:
        super().__init__(None, media_type="application/octet-stream")
        self._cut = cut
        self._descriptor = descriptor
        self._ended = ended
        self._sent = 0
        self._outcome: Outcome = "cut"
        self._etag = f'"{cut.sha256}"'
        digest = base64.b64encode(bytes.fromhex(cut.sha256)).decode()
        self.headers.update(
            {
                "Accept-Ranges": "bytes",
                "Cache-Control": "no-store",  # No proxy on the way keeps weights.
                "ETag": self._etag,
                DIGEST_HEADER: f"sha-256=:{digest}:",
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            os.close(self._descriptor)
            self._ended(self._sent, self._outcome)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Headers(scope=scope)
        tags = [tag.strip().removeprefix("W/") for tag in asked.get("if-none-match", "").split(",")]
        if self._etag in tags or tags == ["*"]:
            self.status_code = 304
            self._outcome = "confirmed"
            del self.headers["content-length"]
            await send({"type": "http.response.start", "status": 304, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b""})
            return
        is_same = asked.get("if-range", self._etag) == self._etag
        try:
            part = range_of(asked.get("range") if is_same else None, self._cut.size)
        except ApiError as error:
            refusal = error_response(error)
            refusal.headers["Content-Range"] = f"bytes */{self._cut.size}"
            await refusal(scope, receive, send)
            return
        start, stop = part or (0, self._cut.size)
        self.status_code = 200 if part is None else 206
        self.headers["content-length"] = str(stop - start)
        if part is not None:
            self.headers["content-range"] = f"bytes {start}-{stop - 1}/{self._cut.size}"
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        leaving = asyncio.create_task(_left(receive))
        try:
            await self._send_bytes(start, stop, leaving, send)
        finally:
            leaving.cancel()

    async def _send_bytes(
        self, start: int, stop: int, leaving: asyncio.Task[None], send: Send
    ) -> None:
        while start < stop and not leaving.done():
            size = min(PIECE_BYTES, stop - start)
            piece = await asyncio.to_thread(os.pread, self._descriptor, size, start)
            assert len(piece) == size, "a slice never shrinks"
            start += size
            await send({"type": "http.response.body", "body": piece, "more_body": start < stop})
            self._sent += size
        if start == self._cut.size:
            self._outcome = "sent"


async def _left(receive: Receive) -> None:
    """Until the client is gone; the server does not say so when sending."""
    while (await receive())["type"] != "http.disconnect":
        pass
