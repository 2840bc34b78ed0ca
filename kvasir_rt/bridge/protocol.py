"""uvicorn's HTTP/1.1 protocol with the bounds it lacks.

Added: a limit on connections; a time limit for the headers (a client that sends them a byte at a
time holds nothing for long) and one for a client that does not read its answer; our error form for
what is not HTTP; an answer that is read although the client was still sending its body; and no
pipelining. Bytes that follow a request which is still being answered are dropped, so that the end
of a connection is always seen (a client that is gone gives its place in the ring back), and the
connection closes after the answer.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvasir_rt.bridge.errors import error_content
from kvasir_rt.bridge.limits import Limits

REASONS = {400: b"Bad Request", 408: b"Request Timeout", 503: b"Service Unavailable"}


def protocol_for(limits: Limits) -> type[H11Protocol]:
    """The protocol class for these limits, as uvicorn's `http=` wants it."""

    class BoundedProtocol(BridgeProtocol):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop, limits=limits)

    return BoundedProtocol


class BridgeProtocol(H11Protocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
        *,
        limits: Limits,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._is_lingering = False
        self._stall: asyncio.TimerHandle | None = None

    @property
    def bytes_unread(self) -> int:
        """Bytes that h11 keeps because they make no event yet."""
        return len(self.conn.trailing_data[0])

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections_max:
            self._answer_and_close(503, "too many connections; try again later", "overloaded")
            return
        self._arm_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unstall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read: it has this long to begin again."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.write_s_max, self.transport.abort)

    def resume_writing(self) -> None:
        self._unstall()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering():
            self.cycle.keep_alive = False
            return
        super().data_received(data)
        if self._is_answering():
            self._disarm()
            if self.flow.read_paused and self.conn.trailing_data[0]:
                # h11 holds the pipelined bytes; reading on is how the end of the client is seen.
                self.cycle.keep_alive = False
                self.flow.resume_reading()
        elif self._is_lingering and self.conn.their_state is h11.SEND_BODY:
            pass  # Still sending what was refused.
        elif self._is_receiving():
            self._disarm()  # Headers are complete; the body has its own time limit.
        elif self._timer is None or self._is_lingering:
            self._arm_header_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self._is_receiving(may_be_answered=True):
            self._disarm()
            self._is_lingering = True
            self._timer = self.loop.call_later(self._limits.linger_s_max, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is not h11.IDLE and self.conn.our_state is not h11.SEND_RESPONSE:
            self.transport.abort()  # An answer is under way: nothing can be said any more.
            return
        self._answer_and_close(400, f"This is not a valid HTTP/1.1 request. {msg}", "invalid_http")

    def _cycle(self) -> RequestResponseCycle | None:
        """The current or last request; uvicorn's annotation hides that there may be none yet."""
        return self.cycle

    def _is_answering(self) -> bool:
        """The request is complete and its answer is not."""
        cycle = self._cycle()
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _is_receiving(self, *, may_be_answered: bool = False) -> bool:
        """The headers are complete and the body is not."""
        cycle = self._cycle()
        if cycle is None:
            return False
        return cycle.more_body and (may_be_answered or not cycle.response_complete)

    def _arm_header_timer(self) -> None:
        self._disarm()
        self._timer = self.loop.call_later(self._limits.header_s_max, self._headers_are_late)

    def _disarm(self) -> None:
        self._is_lingering = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unstall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _headers_are_late(self) -> None:
        if not self.conn.trailing_data[0]:
            self.transport.close()  # Nothing was asked: an idle connection needs no answer.
            return
        seconds = self._limits.header_s_max
        self._answer_and_close(
            408, f"The request's headers did not arrive within {seconds:g} s.", "header_timeout"
        )

    def _answer_and_close(self, status: int, message: str, code: str) -> None:
        """Answers outside h11, whose state may be an error, and closes."""
        if self.transport.is_closing():
            return
        body = json.dumps(error_content(status, message, code)).encode()
        head = (
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n" % (status, REASONS[status], len(body))
        )
        self.transport.write(head + body)
        self.transport.close()
