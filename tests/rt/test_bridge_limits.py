"""What the bridge survives: full queues, slow and rude clients, keys, bodies, garbage."""

import concurrent.futures
import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from kvasir_core.microbatch import FinishReason
from kvasir_rt.bridge.limits import Limits
from tests.rt.bridge_thread import Running, running_bridge, wait_for
from tests.rt.scripted_engine import PieceTokenizer, ScriptedEngine, small_plan

JSON = {"content-type": "application/json"}
LONG = {"prompt": "x", "max_tokens": 400}


def endless(_: object) -> list[int]:
    return [97] * 400


@pytest.fixture
def held() -> Iterator[tuple[Running, ScriptedEngine]]:
    """A bridge whose laps do not end: 2 requests run, 2 may wait."""
    engine = ScriptedEngine(endless, plan=small_plan(running_max=2))
    engine.hold()
    limits = Limits(waiting_max=2, stream_opens_s=0.02)
    with running_bridge(engine, PieceTokenizer(), limits=limits) as running:
        yield running, engine


@pytest.fixture
def small() -> Iterator[Running]:
    """A bridge with tight limits."""
    limits = Limits(
        body_bytes_max=20_000,
        bodies_bytes_max=40_000,
        body_s_max=0.4,
        header_s_max=0.4,
        header_bytes_max=8_000,
        linger_s_max=0.3,
        write_s_max=0.5,
    )
    with running_bridge(ScriptedEngine(lambda _: [97]), PieceTokenizer(), limits=limits) as running:
        yield running


def is_error(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == code


def connect(running: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), timeout=10)


def start_stream(running: Running) -> socket.socket:
    """Sends a streaming request and reads until its headers have come."""
    body = json.dumps({**LONG, "stream": True}).encode()
    sock = connect(running)
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    got = b""
    while b"\r\n\r\n" not in got:
        more = sock.recv(65536)
        assert more, got
        got += more
    assert got.startswith(b"HTTP/1.1 200"), got
    return sock


def read_all(sock: socket.socket) -> bytes:
    """Until the server closes; a reset counts as closed."""
    got = b""
    try:
        while more := sock.recv(65536):
            got += more
    except ConnectionResetError:
        pass
    return got


def test_a_full_queue_answers_429_and_says_when_to_come_again(
    held: tuple[Running, ScriptedEngine],
) -> None:
    running, engine = held
    streams = [start_stream(running) for _ in range(4)]
    for body in (LONG, {**LONG, "n": 2}):
        response = running.client.post("/v1/completions", json=body)
        is_error(response, 429, "queue_full")
        assert 1 <= int(response.headers["retry-after"]) <= 60
    assert len(engine.submitted) == 4, "a refused request reached the ring"
    streams.pop().close()
    wait_for(lambda: running.bridge.live == 3, "the place of the client that left")
    streams.append(start_stream(running))
    for stream in streams:
        stream.close()
    wait_for(lambda: running.bridge.live == 0, "the end")


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_is_cancelled_without_another_token(
    held: tuple[Running, ScriptedEngine], how: str
) -> None:
    running, engine = held
    stream = start_stream(running)
    engine.let_laps(3)
    wait_for(lambda: engine.laps == 3, "three laps")
    if how == "reset":
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    stream.close()
    wait_for(lambda: bool(engine.cancelled), "the cancel")
    assert engine.cancelled == [(engine.submitted[0].request_id, FinishReason.CANCELLED)]
    engine.run()
    wait_for(lambda: engine.ring.statistics().running == 0, "the release")
    assert engine.laps <= 4


def test_a_client_that_leaves_before_an_answer_that_is_not_streamed_is_cancelled(
    held: tuple[Running, ScriptedEngine],
) -> None:
    running, engine = held
    with pytest.raises(httpx.ReadTimeout):
        running.client.post("/v1/completions", json={**LONG, "n": 2}, timeout=0.3)
    wait_for(lambda: len(engine.cancelled) == 2, "both cancels")
    wait_for(lambda: running.bridge.live == 0, "the end")


def test_a_client_that_pipelines_garbage_and_leaves_is_cancelled(
    held: tuple[Running, ScriptedEngine],
) -> None:
    running, engine = held
    stream = start_stream(running)
    stream.sendall(b"GET / HTTP/1.1\r\n\r\n\x00\xff nonsense" * 2000)
    stream.close()
    wait_for(lambda: bool(engine.cancelled), "the cancel")


def test_pipelined_bytes_are_not_kept(held: tuple[Running, ScriptedEngine]) -> None:
    running, _ = held
    stream = start_stream(running)
    stream.sendall(b"x" * 20_000_000)  # More than the kernel buffers, so the server has read most.
    assert running.server.bytes_unread < 1_000_000
    stream.close()


