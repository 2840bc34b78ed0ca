"""The journal of a sweep: every finished point, safe from the moment its row is written.

An SQLite file beside the result, in write-ahead mode: a killed process loses nothing that it had
written, and the next one reads on. Whoever has it open keeps everybody else out. It goes when the
result is written.
"""

import json
import sqlite3
from pathlib import Path
from typing import Any

from kvasir_core.errors import OutputError, ScenarioError

APPLICATION_ID = 0x4B565357  # "KVSW"
FORMAT = 1


def journal_path(out: Path) -> Path:
    """Where the journal of a result lies."""
    return out.with_name(f"{out.name}.journal")


class Journal:
    """Rows by the key of their point.

    Raises:
        ScenarioError: The file is no journal, or another sweep has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._base = sqlite3.connect(path, isolation_level=None, timeout=0.2)
            self._base.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._check()
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise ScenarioError(
                    f"{path}: another sweep is writing it; name another --out"
                ) from None
            raise ScenarioError(f"{path}: cannot be used as a journal: {error}") from None
        except sqlite3.DatabaseError as error:
            raise ScenarioError(
                f"{path}: is no journal of a sweep ({error}); move it or name another --out"
            ) from None

    def _check(self) -> None:
        base = self._base
        (application,) = base.execute("PRAGMA application_id").fetchone()
        tables = base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != APPLICATION_ID and tables:
            raise sqlite3.DatabaseError("a database of something else")
        base.execute("PRAGMA journal_mode=WAL")
        base.execute("PRAGMA synchronous=NORMAL")
        base.execute(f"PRAGMA application_id={APPLICATION_ID}")
        base.execute(f"PRAGMA user_version={FORMAT}")
        base.execute(
            "CREATE TABLE IF NOT EXISTS points "
            "(key TEXT PRIMARY KEY, row TEXT NOT NULL, is_lost INTEGER NOT NULL) WITHOUT ROWID"
        )

    def close(self) -> None:
        """Leave the file to whoever goes on; an empty one is of no use to anybody."""
        if self._base.execute("SELECT count(*) FROM points").fetchone() == (0,):
            self.remove()
        self._base.close()

    def add(self, key: str, row: dict[str, Any], *, is_lost: bool = False) -> None:
        """Keep a finished point; one that was lost will be tried again.

        Raises:
            OutputError: It cannot be written, as on a full disk; what was kept before is safe.
        """
        text = json.dumps(row, allow_nan=False)
        try:
            self._base.execute(
                "INSERT OR REPLACE INTO points VALUES (?, ?, ?)", (key, text, is_lost)
            )
        except sqlite3.OperationalError as error:
            raise OutputError(
                f"{self.path} cannot be written: {error}; make room there, and the same command "
                "goes on from where it was"
            ) from None

    def row(self, key: str) -> dict[str, Any]:
        """The row of a point that is there."""
        found = self._base.execute("SELECT row FROM points WHERE key = ?", (key,)).fetchone()
        row: dict[str, Any] = json.loads(found[0])
        return row

    def keys(self) -> set[str]:
        """Points that are done, and need not be run."""
        return {key for (key,) in self._base.execute("SELECT key FROM points WHERE NOT is_lost")}

    def remove(self) -> None:
        """Delete the file; the result has its rows."""
        self._base.close()
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
