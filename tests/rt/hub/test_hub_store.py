"""What survives: the database, and a hub that restarts."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

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
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.record import Entry, Record
from kvasir_rt.hub.store import COUNTER_GAP, Store, StoreError
from tests.rt.hub.hubs import MODEL, Coordinator, Worker, quick, running_hub, wait_for

SECOND = 10**9
M, N = ModelName("m"), ModelName("n")
STATE = StateRestored(
    models=(ModelRegistered(M, (1, 3), 64, 512), ModelRegistered(N, (0,), 8, 64)),
    recruiting=(N,),
    claims=(
        ClaimRow(ClaimId(4), WorkerId("w4"), M, 1, 0, 32, Nanos(100 * SECOND)),
        ClaimRow(ClaimId(5), WorkerId("w5"), N, 0, 0, 8, Nanos(120 * SECOND)),
    ),
    bans=(BanRow(WorkerId("liar"), Nanos(600 * SECOND)),),
    proven=(
        ProvenRow(WorkerId("w1"), M, 1, 0, 32, 7),
        ProvenRow(WorkerId("w1"), M, 3, 0, 32, 9),
    ),
    claim_next=ClaimId(6),
    session_next=Session(11),
)
RESTORED = STATE._replace(
    claim_next=ClaimId(6 + COUNTER_GAP), session_next=Session(11 + COUNTER_GAP)
)


def make_store(url: str) -> Store:
    return Store(url, history_max=5, identities_max=3)


def sqlite(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'hub.sqlite'}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A PostgreSQL of this test's own, on a socket in a directory of its own."""
    needed = ["initdb", "pg_ctl"]
    as_user: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL does not run as root.
        needed.append("runuser")
        as_user = ["runuser", "-u", "postgres", "--"]
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        pytest.skip(f"PostgreSQL cannot be started here: {', '.join(missing)} not found")
    with tempfile.TemporaryDirectory(prefix="kvasir-pg-") as root:
        if as_user:
            shutil.chown(root, "postgres")
        data = f"{root}/data"

        def run(*command: str) -> None:
            subprocess.run([*as_user, *command], check=True, stdout=subprocess.DEVNULL, cwd="/")

        run("initdb", "--no-sync", "--auth=trust", "--username=kvasir", "-D", data)
        settings = f"-k {root} -c listen_addresses='' -c fsync=off"
        run("pg_ctl", "-D", data, "-o", settings, "-l", f"{root}/log", "-w", "start")
        try:
            yield f"postgresql+psycopg://kvasir@/postgres?host={root}"
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "stop")


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    is_postgres = request.param == "postgresql"
    url = request.getfixturevalue("postgres") if is_postgres else sqlite(tmp_path)
    opened = make_store(url)
    opened.open()
    yield opened
    if is_postgres:
        tables.metadata.drop_all(opened._engine)
    opened.close()


def test_what_was_written_is_read_back_with_the_time_it_had_left(store: Store) -> None:
    assert store.load(120 * SECOND) is None
    store.write(STATE, Nanos(5 * SECOND))
    assert store.load(120 * SECOND) == RESTORED
    assert store.load(60 * SECOND) == RESTORED._replace(
        claims=tuple(row._replace(remaining_ns=Nanos(60 * SECOND)) for row in STATE.claims)
    )


def test_after_a_clean_end_numbers_go_on_and_after_a_crash_with_a_gap(store: Store) -> None:
    store.write(STATE, Nanos(0), is_last=True)
    assert store.load(120 * SECOND) == STATE
    store.write(STATE, Nanos(0))
    assert store.load(120 * SECOND) == RESTORED


def test_only_differences_are_written_and_nothing_old_is_left(store: Store) -> None:
    store.write(STATE, Nanos(0))
    later = STATE._replace(
        recruiting=(M,),
        claims=(STATE.claims[0]._replace(remaining_ns=Nanos(99 * SECOND)),),
        bans=(),
        proven=(STATE.proven[1]._replace(last_serve_ms=10),),
    )
    store.write(later, Nanos(SECOND))
    assert store.load(120 * SECOND) == later._replace(
        claim_next=RESTORED.claim_next, session_next=RESTORED.session_next
    )


