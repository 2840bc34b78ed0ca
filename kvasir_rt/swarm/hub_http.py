"""Asking the hub over HTTP: bounded answers, one total time limit, refusals as exceptions."""

import asyncio
from typing import Any, Final, TypeVar

import httpx
import msgspec
from pydantic import BaseModel, TypeAdapter, ValidationError

from kvasir_core.errors import KvasirError

ANSWER_BYTES_MAX: Final = 32 << 20  # The largest dispatch map: 262,144 rows of some 100 bytes.
REFUSAL_CHARACTERS_MAX: Final = 400

AnswerT = TypeVar("AnswerT")


class HubError(KvasirError):
    """The hub did not do what it was asked; the message says why."""


class HubAway(HubError):
    """It cannot be reached, took too long, or what came back is no answer of a hub."""


class HubRefused(HubError):
    """It said no.

    Attributes:
        status: HTTP status.
        code: The error's short word; empty if there is none.
        retry_after_s: When to ask again, if it says so.
    """

    def __init__(self, status: int, message: str, code: str, retry_after_s: float | None) -> None:
        super().__init__(f"the hub answered {status}: {message}")
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class _Detail(msgspec.Struct):
    message: str
    code: str = ""


class _Refusal(msgspec.Struct):
    error: _Detail


class HubHttp:
    """A client of one hub.

    Args:
        url: `http(s)://HOST:PORT`.
        total_s: Time limit of one question.
    """

    def __init__(self, url: str, total_s: float = 10.0) -> None:
        self.url = url
        self._total_s = total_s
        self.client = httpx.AsyncClient(
            base_url=url,
            trust_env=False,
            follow_redirects=False,  # Where a token goes is the operator's word.
            timeout=total_s,
            headers={"Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        await self.client.aclose()

    async def ask(
        self, kind: type[AnswerT], method: str, path: str, *, token: str | None = None,
        body: BaseModel | None = None, query: dict[str, str] | None = None,
    ) -> AnswerT:  # fmt: skip
        """One question.

        Args:
            kind: What the answer is read as; nothing else is accepted.
            method: GET, POST or DELETE.
            path: Below the hub's URL.
            token: Sent as a bearer token.
            body: Sent as JSON.
            query: Appended to the URL; never a secret.

        Raises:
            HubAway: No answer, or none that can be read.
            HubRefused: A refusal.
        """
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        content = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = body.model_dump_json().encode()
        try:
            async with (
                asyncio.timeout(self._total_s),
                self.client.stream(
                    method, path, content=content, headers=headers, params=query
                ) as answer,
            ):
                data = await read_bounded(answer, ANSWER_BYTES_MAX)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
            raise HubAway(f"{self.url}: {str(error) or type(error).__name__}") from None
        check_status(answer, data)
        try:
            return TypeAdapter(kind).validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise HubAway(
                f"{self.url}{path}: the answer cannot be read: {first['loc']}: {first['msg']}"
            ) from None


async def read_bounded(answer: httpx.Response, bytes_max: int) -> bytes:
    """The body as it was sent. Raises HubAway beyond the limit."""
    data = bytearray()
    async for piece in answer.aiter_raw():
        data += piece
        if len(data) > bytes_max:
            raise HubAway(f"{answer.url.path}: the answer has more than {bytes_max} bytes")
    return bytes(data)


def check_status(answer: httpx.Response, data: bytes) -> None:
    """Raises HubRefused unless the status is one of success."""
    if answer.is_success:
        return
    detail = _detail_of(data)
    text = answer.headers.get("retry-after", "")
    retry_after_s: Any = float(text) if text.isascii() and text.isdecimal() else None
    raise HubRefused(
        answer.status_code, detail.message[:REFUSAL_CHARACTERS_MAX], detail.code, retry_after_s
    )


def _detail_of(data: bytes) -> _Detail:
    try:
        return msgspec.json.decode(data, type=_Refusal).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Detail("without a reason")
