"""What must survive a restart, in SQLite by default, in PostgreSQL by URL.

The hub's core says what that is (`Hub.snapshot`); a row is written when it differs from what was
written before. Writing happens in one thread behind the loop, so a crash loses the last moments:
claims of that time are gone (their nodes ask again), and numbers that may have been given are
never given again, for counters then begin `COUNTER_GAP` later.

Times left (of claims, of bans) are kept as they were at the last write: the time a hub was away
ages nobody, as with any other sleep of it.
"""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Connection,
    Table,
    create_engine,
    delete,
    event,
    func,
    insert,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError

from kvasir_core.errors import KvasirError
from kvasir_core.swarm.events import (
    BanRow,
    ClaimRow,
    ModelRegistered,
    ProvenRow,
    StateRestored,
)
from kvasir_core.swarm.words import ClaimId, ModelName, Session, WorkerId
from kvasir_core.units import Nanos
from kvasir_rt.hub import tables
from kvasir_rt.hub.record import Entry

SCHEMA_VERSION = 1
COUNTER_GAP = 1 << 16  # More claims or dials than a hub grants between two writes.
ANEW = "move it away to start anew, or name another database"
ADVISORY_LOCK = 0x6B7661736972  # "kvasir"; one hub per PostgreSQL database.

Row = tuple[Any, ...]


class StoreError(KvasirError):
    """The database cannot be used; the message names it, what was found and what to do."""


class StoreUnusable(StoreError):
    """The database is right, but cannot be reached or written to now."""

    exit_status = 1


