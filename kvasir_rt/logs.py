"""Structured logs: one line an event, JSON or text, each carrying the id of its request.

A message is a fixed sentence; what varies goes into fields (`extra={"fields": {...}}`, spelled
`log_event(logger, "request ended", tokens=5)`). Field values are escaped, so nothing a client sends
can forge a line.
"""

import contextvars
import json
import logging
import sys
import time
from typing import Any, Literal, TextIO

LogForm = Literal["text", "json"]
LINE_VALUE_CHARACTERS_MAX = 2000  # Of one field: a hostile path must not fill the disk.

request_id_of_task: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "request_id", default=None
)
"""Set by the bridge for the task that answers a request; every line logged there carries it."""


def configure(
    *, level: str = "info", form: LogForm = "text", stream: TextIO | None = None
) -> logging.Logger:
    """Sends the `kvasir` logger's lines to `stream` (default: standard error). May be repeated.

    Raises:
        ValueError: The level has no such name.
    """
    logger = logging.getLogger("kvasir")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    served = logging.getLogger("uvicorn")  # Its warnings are told by answers and counts.
    served.handlers[:] = [handler]
    served.setLevel(logging.ERROR)
    return logger


def log_event(
    logger: logging.Logger, message: str, *, level: int = logging.INFO, **fields: Any
) -> None:
    if logger.isEnabledFor(level):
        logger.log(level, message, extra={"fields": fields})


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    request_id = request_id_of_task.get()
    if request_id is not None:
        fields["request_id"] = request_id
    fields.update(getattr(record, "fields", {}))
    return {key: _bounded(value) for key, value in fields.items() if value is not None}


def _bounded(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    text = str(value)
    if len(text) > LINE_VALUE_CHARACTERS_MAX:
        return text[:LINE_VALUE_CHARACTERS_MAX] + "..."
    return text


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "event", ...fields}`; time is UTC with milliseconds."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


class TextFormatter(logging.Formatter):
    """`12:30:01.250 warning request ended request_id=req-1 tokens=5`, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_utc(record.created)[11:-1]} {record.levelname.lower()} {record.getMessage()}"
        fields = "".join(f" {key}={_quoted(value)}" for key, value in _fields_of(record).items())
        line = head + fields
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    is_plain = text.isascii() and text.isprintable() and " " not in text and '"' not in text
    return text if is_plain and text else json.dumps(text)


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