def test_a_deadline_ends_the_request_and_names_itself(
    held: tuple[Running, ScriptedEngine],
) -> None:
    running, engine = held
    response = running.client.post("/v1/completions", json={**LONG, "deadline_s": 0.2})
    is_error(response, 504, "deadline_exceeded")
    assert "0.2 s" in response.json()["error"]["message"]
    assert engine.cancelled[0][1] is FinishReason.DEADLINE
    response = running.client.post(
        "/v1/completions", json={**LONG, "deadline_s": 0.2, "stream": True}
    )
    last = response.text.strip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"


def test_draining_lets_requests_end_and_refuses_new_ones(
    held: tuple[Running, ScriptedEngine],
) -> None:
    running, engine = held
    stream = start_stream(running)
    running.loop.call_soon_threadsafe(running.bridge.drain)
    wait_for(
        lambda: running.client.post("/v1/completions", json=LONG).status_code == 503, "refusal"
    )
    assert running.client.get("/health").json()["error"]["code"] == "draining"
    engine.run()
    got = b""
    while b"[DONE]" not in got:
        got += stream.recv(65536)
    stream.close()


def test_health_is_a_lap_that_ended(held: tuple[Running, ScriptedEngine]) -> None:
    running, engine = held
    engine.run()
    first = running.client.get("/health").json()
    assert first["status"] == "ok"
    assert first["by_probe"]
    again = running.client.get("/health").json()
    assert not again["by_probe"]
    assert again["lap_age_s"] < 2


def test_health_fails_when_the_ring_does_not_turn() -> None:
    engine = ScriptedEngine(endless)
    engine.hold()
    limits = Limits(probe_s_max=0.2)
    with running_bridge(engine, PieceTokenizer(), limits=limits) as running:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: running.client.get("/health"), range(4)))
        for answer in answers:
            is_error(answer, 503, "no_lap")
        assert len(engine.submitted) == 1, "one probe serves all who ask"
        engine.run()
        assert running.client.get("/health").json()["status"] == "ok"


def test_slots_count_admitted_requests_only(held: tuple[Running, ScriptedEngine]) -> None:
    running, _ = held
    assert [s["is_processing"] for s in running.client.get("/slots").json()] == [False, False]
    streams = [start_stream(running) for _ in range(3)]
    slots = running.client.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1]
    assert all(slot["is_processing"] for slot in slots)
    ring = running.client.get("/api/ring").json()
    assert (ring["counts"]["running"], ring["counts"]["waiting"]) == (2, 1)
    for stream in streams:
        stream.close()


def test_the_key_protects_every_path_but_health() -> None:
    engine = ScriptedEngine(lambda _: [97])
    with running_bridge(engine, PieceTokenizer(), api_key="schlüssel") as running:
        get = running.client.get
        assert get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/slots", "/api/ring", "/nothing"):
            is_error(get(path), 401, "invalid_api_key")
            for wrong in ("", "Bearer", "Bearer wrong", "Basic x", "Bearer schl", "Bearer ü"):
                headers = {b"authorization": wrong.encode()}
                is_error(get(path, headers=headers), 401, "invalid_api_key")
        is_error(running.client.post("/v1/completions", json=LONG), 401, "invalid_api_key")
        right = {b"authorization": b"Bearer " + "schlüssel".encode()}
        assert get("/v1/models", headers=right).status_code == 200
        assert not engine.submitted or engine.submitted[0].output_tokens_max == 1


def test_pages_of_other_sites_are_refused_without_a_key(small: Running) -> None:
    get = small.client.get
    is_error(get("/v1/models", headers={"host": "evil.example"}), 403, "host_not_allowed")
    is_error(get("/v1/models", headers={"host": "a b"}), 403, "host_not_allowed")
    evil = {"origin": "http://evil.example"}
    is_error(get("/v1/models", headers=evil), 403, "origin_not_allowed")
    own = {"origin": small.url}
    assert get("/v1/models", headers=own).status_code == 200
    assert get("/v1/models", headers={"host": "localhost:8000"}).status_code == 200


def test_a_body_over_the_limit_is_refused_by_its_stated_length(small: Running) -> None:
    body = b'{"prompt": "' + b"x" * 50_000 + b'"}'
    response = small.client.post("/v1/completions", content=body, headers=JSON)
    is_error(response, 413, "body_too_large")
    assert "20000" in response.json()["error"]["message"]
    assert small.client.get("/v1/models").status_code == 200


def test_a_chunked_body_over_the_limit_is_refused_while_it_is_read(small: Running) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1000
            yield b"x" * 1000

    response = small.client.post("/v1/completions", content=chunks(), headers=JSON)
    is_error(response, 413, "body_too_large")
    assert small.client.get("/v1/models").status_code == 200


