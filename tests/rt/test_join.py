"""Stages that join over TCP: token, keys, the right model, and two hosts as network namespaces."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from kvasir_core.errors import OutputError
from kvasir_core.plan import Plan
from kvasir_core.units import Epoch
from kvasir_rt import wire
from kvasir_rt.agent import boot_id
from kvasir_rt.engine import Engine, EngineOptions
from kvasir_rt.join import RingKeys, find_token, join_ring, parse_token, tcp_endpoint
from kvasir_rt.link import CurveKeys, open_socket, secure_client
from kvasir_rt.member import CrewOptions
from kvasir_rt.ring_errors import JoinError
from kvasir_rt.switchboard import LineOptions
from tests.rt.hosts import two_hosts
from tests.rt.rings import VOCAB, Clients, plan_of, until

ROOT = Path(__file__).resolve().parents[2]

STAGE = """
import os
from kvasir_rt.join import find_token, join_ring
from kvasir_rt.ring_errors import JoinError
try:
    join_ring({bridge!r}, {listen!r}, token=find_token(), model=None, wait_s=5)
except JoinError as error:
    raise SystemExit(str(error))
"""


def open_ring(
    plan: Plan, keys: RingKeys, *, remote: frozenset[int], listen: str = "tcp://127.0.0.1:*"
) -> Engine:
    crew = CrewOptions(
        plan=plan,
        dtype="float16",
        compute=wire.FixedSpec((2_000_000,) * plan.stages, VOCAB),
        remote=remote,
        secret=keys.secret,
    )
    return Engine(EngineOptions(lines=LineOptions(crew=crew, listen=listen, keys=keys.bridge)))


@contextmanager
def joining(
    engine: Engine,
    token: str,
    *,
    prefix: tuple[str, ...] = (),
    listen: str = "127.0.0.1:0",
    bridge: str | None = None,
) -> Iterator["subprocess.Popen[str]"]:
    """A `stage --join` process, ended with the context."""
    bridge = bridge or engine.endpoint.removeprefix("tcp://")
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", STAGE.format(bridge=bridge, listen=listen)],
        cwd=ROOT,
        env=os.environ | {"KVASIR_JOIN_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_stages_join_over_tcp_and_give_the_right_tokens() -> None:
    keys = RingKeys.fresh()
    engine = open_ring(plan_of(3), keys, remote=frozenset({1, 2}))
    with ExitStack() as stack:
        stack.callback(engine.close)
        stages = [stack.enter_context(joining(engine, keys.token)) for _ in range(2)]
        engine.start()
        clients = Clients(engine)
        clients.submit_many(8, 30, prompt=40)
        clients.wait_all()
        clients.check()
        own = engine.snapshot().stages[0]
        assert own.pid not in {stage.pid for stage in stages}
        engine.close()
        for stage in stages:
            out, err = stage.communicate(timeout=20)
            assert stage.returncode == 0, err
            assert "the ring has ended" in out


def test_a_joined_stage_that_dies_is_started_again_by_its_own_host() -> None:
    keys = RingKeys.fresh()
    engine = open_ring(plan_of(2), keys, remote=frozenset({1}))
    with ExitStack() as stack:
        stack.callback(engine.close)
        stack.enter_context(joining(engine, keys.token))
        engine.start()
        clients = Clients(engine)
        clients.submit_many(6, 100, prompt=20)
        clients.wait(lambda: clients.total > 60, "progress")
        pid = engine.snapshot().stages[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        clients.wait_all()
        clients.check()
        assert engine.snapshot().statistics.epoch >= 1
        assert engine.snapshot().stages[1].pid != pid


def test_a_stage_with_another_rings_token_is_refused() -> None:
    """It cannot even greet: the bridge it expects has another key."""
    keys, other = RingKeys.fresh(), RingKeys.fresh()
    engine = open_ring(plan_of(2), keys, remote=frozenset({1}))
    with ExitStack() as stack:
        stack.callback(engine.close)
        wrong_secret = RingKeys(other.secret, keys.bridge).token
        stage = stack.enter_context(joining(engine, wrong_secret))
        stack.enter_context(joining(engine, keys.token))
        engine.start()
        _, err = stage.communicate(timeout=20)
        assert stage.returncode != 0
        assert "the token is not this ring's" in err
        assert wrong_secret not in err


def test_a_stage_whose_model_file_differs_is_refused_naming_both_hashes() -> None:
    keys = RingKeys.fresh()
    spec = wire.ModelSpec("model.gguf", "a" * 64, ("cpu", "cpu"))
    crew = CrewOptions(
        plan=plan_of(2),
        dtype="float32",
        compute=spec,
        remote=frozenset({0, 1}),
        secret=keys.secret,
    )
    lines = LineOptions(crew=crew, listen="tcp://127.0.0.1:*", keys=keys.bridge)
    engine = Engine(EngineOptions(lines=lines))
    engine._thread.start()
    try:
        said = say_to_bridge(engine, keys, greeting(keys, sha256="b" * 64))
        assert isinstance(said, wire.Stop)
        assert "b" * 64 in said.why
        assert "a" * 64 in said.why
        said = say_to_bridge(engine, keys, greeting(keys, sha256="a" * 64))
        assert isinstance(said, wire.Assign)
    finally:
        engine.close()


def test_another_protocol_version_is_refused_naming_both() -> None:
    keys = RingKeys.fresh()
    engine = open_ring(plan_of(2), keys, remote=frozenset({0, 1}))
    engine._thread.start()
    try:
        said = say_to_bridge(engine, keys, greeting(keys, protocol=99))
        assert isinstance(said, wire.Stop)
        assert "99" in said.why
        assert str(wire.PROTOCOL) in said.why
    finally:
        engine.close()


def greeting(keys: RingKeys, *, protocol: int = wire.PROTOCOL, sha256: str = "") -> wire.Join:
    return wire.Join(
        protocol=protocol,
        secret=keys.secret,
        stage=None,
        host="here",
        pid=os.getpid(),
        boot=boot_id(),
        server_key=keys.bridge.public,
        client_key=keys.bridge.public,
        sha256=sha256,
    )


def say_to_bridge(engine: Engine, keys: RingKeys, message: wire.ToBridge) -> wire.ToStage:
    """Send one message and return the first answer that is no pulse."""
    with zmq.Context() as context:
        line = open_socket(context, zmq.DEALER, engine.endpoint, wire.CONTROL_BYTES_MAX)
        secure_client(line, CurveKeys.fresh(), keys.bridge.public)
        line.connect(engine.endpoint)
        try:
            line.send(wire.encode(message))
            while True:
                assert line.poll(10_000), "no answer"
                said = wire.decode_to_stage(line.recv())
                if not isinstance(said, wire.Pulse):
                    return said
        finally:
            line.close()


def test_garbage_and_unencrypted_peers_change_nothing() -> None:
    keys = RingKeys.fresh()
    engine = open_ring(plan_of(2), keys, remote=frozenset())
    try:
        engine.start()
        host, _, port = engine.endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with zmq.Context() as context:
            line = open_socket(context, zmq.DEALER, engine.endpoint, wire.CONTROL_BYTES_MAX)
            line.connect(engine.endpoint)  # Without CURVE.
            line.send(wire.encode(greeting(keys)))
            assert not line.poll(500)
            line.close()
            line = open_socket(context, zmq.DEALER, engine.endpoint, wire.CONTROL_BYTES_MAX)
            secure_client(line, CurveKeys.fresh(), keys.bridge.public)
            line.connect(engine.endpoint)
            line.send(b"\xc1 not a message")
            line.send_multipart([b"too", b"many", b"frames"])
            line.send(wire.encode(wire.Idle(Epoch(0))))  # From nobody that has joined.
            clients = Clients(engine)
            clients.submit_many(3, 20)
            clients.wait_all()
            clients.check()
            line.close()
    finally:
        engine.close()


def test_a_neighbour_that_the_bridge_did_not_name_is_not_let_in() -> None:
    """Whoever finds a stage's port and knows its key still cannot connect: its own key is unknown."""
    keys = RingKeys.fresh()
    engine = open_ring(plan_of(2), keys, remote=frozenset())
    try:
        engine.start()
        member = engine._lines.crew.members[1]
        assert member.join is not None
        with zmq.Context() as context:
            line = open_socket(context, zmq.DEALER, member.endpoint, 1 << 20)
            secure_client(line, CurveKeys.fresh(), member.join.server_key)
            monitor = line.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            line.connect(member.endpoint)
            assert monitor.poll(10_000), "it was let in"
            line.disable_monitor()
            monitor.close()
            line.close()
    finally:
        engine.close()


