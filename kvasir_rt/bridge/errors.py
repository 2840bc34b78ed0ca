"""The one form of every error answer: `{"error": {"message", "type", "code"}}`."""

import math
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A refusal that the client is told about; raised anywhere below a route.

    Attributes:
        status: HTTP status.
        message: A sentence: what was found, the rule, what to do.
        code: A short stable word for programs.
        retry_after_s: Adds a Retry-After header, rounded up to whole seconds.
    """

    def __init__(
        self, status: int, message: str, *, code: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def content(self) -> dict[str, Any]:
        return error_content(self.status, self.message, self.code)


class ClientGone(ApiError):
    """The client closed its connection: there is nobody to answer."""

    def __init__(self) -> None:
        super().__init__(499, "The client closed the connection.", code="client_closed")


def error_content(status: int, message: str, code: str) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "code": code}}


def bad_request(message: str, *, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code)


def json_response(
    content: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def error_response(error: ApiError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error.content, status=error.status, headers=headers)


async def on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, no such method), in our form."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    message = f"{HTTPStatus(status).phrase}: {error.detail}"
    if status == 404:
        message = "There is no such path here. docs/api.md lists the paths, for example /v1/models."
    elif status == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"The method {request.method[:16]} is not allowed on this path; use {allowed}."
    response = json_response(error_content(status, message, code), status=status)
    for key, value in (error.headers or {}).items():
        response.headers[key] = value
    return response
