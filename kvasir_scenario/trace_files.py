"""Trace files as lines: bounded, decoded, and with the number of the line that is at fault.

Nothing is read before the file's size is known, and no line longer than the limit is ever held.
"""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from stat import S_ISREG
from typing import NoReturn

from kvasir_core.errors import ScenarioError

FILE_BYTES_MAX = 2 << 30  # Above the largest public trace by far; more is a mistaken path.
LINE_BYTES_MAX = 1 << 20  # A Mooncake row of 1 M prompt tokens has 2,000 hashes: 20 kB.
ROWS_MAX = 50_000_000  # Three int64 columns of it are 1.2 GB.
BLOCK_BYTES = 4 << 20  # Read at a time; large enough to hide the cost of a block.

SIGNATURES = (  # First bytes of what people have instead of a text file, and what to do about it.
    (b"\x1f\x8b", "is gzip data: decompress it first (gunzip)"),
    (b"PK\x03\x04", "is a zip archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "is zstd data: decompress it first (zstd -d)"),
    (b"BZh", "is bzip2 data: decompress it first (bunzip2)"),
    (b"\xfd7zXZ", "is xz data: decompress it first (xz -d)"),
    (b"PAR1", "is Parquet: write it as CSV first"),
    (b"\xff\xfe", "is UTF-16 text: save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16 text: save it as UTF-8"),
    (b"version https://git-lfs", "is a Git LFS pointer, not the data: run `git lfs pull`"),
    (b"<!DOCTYPE", "is an HTML page, not the data: fetch the raw file"),
    (b"<html", "is an HTML page, not the data: fetch the raw file"),
)
EMPTY = "holds no request; a trace has at least one"
BOM = b"\xef\xbb\xbf"


def refuse(
    path: Path, right: str, *, line: int | None = None, column: str = "", value: object = None
) -> NoReturn:
    """Raise `ScenarioError` as `file:line: column 'c': value is 'v'; what would be right`."""
    where = str(path) if line is None else f"{path}:{line}"
    parts = [f"column {column!r}"] if column else []
    if value is not None:
        shown = repr(value)
        parts.append(f"value {shown if len(shown) <= 80 else shown[:77] + '...'}")
    raise ScenarioError(": ".join([where, *([", ".join(parts)] if parts else []), right]))


def check_trace_file(path: Path) -> None:
    """Refuse what is not a text file within the limits, before any of it is held in memory.

    Raises:
        ScenarioError: Missing, not a regular file, too large, empty, or a known binary kind.
    """
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):
            refuse(path, "is not a regular file; workload.path must name a trace file")
        with path.open("rb") as file:
            first = file.read(64)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScenarioError(
            f"{path}: the trace cannot be read ({reason}); workload.path must name a trace file"
        ) from error
    if status.st_size > FILE_BYTES_MAX:
        refuse(path, f"has {status.st_size} bytes; a trace has at most {FILE_BYTES_MAX}")
    if not first.removeprefix(BOM):
        refuse(path, EMPTY)
    for signature, meaning in SIGNATURES:
        if first.startswith(signature):
            refuse(path, meaning)


def lines_of(path: Path) -> Iterator[str]:
    r"""The file's lines, ends included, split at ``\n``, ``\r\n`` and ``\r`` only.

    A byte-order mark is dropped. Memory is one block and one line.

    Raises:
        ScenarioError: As `check_trace_file`; a line too long; bytes that are not UTF-8.
    """
    check_trace_file(path)
    done = 0  # Lines given so far.
    with path.open("rb") as file:
        rest = file.read(len(BOM)).removeprefix(BOM)
        while block := file.read(BLOCK_BYTES):
            end = block.rfind(b"\n") + 1
            head, tail = rest + block[:end], block[end:]
            rest = tail if end else head + tail
            if end:
                text = _decoded(path, head, done)
                for line in StringIO(text, newline=""):
                    done += 1
                    if len(line) > LINE_BYTES_MAX:
                        _refuse_length(path, done)
                    yield line
            if len(rest) > LINE_BYTES_MAX:
                _refuse_length(path, done + 1)
        yield from StringIO(_decoded(path, rest, done), newline="")


def _refuse_length(path: Path, line: int) -> NoReturn:
    refuse(path, f"is longer than {LINE_BYTES_MAX} bytes; one request is one line", line=line)


def _decoded(path: Path, data: bytes, lines_before: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = lines_before + data.count(b"\n", 0, error.start) + 1
        value = data[error.start : error.start + 8]
        refuse(path, "is not UTF-8 text: save the trace as UTF-8", line=line, value=value)
