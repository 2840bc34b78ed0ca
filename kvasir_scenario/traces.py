"""Trace files of requests: Azure CSV, Mooncake JSONL, BurstGPT CSV, and plain CSV.

A trace gives each request an arrival, a prompt length and an output length. Whatever a file's
clock, unit and origin, what leaves here are offsets from its earliest arrival. Rows keep the
file's order; nothing is dropped, so a row's number is its `request_id`.

An output of 0 tokens is a request that failed where the trace was taken: kept, and told apart by
the workload. A prompt of 0 tokens is an error: no such request exists.
"""

import csv
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvasir_scenario.trace_columns import (
    UNITS_NS,
    Ints,
    Place,
    TimeColumn,
    Times,
    is_timestamp,
    numbers,
    timestamps,
    tokens,
)
from kvasir_scenario.trace_files import EMPTY, ROWS_MAX, lines_of, refuse

TraceFormat = Literal["azure", "mooncake", "burstgpt", "csv"]

CHUNK_ROWS = 1 << 11  # Rows held as text; the garbage collector walks more at 2 us a row.
HASHES_MAX = 200_000_000  # 1.6 GB; Mooncake's hour-long traces have 1e5.
SECONDS_MAX = 4_102_444_800  # The year 2100: a larger "second" is in another unit.
MEAN_GAP_S_MAX = 3600.0  # A trace with fewer than one request an hour is in another unit.


@dataclass(frozen=True, slots=True)
class Columns:
    """What a file calls the three columns; by default `format: csv`'s own names."""

    arrival: str = "arrival"
    prompt: str = "prompt"
    output: str = "output"


@dataclass(frozen=True, slots=True)
class _Dialect:
    columns: Columns
    unit: str | None = None  # None: the scenario says it, or the column's name does.
    stamped: bool | None = None  # Date-times, numbers, or (None) whichever the first value is.