def test_a_stage_whose_bridge_is_gone_waits_for_it_and_then_ends_with_a_clear_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = RingKeys.fresh()
    engine = open_ring(plan_of(2), keys, remote=frozenset({1}))
    with ExitStack() as stack:
        stack.callback(engine.close)
        stage = stack.enter_context(joining(engine, keys.token))
        engine.start()
        monkeypatch.setattr(engine._lines.crew, "stop", lambda why="": None)  # As if killed.
        engine.close()
        _, err = stage.communicate(timeout=60)
        assert stage.returncode != 0
        assert "was silent for 5 s" in err
        assert "no bridge answered at 127.0.0.1" in err


def test_a_ring_that_listens_on_every_address_is_joined_at_the_address_that_is_known() -> None:
    keys = RingKeys.fresh()
    engine = open_ring(plan_of(3), keys, remote=frozenset({1}), listen="tcp://0.0.0.0:*")
    with ExitStack() as stack:
        stack.callback(engine.close)
        port = engine.endpoint.rpartition(":")[2]
        stack.enter_context(joining(engine, keys.token, bridge=f"127.0.0.1:{port}"))
        engine.start()
        clients = Clients(engine)
        clients.submit_many(4, 20)
        clients.wait_all()
        clients.check()


def test_tokens_and_addresses_are_checked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVASIR_JOIN_TOKEN", raising=False)
    with pytest.raises(JoinError, match="KVASIR_JOIN_TOKEN"):
        find_token()
    for wrong in ("", "abc", "kvasir1-00-00", "kvasir1-" + "z" * 64 + "-" + "g" * 64):
        with pytest.raises(JoinError, match="the token is not one"):
            join_ring("127.0.0.1:1", "127.0.0.1:0", token=wrong, model=None)
    keys = RingKeys.fresh()
    assert parse_token(keys.token) == (keys.secret, keys.bridge.public.decode())
    for wrong in (
        "",
        "host",
        "host:",
        ":1",
        "host:x",
        "host:70000",
        "0.0.0.0:1",
        "[::]:1",
        "::1:5",
    ):
        with pytest.raises(JoinError):
            tcp_endpoint(wrong)
    assert tcp_endpoint("[::1]:7100") == "tcp://[::1]:7100"
    assert keys.secret not in repr(keys)
    path = tmp_path / "keys.json"
    first = RingKeys.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RingKeys.load_or_create(path).token == first.token
    path.chmod(0o644)
    with pytest.raises(JoinError, match="chmod 600"):
        RingKeys.load_or_create(path)
    path.chmod(0o600)
    path.write_text(json.dumps({"secret": 1}))
    with pytest.raises(JoinError, match="no key file"):
        RingKeys.load_or_create(path)