def test_another_process_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    first = make_store(sqlite(tmp_path))
    name = first.open()
    first.write(STATE, Nanos(0))
    first.close()
    second = make_store(sqlite(tmp_path))
    assert second.open() == name
    assert second.load(120 * SECOND) == RESTORED
    second.write(STATE._replace(claims=()), Nanos(0))  # Differs from what the first wrote.
    assert second.load(120 * SECOND) == RESTORED._replace(claims=())
    second.close()


def test_two_hubs_do_not_share_a_postgresql_database(postgres: str) -> None:
    first = make_store(postgres)
    first.open()
    with pytest.raises(StoreError, match="another hub"):
        make_store(postgres).open()
    first.close()
    second = make_store(postgres)
    second.open()
    tables.metadata.drop_all(second._engine)
    second.close()


def test_two_hubs_do_not_share_a_database(tmp_path: Path) -> None:
    first = make_store(sqlite(tmp_path))
    first.open()
    with pytest.raises(StoreError, match="another hub"):
        make_store(sqlite(tmp_path)).open()
    first.close()
    second = make_store(sqlite(tmp_path))
    second.open()
    second.close()


def test_a_later_schema_is_refused_by_name(tmp_path: Path) -> None:
    store = make_store(sqlite(tmp_path))
    store.open()
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE kvasir_meta SET value = '99' WHERE key = 'schema_version'"))
    store.close()
    with pytest.raises(StoreError, match="schema version 99"):
        make_store(sqlite(tmp_path)).open()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://h/db", "sqlite or postgresql"),
        ("nonsense", "no database"),
        ("sqlite:////proc/nowhere/hub.sqlite", "nowhere"),
    ],
)
def test_a_database_that_cannot_be_used_says_so(url: str, why: str) -> None:
    with pytest.raises((StoreError, OSError), match=why):
        make_store(url).open()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hub.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="not a database; move it away to start anew"):
        make_store(sqlite(tmp_path)).open()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE kvasir_meta SET value = 'abc' WHERE key = 'schema_version'",
        "UPDATE kvasir_meta SET value = 'abc' WHERE key = 'written_ns'",
        "UPDATE kvasir_models SET layers = 'null'",
        "UPDATE kvasir_models SET layers = '['",
    ],
)
def test_damaged_rows_are_refused_with_what_to_do(tmp_path: Path, damage: str) -> None:
    store = make_store(sqlite(tmp_path))
    store.open()
    store.write(STATE, Nanos(0))
    with store._engine.begin() as connection:
        assert connection.execute(text(damage)).rowcount
    store.close()
    again = make_store(sqlite(tmp_path))

    def read() -> None:
        again.open()
        again.load(120 * SECOND)

    with pytest.raises(StoreError, match="move it away to start anew"):
        read()
    again.close()


def test_a_password_is_never_shown(tmp_path: Path) -> None:
    store = Store(
        "postgresql+psycopg://user:secret@127.0.0.1:1/db", history_max=1, identities_max=1
    )
    with pytest.raises(StoreError) as found:
        store.open()
    assert "secret" not in str(found.value)


def test_history_and_identities_are_bounded(store: Store) -> None:
    entries = [Entry("target", "m", None, {"target": n}) for n in range(8)]
    keys = {WorkerId(f"{n:032x}"): bytes(32) for n in range(5)}
    store.write(STATE, Nanos(0), entries=entries[:4], seen=keys)
    store.write(STATE, Nanos(0), entries=entries[4:], seen=keys)
    assert [entry.detail["target"] for entry in store.history(100)] == [3, 4, 5, 6, 7]
    assert store.identities() == 3


def test_a_record_that_could_not_be_written_is_put_back_in_order() -> None:
    record = Record(2)
    for number in range(3):
        record.add("x", number=number)
    taken = record.take_unwritten()
    record.add("x", number=3)
    record.put_back(taken)
    assert [entry.detail["number"] for entry in record.take_unwritten()] == [0, 1, 2, 3]
    assert len(record.recent) == 2