DIALECTS: Mapping[TraceFormat, _Dialect] = {
    "azure": _Dialect(Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"), stamped=True),
    "mooncake": _Dialect(Columns("timestamp", "input_length", "output_length"), "ms", False),
    "burstgpt": _Dialect(Columns("Timestamp", "Request tokens", "Response tokens"), "s", False),
    "csv": _Dialect(Columns()),
}
SAY_UNIT = "say it with workload.time_unit: s | ms | us | ns"
UNIT_ENDINGS = {
    "_s": "s", "_sec": "s", "_secs": "s", "_seconds": "s", "_ms": "ms", "_us": "us", "_ns": "ns",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """Per request, the hashes of its leading prompt blocks: equal leading hashes can be reused.

    Attributes:
        values: int64[hashes], all requests' hashes one after the other.
        starts: int64[requests + 1], where each request's begin in `values`.
    """

    values: Ints
    starts: Ints

    def of(self, row: int) -> tuple[int, ...]:
        return tuple(self.values[self.starts[row] : self.starts[row + 1]].tolist())

    def take(self, rows: Ints) -> "PrefixHashes":
        """The hashes of these rows, in this order."""
        lengths = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        shift = np.repeat(self.starts[:-1][rows] - starts[:-1], lengths)
        return PrefixHashes(self.values[np.arange(starts[-1]) + shift], starts)


@dataclass(frozen=True, slots=True)
class Trace:
    """A file's requests, in file order."""

    times: TimeColumn
    prompt_tokens: Ints
    output_tokens: Ints  # 0: the request failed.
    prefix_hashes: PrefixHashes | None = None
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some rows' text, column by column, and the line of each row."""

    columns: Columns  # As the file calls them.
    arrival: Sequence[str]
    prompt: Sequence[str]
    output: Sequence[str]
    line: Callable[[int], int]

    def __len__(self) -> int:
        return len(self.arrival)


def read_trace(
    path: Path,
    kind: TraceFormat,
    *,
    time_unit: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Trace:
    """Read a whole trace file.

    Args:
        path: The file.
        kind: Its format.
        time_unit: `s`, `ms`, `us` or `ns`; None: what the format says (Mooncake ms, BurstGPT s),
            the column's name (`arrival_ms`) or its date-times. Numbers in a plain CSV whose unit
            nothing declares are taken as seconds with a warning, or refused where they cannot be.
        columns: Names that differ from the format's: `arrival`, `prompt`, `output`.

    Raises:
        ScenarioError: Naming file, line, column, value and what would be right.
    """
    dialect = DIALECTS[kind]
    hashes = _Hashes(path) if kind == "mooncake" else None
    chunks = (
        _json_chunks(path, columns or {}, hashes)
        if hashes
        else _csv_chunks(path, kind, columns or {})
    )
    times: list[tuple[Times, int]] = []
    prompts: list[Ints] = []
    outputs: list[Ints] = []
    clock: _Clock | None = None
    rows = 0
    for chunk in chunks:
        rows += len(chunk)
        if rows > ROWS_MAX:
            refuse(path, f"has more than {ROWS_MAX} requests, the most that a trace may have")
        if clock is None:
            clock = _Clock.of(path, dialect, time_unit, chunk)
        times.append(clock.read(chunk))
        place = Place(path, chunk.columns.prompt, chunk.line)
        prompts.append(tokens(chunk.prompt, place, least=1))
        outputs.append(tokens(chunk.output, place._replace(column=chunk.columns.output), least=0))
    if clock is None:
        refuse(path, EMPTY)
    column = TimeColumn.of(times, path, clock.column)
    return Trace(
        column,
        np.concatenate(prompts),
        np.concatenate(outputs),
        hashes.columns() if hashes else None,
        clock.doubts(column),
    )


@dataclass(frozen=True, slots=True)
class _Clock:
    """How this file writes times, settled at its first row."""

    path: Path
    column: str
    unit: str | None  # None: date-times.
    is_declared: bool

    @staticmethod
    def of(path: Path, dialect: _Dialect, declared: str | None, first: _Chunk) -> "_Clock":
        column, value = first.columns.arrival, first.arrival[0]
        stamped = is_timestamp(value) if dialect.stamped is None else dialect.stamped
        if stamped:
            if declared:
                refuse(
                    path,
                    "date-times carry their unit: remove workload.time_unit",
                    line=first.line(0), column=column, value=value,
                )  # fmt: skip
            return _Clock(path, column, None, is_declared=True)
        named = next((u for end, u in UNIT_ENDINGS.items() if column.lower().endswith(end)), None)
        unit = declared or dialect.unit or named
        return _Clock(path, column, unit or "s", is_declared=unit is not None)

    def read(self, chunk: _Chunk) -> tuple[Times, int]:
        place = Place(self.path, self.column, chunk.line)
        if self.unit is None:
            return timestamps(chunk.arrival, place), 1
        times, unit_ns = numbers(chunk.arrival, place, UNITS_NS[self.unit])
        absurd = times * (unit_ns / UNITS_NS["s"]) > SECONDS_MAX
        if not self.is_declared and absurd.any():
            row = int(absurd.argmax())
            place.refuse(row, chunk.arrival[row], f"cannot be seconds; {SAY_UNIT}")
        return times, unit_ns

    def doubts(self, times: TimeColumn) -> tuple[str, ...]:
        """What a user must know where nothing declared the unit."""
        if self.is_declared:
            return ()
        span_s = times.span_s
        if span_s > MEAN_GAP_S_MAX * max(len(times.offsets) - 1, 1):
            refuse(
                self.path,
                f"in seconds these {len(times.offsets)} requests would span {span_s:.6g} s, "
                f"less than one an hour; {SAY_UNIT}",
                column=self.column,
            )
        warning = (
            f"{self.path.name}: column {self.column!r} declares no unit; its times were taken as "
            f"seconds, a span of {span_s:.6g} s; {SAY_UNIT}"
        )
        return (warning,)


def _csv_chunks(path: Path, kind: TraceFormat, renamed: Mapping[str, str]) -> Iterator[_Chunk]:
    reader = csv.reader(lines_of(path), strict=True)
    try:
        header = [name.strip() for name in next(filter(None, reader), [])]
        if not header:
            refuse(path, EMPTY)
        columns = _columns_in(path, header, kind, renamed)
        pick = itemgetter(*map(header.index, (columns.arrival, columns.prompt, columns.output)))
        while True:
            before = reader.line_num
            rows = list(islice(reader, CHUNK_ROWS))
            if not rows:
                return
            line = partial(_line_of_row, rows, before)
            filled = [row for row in rows if row]  # A blank line is no request.
            if not set(map(len, filled)) <= {len(header)}:
                bad = next(i for i, row in enumerate(filled) if len(row) != len(header))
                right = f"has {len(filled[bad])} fields where the header has {len(header)}"
                refuse(path, right, line=line(bad), value=",".join(filled[bad]))
            if filled:
                arrival, prompt, output = zip(*map(pick, filled), strict=True)
                yield _Chunk(columns, arrival, prompt, output, line)
    except csv.Error as error:
        refuse(path, f"is not CSV: {error}", line=reader.line_num)


def _line_of_row(rows: Sequence[Sequence[str]], before: int, index: int) -> int:
    """The line on which the `index`-th filled row begins: quoted fields may hold line ends."""
    line, filled = before + 1, -1
    for row in rows:
        filled += bool(row)
        if filled == index:
            break
        line += 1 + sum(field.count("\n") for field in row)
    return line


def _columns_in(
    path: Path, header: Sequence[str], kind: TraceFormat, renamed: Mapping[str, str]
) -> Columns:
    """The three columns' names in this header.

    Raises:
        ScenarioError: One is missing, or there twice.
    """
    usual = asdict(DIALECTS[kind].columns)
    found = {}
    for role, name in usual.items():
        names = [renamed[role]] if role in renamed else [name]
        if kind == "csv" and role not in renamed:
            names += [name + end for end in (UNIT_ENDINGS if role == "arrival" else ("_tokens",))]
        there = [column for column in header if column in names]
        if len(there) != 1:
            wanted = " or ".join(map(repr, names))
            right = f"{len(there)} columns are called {wanted}, where one must be"
            hint = (
                f"name it in workload.columns.{role}" if kind == "csv" else f"as in {kind} traces"
            )
            refuse(path, f"{right}; {hint}", line=1, value=",".join(header))
        found[role] = there[0]
    return Columns(**found)


def _json_chunks(path: Path, renamed: Mapping[str, str], hashes: "_Hashes") -> Iterator[_Chunk]:
    columns = replace(DIALECTS["mooncake"].columns, **renamed)
    names = (columns.arrival, columns.prompt, columns.output)
    numbered = ((n, line) for n, line in enumerate(lines_of(path), 1) if not line.isspace())
    while batch := list(islice(numbered, CHUNK_ROWS)):
        lines: list[int] = []
        rows: list[tuple[str, ...]] = []
        for number, line in batch:
            record = _record(path, number, line)
            missing = [name for name in names if name not in record]
            if missing:
                right = f"has no {missing[0]!r}; a request has {', '.join(map(repr, names))}"
                refuse(path, right, line=number, value=line.strip())
            lines.append(number)
            rows.append(tuple(repr(record[name]) for name in names))  # 12 is right, "12" is not.
            hashes.add(record.get("hash_ids", []), number)
        arrival, prompt, output = zip(*rows, strict=True)
        yield _Chunk(columns, arrival, prompt, output, lines.__getitem__)


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        right = f"is not a whole JSON object ({error}); a Mooncake trace has one on each line"
        refuse(path, right, line=number, value=line.strip())
    if not isinstance(record, dict):
        refuse(path, "is not a JSON object", line=number, value=line.strip())
    return record


class _Hashes:
    """Collects every row's prefix hashes without a Python object for each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = array("q")
        self.starts = array("q", [0])

    def add(self, hashes: object, line: int) -> None:
        right = "the hashes of a prompt's blocks are a list of whole numbers of at most 63 bits"
        if not isinstance(hashes, list) or any(type(value) is not int for value in hashes):
            refuse(self.path, right, line=line, column="hash_ids", value=hashes)
        try:
            self.values.extend(hashes)
        except OverflowError:
            refuse(self.path, right, line=line, column="hash_ids", value=hashes)
        if len(self.values) > HASHES_MAX:
            refuse(self.path, f"has more than {HASHES_MAX} prefix hashes", line=line)
        self.starts.append(len(self.values))

    def columns(self) -> PrefixHashes:
        return PrefixHashes(
            np.array(self.values, dtype=np.int64), np.array(self.starts, dtype=np.int64)
        )