def test_a_ring_over_two_hosts_survives_the_death_of_the_other_hosts_stage() -> None:
    with two_hosts() as (namespace, their_address, our_address), ExitStack() as stack:
        keys = RingKeys.fresh()
        engine = open_ring(plan_of(3), keys, remote=frozenset({1}), listen=f"tcp://{our_address}:*")
        stack.callback(engine.close)
        stack.enter_context(
            joining(
                engine,
                keys.token,
                prefix=("ip", "netns", "exec", namespace),
                listen=f"{their_address}:7101",
            )
        )
        engine.start()
        member = engine._lines.crew.members[1]
        assert member.endpoint == f"tcp://{their_address}:7101"
        clients = Clients(engine)
        clients.submit_many(8, 60, prompt=40)
        clients.wait(lambda: clients.total > 60, "progress")
        assert member.pid is not None
        os.kill(member.pid, signal.SIGKILL)
        clients.wait_all()
        clients.check()
        until(lambda: engine.snapshot().statistics.kv_blocks_in_use == 0, "KV is free")


def test_a_cable_pulled_for_three_seconds_costs_no_token() -> None:
    with two_hosts() as (namespace, their_address, our_address), ExitStack() as stack:
        keys = RingKeys.fresh()
        engine = open_ring(plan_of(3), keys, remote=frozenset({1}), listen=f"tcp://{our_address}:*")
        stack.callback(engine.close)
        listen = f"{their_address}:7101"
        prefix = ("ip", "netns", "exec", namespace)
        stack.enter_context(joining(engine, keys.token, prefix=prefix, listen=listen))
        engine.start()
        clients = Clients(engine)
        clients.submit_many(8, 60, prompt=40)
        clients.wait(lambda: clients.total > 60, "progress")
        cable = ("ip", "link", "set", f"{namespace}a")
        subprocess.run([*cable, "down"], check=True)
        until(lambda: engine.snapshot().statistics.epoch > 0, "the loss is found", 2.0)
        time.sleep(1.0)  # The length of the outage, not a race.
        subprocess.run([*cable, "up"], check=True)
        clients.wait_all()
        clients.check()


def test_the_plan_that_crosses_the_wire_keeps_its_digest() -> None:
    plan = replace(plan_of(3), packer="greedy", prefill_rows_max=7)
    spec = wire.FixedSpec((1, 2, 3), 7)
    sent = wire.Assign(wire.PROTOCOL, plan, plan.digest, 1, "float16", spec)
    got = wire.decode_to_stage(wire.encode(sent))
    assert isinstance(got, wire.Assign)
    assert got.plan.digest == plan.digest


def test_key_and_token_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file/keys cannot be written: (Not a d|File e)"):
        RingKeys.load_or_create(tmp_path / "file" / "keys")
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    with pytest.raises(JoinError, match="no key file"):
        RingKeys.load_or_create(folder)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(JoinError, match="cannot read the token"):
        find_token(tmp_path / "bytes")
