"""The result of a sweep: one row per point, as Parquet or SQLite; the same rows, the same bytes.

Columns: `point` (the key), one per axis (named as the scenario's key), `seed`, the figures of
`figures.py`, and `error`, which is null where all went well.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvasir_core.errors import ScenarioError
from kvasir_scenario.run_dir import whole_file
from kvasir_sim.sweep.figures import FIGURES
from kvasir_sim.sweep.journal import APPLICATION_ID

KINDS = (".parquet", ".sqlite")
ROWS_AT_ONCE = 8192
TYPES = {"text": pa.string(), "whole": pa.int64(), "number": pa.float64(), "truth": pa.bool_()}
SQL_TYPES = {"text": "TEXT", "whole": "INTEGER", "number": "REAL", "truth": "INTEGER"}
MARK = b"kvasir_sweep"

Columns = list[tuple[str, str]]
Row = Sequence[Any]


def columns_of(axes: Sequence[tuple[str, Sequence[Any]]]) -> Columns:
    """Name and kind of every column."""
    return [
        ("point", "text"),
        *((key, axis_kind(values)) for key, values in axes),
        ("seed", "whole"),
        *((figure.name, figure.kind) for figure in FIGURES),
        ("error", "text"),
    ]


def axis_kind(values: Sequence[Any]) -> str:
    """The narrowest kind that has room for all values; lists and maps become JSON texts."""
    if all(isinstance(value, bool) for value in values):
        return "truth"
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return "text"
    if all(isinstance(value, int) and abs(value) < 2**63 for value in values):
        return "whole"
    return "number"


def axis_cell(value: Any, kind: str) -> Any:
    """A value as its column has it."""
    if kind == "text":
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return float(value) if kind == "number" else value


def write_table(path: Path, columns: Columns, rows: Iterable[Row]) -> None:
    """Write the result; it appears complete or not at all."""
    with whole_file(path) as partial:
        partial.unlink(missing_ok=True)
        if path.suffix == ".parquet":
            _write_parquet(partial, columns, rows)
        else:
            _write_sqlite(partial, columns, rows)


def _write_parquet(path: Path, columns: Columns, rows: Iterable[Row]) -> None:
    schema = pa.schema([(name, TYPES[kind]) for name, kind in columns], {MARK: b"1"})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for some in _batches(rows):
            cells = zip(*some, strict=True)
            arrays = [
                pa.array(column, field.type) for column, field in zip(cells, schema, strict=True)
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def _batches(rows: Iterable[Row]) -> Iterator[tuple[Row, ...]]:
    waiting = iter(rows)
    while some := tuple(islice(waiting, ROWS_AT_ONCE)):
        yield some


def _write_sqlite(path: Path, columns: Columns, rows: Iterable[Row]) -> None:
    described = ", ".join(f"{_quoted(name)} {SQL_TYPES[kind]}" for name, kind in columns)
    base = sqlite3.connect(path, isolation_level=None)
    try:
        base.execute(f"PRAGMA application_id={APPLICATION_ID}")
        base.execute("PRAGMA journal_mode=OFF")
        base.execute("BEGIN")
        base.execute(f"CREATE TABLE points ({described})")
        places = ", ".join("?" * len(columns))
        base.executemany(f"INSERT INTO points VALUES ({places})", rows)  # noqa: S608 - only `?`.
        base.execute("COMMIT")
    finally:
        base.close()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """Figures and error of each point in an earlier result, by key.

    Raises:
        ScenarioError: It is no result of a sweep.
    """
    try:
        rows = _read_parquet(path) if path.suffix == ".parquet" else _read_sqlite(path)
    except (pa.ArrowException, sqlite3.DatabaseError, KeyError, ValueError) as error:
        raise ScenarioError(
            f"--out {path}: is there and is no result of a sweep ({error}); name a new file"
        ) from None
    wanted = [*(figure.name for figure in FIGURES), "error"]
    return {row["point"]: {name: row[name] for name in wanted if name in row} for row in rows}


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    table = pq.read_table(path)
    if MARK not in (table.schema.metadata or {}):
        raise ValueError("another table")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _read_sqlite(path: Path) -> list[dict[str, Any]]:
    base = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    base.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in base.execute("SELECT * FROM points")]
    finally:
        base.close()