def test_a_restart_neither_recruits_nor_releases_for_one_claim_period(tmp_path: Path) -> None:
    policy = quick(claim_ttl_ns=4_000_000_000, idle_exit_ns=1)
    limits = HubLimits(node_burst=10_000)
    with Coordinator(busy=3) as coordinator:
        with running_hub(tmp_path, policy=policy, limits=limits) as hub:
            hub.register(coordinator)
            wait_for(lambda: hub.model()["recruiting"], "recruiting")
            worker = Worker(hub).login()
            worker.cover([0, 0, 16])
            row = {"worker": worker.node, "layer": 0, "experts": [0, 16], "standing": "proven",
                   "last_serve_ms": 7, "pairs": 1}  # fmt: skip
            hub.post("/api/expert-serving", hub.token, coordinator="c", rows=[row])
            session = worker.cover([0, 0, 16])["relay_session"]
            liar = Worker(hub).login()
            liar.cover([1, 0, 16])
            bad = {**row, "worker": liar.node, "layer": 1, "standing": "quarantined"}
            hub.post("/api/expert-serving", hub.token, coordinator="c", rows=[bad])
            name = hub.service.keeper.hub
        with running_hub(tmp_path, policy=policy, limits=limits) as hub:
            assert hub.service.keeper.hub == name
            assert hub.service.control.hub.recruitment().models[0].model == MODEL
            hub.register(coordinator)
            assert hub.model()["recruiting"]  # It was, and there has been no reading since.
            fresh = Worker(hub).login()
            answer = fresh.volunteer()
            assert answer["reason"] == "the hub has just restarted"
            known = Worker(hub, worker.identity).login()
            covered = known.cover([0, 0, 16])
            assert covered["release"] == []  # Idle for longer than allowed, but the hub is quiet.
            assert covered["relay_session"] > session
            (node,) = hub.service.control.hub.statistics().nodes
            assert node.last_serve_ms == 7  # Proven standing was kept.
            assert Worker(hub, liar.identity).login().volunteer()["assigned"] is False
            given = wait_for(lambda: (a := fresh.volunteer())["assigned"] and a, "an assignment")
            assert given["claim"] >= 1
            reason = Worker(hub, liar.identity).login().volunteer()["reason"]
            assert reason == "quarantined"  # The ban outlives the quiet.
            assert hub.service.control._store is not None
            kinds = {entry.kind for entry in hub.service.control._store.history(100)}
            assert {"target", "coordinator_attached"} <= kinds


def test_an_open_claim_survives_a_restart(tmp_path: Path) -> None:
    with Coordinator(busy=3) as coordinator:
        with running_hub(tmp_path) as hub:
            hub.register(coordinator)
            wait_for(lambda: hub.model()["recruiting"], "recruiting")
            worker = Worker(hub).login()
            offer = worker.volunteer()
        with running_hub(tmp_path) as hub:
            hub.register(coordinator)
            assert hub.segments(offer["layer"])[0]["claimed"] == 1
            again = Worker(hub, worker.identity).login()
            slice_ = [offer["layer"], *offer["experts"]]
            assert again.cover(slice_, claim=offer["claim"])["ok"]
            assert hub.segments(offer["layer"])[0]["claimed"] == 0


def test_a_database_that_fails_stops_nothing_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir_rt.hub.control.WRITE_S", 0.02)
    with running_hub(tmp_path) as hub, Coordinator() as coordinator:
        store = hub.service.control._store
        assert store is not None
        working = store.write

        def failing(*_: object, **__: object) -> None:
            raise StoreError("the disk is full")

        monkeypatch.setattr(store, "write", failing)
        hub.register(coordinator)
        wait_for(lambda: hub.get("/health").json()["status"] == "degraded", "the problem")
        assert Worker(hub).login().volunteer()["assigned"] is False
        monkeypatch.setattr(store, "write", working)
        wait_for(lambda: hub.get("/health").json()["status"] == "ok", "the repair")
        assert hub.service.control.store_problem == ""
    again = make_store(f"sqlite:///{tmp_path / 'state' / 'hub.sqlite'}")
    again.open()
    assert "coordinator_attached" in {entry.kind for entry in again.history(100)}
    assert again.identities() == 1
    again.close()
