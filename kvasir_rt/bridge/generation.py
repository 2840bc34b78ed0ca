"""One choice of an answer while it grows: token events in, certain text out.

Everything happens in `take`, on the bridge's loop, as soon as the token is there, so a stop string
ends the request in the ring at once, however slowly the client reads.
"""

import codecs
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvasir_core.microbatch import FinishReason
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.bridge.stops import StopFinder
from kvasir_rt.submission import EndEvent, EngineEvent, TokenEvent


class TokenizerPort(Protocol):
    """What the bridge needs of the model's tokenizer."""

    eos_ids: frozenset[int]

    @property
    def token_bytes_max(self) -> int: ...
    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]: ...
    def decode_bytes(self, token: int) -> bytes: ...
    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...


def bytes_of(tokenizer: TokenizerPort, token: int) -> bytes:
    """What a token adds to a text; nothing for an id the tokenizer has no entry for.

    Output matrices are often padded beyond the vocabulary, so such an id can be sampled.
    """
    try:
        return tokenizer.decode_bytes(token)
    except IndexError:
        return b""


class TokenLogprob(NamedTuple):
    """A token as the log-probability fields show it; `offset` is its first character's place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


class Piece(NamedTuple):
    """Text that is certain, with the tokens it began with; the last one carries `finish`."""

    choice: int
    text: str
    tokens: tuple[TokenLogprob, ...]
    finish: str | None


class Generation:
    """One choice. `take` is given its events in order; what comes after its end is ignored.

    Args:
        index: The choice's place in the answer.
        stops: Stop strings.
        stop_ids: Tokens that end the request and are no text.
        wants_logprobs: Whether pieces carry tokens.
        end_early: Called when a stop string has ended the choice, to take it out of the ring.
    """

    __slots__ = (
        "_characters", "_decode", "_emitted", "_end_early", "_finder", "_pending", "_stop_ids",
        "_tokenizer", "_wants_logprobs", "error", "finish", "index", "output_tokens", "pieces",
    )  # fmt: skip

    def __init__(
        self,
        *,
        index: int,
        tokenizer: TokenizerPort,
        stops: Sequence[str],
        stop_ids: frozenset[int],
        wants_logprobs: bool,
        end_early: Callable[[], None],
    ) -> None:
        self.index = index
        self.output_tokens = 0
        self.finish: str | None = None
        self.error: ApiError | None = None
        self.pieces: deque[Piece] = deque()
        self._tokenizer = tokenizer
        self._finder = StopFinder(stops)
        self._stop_ids = stop_ids
        self._wants_logprobs = wants_logprobs
        self._end_early = end_early
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._characters = 0  # Assembled so far, held back or not.
        self._emitted = 0
        self._pending: list[TokenLogprob] = []

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.error is not None

    def take(self, event: EngineEvent) -> None:
        if self.is_over:
            return
        match event:
            case TokenEvent():
                self._take_token(event)
            case EndEvent():
                self._take_end(event)

    def fail(self, error: ApiError) -> None:
        """Ends the choice with an error; text not yet taken is kept."""
        if not self.is_over:
            self.error = error

    def _take_token(self, event: TokenEvent) -> None:
        self.output_tokens += 1
        if event.token in self._stop_ids:
            return  # The end follows.
        if self._wants_logprobs:
            self._pending.append(
                TokenLogprob(event.token, event.logprob, tuple(event.top), self._characters)
            )
        self._add(self._decode(bytes_of(self._tokenizer, event.token)))
        if self._finder.is_matched:
            self._finish("stop")
            self._end_early()

    def _take_end(self, event: EndEvent) -> None:
        match event.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self._add(self._decode(b"", final=True))
                if not self._finder.is_matched:
                    self._emit(self._finder.flush())
                self._finish("stop" if self._finder.is_matched else str(event.reason))
            case FinishReason.DEADLINE:
                self.error = ApiError(
                    504, event.detail or "The deadline has passed.", code="deadline_exceeded"
                )
            case FinishReason.CANCELLED:
                self.error = ApiError(499, event.detail or "Cancelled.", code="cancelled")
            case FinishReason.REFUSED:
                self.error = ApiError(400, event.detail, code="context_length_exceeded")
            case FinishReason.FAILED:
                self.error = ApiError(503, event.detail or "The ring failed.", code="ring_failed")

    def _add(self, text: str) -> None:
        self._characters += len(text)
        self._emit(self._finder.push(text))

    def _emit(self, text: str) -> None:
        self._emitted += len(text)
        if text:
            self.pieces.append(Piece(self.index, text, self._tokens_begun(), None))

    def _tokens_begun(self) -> tuple[TokenLogprob, ...]:
        count = sum(1 for entry in self._pending if entry.offset < self._emitted)
        begun, self._pending = tuple(self._pending[:count]), self._pending[count:]
        return begun

    def _finish(self, reason: str) -> None:
        rest = self._tokens_begun() if self._finder.is_matched else tuple(self._pending)
        self.pieces.append(Piece(self.index, "", rest, reason))
        self.finish = reason