def test_an_endless_body_is_cut_off(small: Running) -> None:
    with closing(connect(small)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            sock.sendall(chunk * 200_000)  # 200 MB; `sendall` raises when the server cuts.


def test_a_body_that_does_not_come_is_given_up(small: Running) -> None:
    with closing(connect(small)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        got = read_all(sock)
        assert got.startswith(b"HTTP/1.1 408"), got
        assert b"body_timeout" in got


@pytest.mark.parametrize("start", [b"", b"GET /v1/mo", b"GET / HTTP/1.1\r\nhost: x\r\na: "])
def test_headers_that_do_not_come_are_given_up(small: Running, start: bytes) -> None:
    with closing(connect(small)) as sock:
        sock.sendall(start)
        got = read_all(sock)
    if start:
        assert got.startswith(b"HTTP/1.1 408"), got
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "header_timeout"
    else:
        assert got == b""


def test_headers_sent_a_byte_at_a_time_hold_the_connection_no_longer(small: Running) -> None:
    with closing(connect(small)) as sock:
        started = time.monotonic()
        got = b""
        sock.sendall(b"GET / HTTP/1.1\r\nx: ")
        while not got and time.monotonic() - started < 10:
            sock.sendall(b"a")
            if select.select([sock], [], [], 0.02)[0]:
                got = read_all(sock)
        assert got.startswith(b"HTTP/1.1 408"), got


def test_headers_over_the_limit_are_refused(small: Running) -> None:
    with closing(connect(small)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 9000)
        got = read_all(sock)
    assert got.startswith(b"HTTP/1.1 400"), got
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("place", ["header", "path"])
def test_headers_over_the_limit_that_come_whole_are_refused_too(small: Running, place: str) -> None:
    long = "y" * 9000
    path = f"/v1/models?{long}" if place == "path" else "/v1/models"
    response = small.client.get(path, headers={"x": long} if place == "header" else {})
    is_error(response, 400, "invalid_http")
    assert small.client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n"
            b"content-length: 6\r\n\r\nabcdef"
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\nzz\r\n"
        ),
    ],
)
def test_what_is_not_http_gets_an_error_and_a_closed_connection(
    small: Running, garbage: bytes
) -> None:
    with closing(connect(small)) as sock:
        sock.sendall(garbage)
        got = read_all(sock)
    assert got.startswith(b"HTTP/1.1 400"), got
    assert b'"error"' in got
    assert small.client.get("/v1/models").status_code == 200


def test_a_client_that_does_not_read_is_dropped() -> None:
    """Its stream is larger than all buffers on the way, so the server's writes stall."""
    big = "z" * 1_000_000
    tokenizer = PieceTokenizer([big])
    engine = ScriptedEngine(lambda _: tokenizer.piece_ids * 40)
    limits = Limits(write_s_max=0.5)
    with running_bridge(engine, tokenizer, limits=limits) as running:
        stream = start_stream(running)
        wait_for(lambda: running.bridge.live == 0, "the end of the generation")
        wait_for(lambda: not running.connections, "the drop of the connection")
        stream.close()


def test_too_many_connections_are_turned_away_and_the_rest_served() -> None:
    engine = ScriptedEngine(lambda _: [97])
    limits = Limits(connections_max=50)
    with running_bridge(engine, PieceTokenizer(), limits=limits) as running:
        crowd = [connect(running) for _ in range(60)]
        try:
            wait_for(lambda: len(select.select(crowd, [], [], 0)[0]) >= 10, "the refusals")
            refused = select.select(crowd, [], [], 0)[0]
            assert len(refused) == 10
            assert all(b"503" in read_all(sock) for sock in refused)
        finally:
            for sock in crowd:
                sock.close()
        wait_for(lambda: not running.connections, "the end of the crowd")
        assert running.client.get("/v1/models").status_code == 200


def test_a_thousand_clients_at_once_are_all_answered() -> None:
    engine = ScriptedEngine(lambda _: [97] * 3, plan=small_plan(running_max=64))
    limits = Limits(waiting_max=100)
    body = json.dumps({"prompt": "x", "max_tokens": 5}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )
    with running_bridge(engine, PieceTokenizer(), limits=limits) as running:
        crowd = [connect(running) for _ in range(1000)]
        for sock in crowd:
            sock.sendall(request)
        statuses: dict[bytes, int] = {}
        for sock in crowd:
            got = read_all(sock)
            status = got[9:12]
            statuses[status] = statuses.get(status, 0) + 1
            sock.close()
        assert set(statuses) <= {b"200", b"429"}, statuses
        assert sum(statuses.values()) == 1000
        assert statuses[b"200"] >= 164
        wait_for(lambda: running.bridge.live == 0, "the end")


def test_a_crash_in_a_route_is_a_500_of_the_one_form(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("kvasir_rt.bridge.app._model_card", crash)
    response = small.client.get("/v1/models", headers={"x-request-id": "seen-7"})
    is_error(response, 500, "internal")
    assert "seen-7" in response.json()["error"]["message"]
    assert "bug" not in response.text
    assert response.headers["x-request-id"] == "seen-7"