class Store:
    """The database. All methods but `open` are called from one thread at a time.

    Attributes:
        hub: The hub's name, made with the database.
    """

    def __init__(self, url: str, *, history_max: int, identities_max: int) -> None:
        self._history_max = history_max
        self._identities_max = identities_max
        self._written: dict[str, dict[Row, Row]] = {}  # Table -> primary key -> row.
        self._lock: Any = None
        try:
            self._url = make_url(url)
            self._shown = self._url.render_as_string(hide_password=True)
            if self._url.get_backend_name() not in ("sqlite", "postgresql"):
                raise StoreError(f"{self._shown}: the database must be sqlite or postgresql")
            self._engine = create_engine(self._url, pool_size=1, max_overflow=1)
            if self._url.get_backend_name() == "sqlite":
                event.listen(self._engine, "connect", _set_pragmas)
        except (ArgumentError, ImportError) as error:
            raise StoreError(
                f"{_without_password(url)}: is no database that can be used: {error}"
            ) from None

    def open(self) -> str:
        """Lock the database for this hub, make or check its tables; returns the hub's name.

        Raises:
            StoreError: Another hub has it, it is of a later version, or cannot be reached.
        """
        try:
            self._take_lock()
            with self._engine.begin() as connection:
                tables.metadata.create_all(connection)
                meta = _read_meta(connection)
                version = int(meta.get("schema_version", SCHEMA_VERSION))
                if version != SCHEMA_VERSION:
                    raise StoreError(
                        f"{self._shown}: has schema version {version}; this hub knows "
                        f"{SCHEMA_VERSION}: use the newer release, or another database"
                    )
                hub = meta.get("hub") or secrets.token_hex(32)
                _write_meta(connection, {"schema_version": str(SCHEMA_VERSION), "hub": hub})
            self.hub = hub
            return hub
        except (SQLAlchemyError, ValueError) as error:
            self.close()
            if isinstance(error, OperationalError):
                raise StoreUnusable(
                    f"{self._shown}: {_first_line(error)}; is it up, and is there room on its disk?"
                ) from None
            raise StoreError(f"{self._shown}: {_first_line(error)}; {ANEW}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._engine.dispose()

    def load(self, claim_ttl_ns: int) -> StateRestored | None:
        """What the last hub left; None if there was none.

        Args:
            claim_ttl_ns: Of this hub's policy; a claim has no more left than that.

        Raises:
            StoreError: The database cannot be read, or does not hold what we wrote.
        """
        try:
            with self._engine.connect() as connection:
                return self._load(connection, claim_ttl_ns)
        except (SQLAlchemyError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{self._shown}: cannot be read: {_first_line(error)}; {ANEW}"
            ) from None

    def _load(self, connection: Connection, claim_ttl_ns: int) -> StateRestored | None:
        meta = _read_meta(connection)
        if "written_ns" not in meta:
            return None
        now = int(meta["written_ns"])
        gap = 0 if meta.get("is_last") == "1" else COUNTER_GAP
        models = connection.execute(select(tables.models).order_by(tables.models.c.position)).all()
        claims = connection.execute(select(tables.claims).order_by(tables.claims.c.claim)).all()
        bans = connection.execute(select(tables.bans).order_by(tables.bans.c.node)).all()
        proven = connection.execute(
            select(tables.proven).order_by(*tables.proven.primary_key.columns.values())
        ).all()
        return StateRestored(
            models=tuple(
                ModelRegistered(ModelName(r.model), tuple(json.loads(r.layers)), r.experts,
                                r.hidden_size)
                for r in models
            ),
            recruiting=tuple(ModelName(r.model) for r in models if r.is_recruiting),
            claims=tuple(
                ClaimRow(
                    ClaimId(r.claim), WorkerId(r.node), ModelName(r.model), r.layer, r.first,
                    r.stop, Nanos(min(claim_ttl_ns, max(0, r.expires_ns - now))),
                )
                for r in claims
            ),
            bans=tuple(
                BanRow(WorkerId(r.node), Nanos(r.expires_ns - now))
                for r in bans
                if r.expires_ns > now
            ),
            proven=tuple(
                ProvenRow(
                    WorkerId(r.worker), ModelName(r.model), r.layer, r.first, r.stop,
                    r.last_serve_ms,
                )
                for r in proven
            ),
            claim_next=ClaimId(int(meta["claim_next"]) + gap),
            session_next=Session(int(meta["session_next"]) + gap),
        )  # fmt: skip

    def write(
        self,
        state: StateRestored,
        now: Nanos,
        *,
        entries: Sequence[Entry] = (),
        seen: Mapping[WorkerId, bytes] | None = None,
        is_last: bool = False,
    ) -> None:
        """Write what differs from the last time, and what is new.

        Args:
            state: The core's snapshot.
            now: On the clock that times left are counted on.
            entries: The record's new entries.
            seen: Public keys of nodes that proved themselves since.
            is_last: The hub gives no number after this.

        Raises:
            StoreError: It failed; nothing of this call was written, the next may try again.
        """
        try:
            with self._engine.begin() as connection:
                if not self._written:
                    self._remember(connection)
                written = {
                    table.name: self._write_table(connection, table, rows)
                    for table, rows in _rows_of(state, now)
                }
                _write_meta(
                    connection,
                    {
                        "written_ns": str(now),
                        "claim_next": str(state.claim_next),
                        "session_next": str(state.session_next),
                        "is_last": str(int(is_last)),
                    },
                )
                self._add_history(connection, entries)
                self._add_identities(connection, seen or {})
        except SQLAlchemyError as error:
            raise StoreError(f"{self._shown}: {_first_line(error)}") from None
        self._written = written

    def history(self, count: int) -> list[Entry]:
        """The last entries, oldest first."""
        query = select(tables.history).order_by(tables.history.c.id.desc()).limit(count)
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        return [
            Entry(r.kind, r.model, r.node, json.loads(r.detail), at_s=r.at_s)
            for r in reversed(rows)
        ]

    def identities(self) -> int:
        with self._engine.connect() as connection:
            return connection.execute(
                select(func.count()).select_from(tables.identities)
            ).scalar_one()

    def _remember(self, connection: Connection) -> None:
        """What an earlier hub wrote, so that only differences are written."""
        for table in (tables.models, tables.claims, tables.bans, tables.proven):
            self._written[table.name] = {
                _key(table, tuple(row)): tuple(row) for row in connection.execute(select(table))
            }

    def _write_table(
        self, connection: Connection, table: Table, rows: Iterable[Row]
    ) -> dict[Row, Row]:
        before = self._written[table.name]
        now = {_key(table, row): row for row in rows}
        names = [column.name for column in table.columns]
        gone = [key for key, row in before.items() if now.get(key) != row]
        new = [row for key, row in now.items() if before.get(key) != row]
        key_columns = list(table.primary_key.columns)
        for key in gone:
            where = [column == value for column, value in zip(key_columns, key, strict=True)]
            connection.execute(delete(table).where(*where))
        if new:
            connection.execute(insert(table), [dict(zip(names, row, strict=True)) for row in new])
        return now

    def _add_history(self, connection: Connection, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        connection.execute(
            insert(tables.history),
            [
                {
                    "at_s": entry.at_s,
                    "kind": entry.kind,
                    "model": entry.model,
                    "node": entry.node,
                    "detail": json.dumps(entry.detail, allow_nan=False),
                }
                for entry in entries
            ],
        )
        last = connection.execute(select(func.max(tables.history.c.id))).scalar_one()
        connection.execute(
            delete(tables.history).where(tables.history.c.id <= last - self._history_max)
        )

    def _add_identities(self, connection: Connection, seen: Mapping[WorkerId, bytes]) -> None:
        table = tables.identities
        now = time.time()
        for node, public_key in seen.items():
            known = table.update().where(table.c.node == node).values(last_seen_s=now)
            if not connection.execute(known).rowcount:
                connection.execute(
                    insert(table).values(
                        node=node, public_key=public_key.hex(), first_seen_s=now, last_seen_s=now
                    )
                )
        count = connection.execute(select(func.count()).select_from(table)).scalar_one()
        if seen and count > self._identities_max:
            oldest = (
                select(table.c.node)
                .order_by(table.c.last_seen_s)
                .limit(count - self._identities_max)
            )
            connection.execute(delete(table).where(table.c.node.in_(oldest)))

    def _take_lock(self) -> None:
        """One hub per database: two would give the same slices twice."""
        if self._url.get_backend_name() == "postgresql":
            self._lock = self._engine.connect()
            taken = self._lock.execute(
                text("SELECT pg_try_advisory_lock(:number)"), {"number": ADVISORY_LOCK}
            ).scalar_one()
            self._lock.commit()
        else:
            path = Path(self._url.database or "")
            if not path.name:
                return  # In memory: nobody else's.
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock = os.fdopen(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken = True
            except BlockingIOError:
                taken = False
        if not taken:
            raise StoreError(
                f"{self._shown}: another hub uses this database; stop it, or give --state another "
                "directory"
            )


def _rows_of(state: StateRestored, now: Nanos) -> list[tuple[Table, list[Row]]]:
    recruiting = set(state.recruiting)
    return [
        (
            tables.models,
            [
                (m.model, i, json.dumps(m.layers), m.experts, m.hidden_size, m.model in recruiting)
                for i, m in enumerate(state.models)
            ],
        ),
        (
            tables.claims,
            [
                (c.claim, c.node, c.model, c.layer, c.begin, c.end, now + c.remaining_ns)
                for c in state.claims
            ],
        ),
        (tables.bans, [(b.node, now + b.remaining_ns) for b in state.bans]),
        (
            tables.proven,
            [(p.worker, p.model, p.layer, p.begin, p.end, p.last_serve_ms) for p in state.proven],
        ),
    ]


def _key(table: Table, row: Row) -> Row:
    return tuple(
        value for value, column in zip(row, table.columns, strict=True) if column.primary_key
    )


def _read_meta(connection: Connection) -> dict[str, str]:
    return {row.key: row.value for row in connection.execute(select(tables.meta))}


def _write_meta(connection: Connection, values: dict[str, str]) -> None:
    connection.execute(delete(tables.meta).where(tables.meta.c.key.in_(values)))
    connection.execute(insert(tables.meta), [{"key": k, "value": v} for k, v in values.items()])


def _set_pragmas(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def _without_password(url: str) -> str:
    return url.partition("://")[0] + "://..."
