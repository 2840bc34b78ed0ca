"""The bodies of answers and of stream chunks, as the OpenAI API spells them."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvasir_rt.bridge.generation import Piece, TokenizerPort, TokenLogprob, bytes_of

Content = dict[str, Any]


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, choices: int) -> list[Content]:
        """Chunks sent before any text."""

    def chunk(self, piece: Piece) -> Content:
        """One piece of the stream; the last of a choice carries its finish reason."""

    def usage_chunk(self, usage: Content) -> Content:
        """The chunk that carries the usage and no choice."""

    def whole(self, pieces: Sequence[Piece], choices: int, usage: Content) -> Content:
        """The answer that is not streamed."""


def usage_of(prompt_tokens: int, completion_tokens: int) -> Content:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Spelling:
    """What both shapes share: the answer's id, model, time, and how tokens are shown.

    Args:
        answer_id: The answer's id.
        model: The served name.
        has_logprobs: Whether log-probabilities were asked for.
        top: How many alternatives a token shows.
        has_usage_chunk: Every other chunk then says `usage: null`.
    """

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        tokenizer: TokenizerPort,
        has_logprobs: bool,
        top: int,
        has_usage_chunk: bool,
    ) -> None:
        self._id = answer_id
        self._model = model
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._top = top
        self._has_usage_chunk = has_usage_chunk
        self._created = int(time.time())

    def _body(self, kind: str, choices: list[Content], usage: Content | None) -> Content:
        body: Content = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if usage is not None or (self._has_usage_chunk and kind != "chat.completion"):
            body["usage"] = usage
        return body

    def _bytes(self, token: int) -> bytes:
        return bytes_of(self._tokenizer, token)


class ChatShape(Spelling):
    """`/v1/chat/completions`."""

    def opening(self, choices: int) -> list[Content]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta, None, None) for index in range(choices)]

    def chunk(self, piece: Piece) -> Content:
        delta = {"content": piece.text} if piece.text else {}
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        return self._chunk(piece.choice, delta, logprobs, piece.finish)

    def usage_chunk(self, usage: Content) -> Content:
        return self._body("chat.completion.chunk", [], usage)

    def whole(self, pieces: Sequence[Piece], choices: int, usage: Content) -> Content:
        texts, tokens, finishes = _gathered(pieces, choices)
        return self._body(
            "chat.completion",
            [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": texts[index], "refusal": None},
                    "logprobs": self._logprobs(tokens[index]) if self._has_logprobs else None,
                    "finish_reason": finishes[index],
                }
                for index in range(choices)
            ],
            usage,
        )

    def _chunk(
        self, index: int, delta: Content, logprobs: Content | None, finish: str | None
    ) -> Content:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._body("chat.completion.chunk", [choice], None)

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> Content:
        content = [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(*pair) for pair in entry.top[: self._top]],
            }
            for entry in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Content:
        raw = self._bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class CompletionShape(Spelling):
    """`/v1/completions`."""

    def opening(self, choices: int) -> list[Content]:
        del choices
        return []

    def chunk(self, piece: Piece) -> Content:
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        choice = _completion_choice(piece.choice, piece.text, logprobs, piece.finish)
        return self._body("text_completion", [choice], None)

    def usage_chunk(self, usage: Content) -> Content:
        return self._body("text_completion", [], usage)

    def whole(self, pieces: Sequence[Piece], choices: int, usage: Content) -> Content:
        texts, tokens, finishes = _gathered(pieces, choices)
        return self._body(
            "text_completion",
            [
                _completion_choice(
                    index,
                    texts[index],
                    self._logprobs(tokens[index]) if self._has_logprobs else None,
                    finishes[index],
                )
                for index in range(choices)
            ],
            usage,
        )

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> Content:
        entries = list(tokens)
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._text(token): logprob for token, logprob in entry.top[: self._top]}
                for entry in entries
            ],
            "text_offset": [entry.offset for entry in entries],
        }

    def _text(self, token: int) -> str:
        """The token's text; part of a character is spelled so that no two tokens look alike."""
        raw = self._bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _completion_choice(
    index: int, text: str, logprobs: Content | None, finish: str | None
) -> Content:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _gathered(
    pieces: Sequence[Piece], choices: int
) -> tuple[list[str], list[list[TokenLogprob]], list[str | None]]:
    texts: list[list[str]] = [[] for _ in range(choices)]
    tokens: list[list[TokenLogprob]] = [[] for _ in range(choices)]
    finishes: list[str | None] = [None] * choices
    for piece in pieces:
        texts[piece.choice].append(piece.text)
        tokens[piece.choice].extend(piece.tokens)
        finishes[piece.choice] = piece.finish or finishes[piece.choice]
    return ["".join(parts) for parts in texts], tokens, finishes
