"""Bad requests: each is refused with the right status and form, and a valid one then succeeds."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir_rt.hub.limits import HubLimits
from tests.rt.hub.hubs import EXPERTS, MODEL, Coordinator, RunningHub, Worker, bearer, running_hub

LIMITS = HubLimits(
    http=replace(HubLimits().http, body_s_max=0.5, header_s_max=0.5),
    node_rate_per_s=1000.0,
    node_burst=10_000,
    stranger_burst=10_000,
    segments_max=100,
    coordinators_max=3,
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with (
        running_hub(tmp_path_factory.mktemp("hub"), limits=LIMITS) as running,
        Coordinator(busy=0) as coordinator,
    ):
        assert running.register(coordinator).status_code == 200
        yield running


@pytest.fixture(scope="module")
def worker(hub: RunningHub) -> Worker:
    return Worker(hub).login()


@pytest.fixture(scope="module")
def other(hub: RunningHub) -> Worker:
    worker = Worker(hub).login()
    worker.cover([1, 0, 8])
    return worker


@pytest.fixture(autouse=True)
def _still_sound(hub: RunningHub, worker: Worker) -> Iterator[None]:
    """After each hostile request: nothing has changed, and a valid request succeeds."""
    before = hub.on_loop(hub.service.control.hub.snapshot)
    yield
    after = hub.on_loop(hub.service.control.hub.snapshot)
    assert after._replace(claims=()) == before._replace(claims=())
    hub.on_loop(hub.service.control.hub.check_invariants)
    assert worker.cover([0, 0, 8])["ok"]
    assert worker.volunteer()["assigned"] in (True, False)


def refused(answer: httpx.Response, status: int, code: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "code"}
    assert all(isinstance(value, str) and value for value in body["error"].values())
    assert len(answer.text) < 1000
    if code is not None:
        assert body["error"]["code"] == code
    return str(body["error"]["message"])


GOOD_COVERAGE: dict[str, Any] = {"model": MODEL, "segments": [[0, 0, 8]]}
BAD_COVERAGE: dict[str, tuple[dict[str, Any], int]] = {
    "an inverted range": ({"segments": [[0, 8, 0]]}, 400),
    "an empty range": ({"segments": [[0, 4, 4]]}, 400),
    "a negative number": ({"segments": [[0, -1, 4]]}, 400),
    "a range past the experts": ({"segments": [[0, 0, EXPERTS + 1]]}, 400),
    "a huge number": ({"segments": [[0, 0, 2**64]]}, 400),
    "a number of 30 digits": ({"segments": [[0, 0, 10**30]]}, 400),
    "a layer that is not there": ({"segments": [[99, 0, 4]]}, 400),
    "the same range twice": ({"segments": [[0, 0, 8], [0, 0, 8]]}, 400),
    "ranges that overlap": ({"segments": [[0, 0, 8], [0, 4, 12]]}, 400),
    "a float": ({"segments": [[0, 0.5, 4]]}, 400),
    "a whole float": ({"segments": [[0, 0.0, 4]]}, 400),
    "a string for a number": ({"segments": [[0, "0", 4]]}, 400),
    "a truth value for a number": ({"segments": [[0, False, 4]]}, 400),
    "a range of four": ({"segments": [[0, 0, 4, 8]]}, 400),
    "null": ({"segments": None}, 400),
    "5,000 segments": ({"segments": [[0, 0, 1]] * 5000}, 400),
    "more segments than there is room for": (
        {"segments": [[layer, e, e + 1] for layer in range(4) for e in range(16)] + [[0, 0, 1]] * 60},
        503,
    ),
    "another's name": ({"worker": "0" * 32}, 403),
    "a name that is no fingerprint": ({"worker": "../../etc/passwd"}, 400),
    "an unknown model": ({"model": "nobody's"}, 404),
    "a model of 10 kB": ({"model": "m" * 10_000}, 400),
    "a model with a newline": ({"model": "m\nHTTP/1.1 200"}, 400),
    "a claim never granted": ({"claim": 2**30}, 403),
    "a claim of zero": ({"claim": 0}, 400),
    "a draining that is no truth value": ({"draining": "yes"}, 400),
    "a field nobody knows": ({"age_s": 5}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_COVERAGE)
def test_hostile_coverage(hub: RunningHub, worker: Worker, other: Worker, name: str) -> None:
    changes, status = BAD_COVERAGE[name]
    body = {**GOOD_COVERAGE, "worker": worker.node, **changes}
    refused(hub.post("/api/expert-coverage", worker.token, **body), status)


def test_coverage_of_another_worker(hub: RunningHub, worker: Worker, other: Worker) -> None:
    body = {**GOOD_COVERAGE, "worker": other.node}
    refused(hub.post("/api/expert-coverage", worker.token, **body), 403, "foreign")


BAD_VOLUNTEERS: dict[str, tuple[dict[str, Any], int]] = {
    "room for nothing": ({"max_experts": 0}, 400),
    "negative room": ({"max_experts": -1}, 400),
    "absurd room": ({"max_experts": 2**31}, 400),
    "no room at all": ({}, 400),
    "an unknown model": ({"max_experts": 1, "model": "nobody's"}, 404),
    "2,000 held slices": (
        {"max_experts": 1, "holds": [{"model": MODEL, "layer": 0, "experts": [0, 1]}] * 2000}, 400,
    ),
    "an inverted held slice": (
        {"max_experts": 1, "holds": [{"model": MODEL, "layer": 0, "experts": [4, 1]}]}, 400,
    ),
    "a held slice that is not there": (
        {"max_experts": 1, "holds": [{"model": MODEL, "layer": 0, "experts": [0, 99]}]}, 400,
    ),
    "its own address": ({"max_experts": 1, "url": "http://10.0.0.1/"}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_VOLUNTEERS)
def test_hostile_volunteers(hub: RunningHub, worker: Worker, name: str) -> None:
    body, status = BAD_VOLUNTEERS[name]
    refused(hub.post("/api/expert-volunteer", worker.token, **body), status)


BAD_BODIES: dict[str, tuple[bytes, int]] = {
    "no body": (b"", 400),
    "half of it": (b'{"max_experts": ', 400),
    "not UTF-8": (b'{"max_experts": "\xff\xfe"}', 400),
    "half a surrogate": (b'{"max_experts": 1, "model": "\\ud800"}', 400),
    "NaN": (b'{"max_experts": NaN}', 400),
    "infinity": (b'{"max_experts": 1e999}', 400),
    "a number of 5,000 digits": (b'{"max_experts": ' + b"9" * 5000 + b"}", 400),
    "100,000 nested lists": (b'{"holds": ' + b"[" * 100_000 + b"}", 400),
    "100,000 nested objects": (b'{"a":' * 100_000, 400),
    "20 levels": (b'{"holds": ' + b"[" * 20 + b"]" * 20 + b"}", 400),
    "80,000 keys": (b"{" + b",".join(b'"%d":1' % n for n in range(80_000)) + b"}", 400),
    "a list": (b"[1]", 400),
    "a number": (b"1", 400),
    "two values": (b"{}{}", 400),
    "more than 1 MiB": (b'{"model": "' + b"a" * (1 << 20) + b'"}', 413),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_hostile_bodies(hub: RunningHub, worker: Worker, name: str) -> None:
    body, status = BAD_BODIES[name]
    headers = {"Content-Type": "application/json", **bearer(worker.token)}
    refused(hub.client.post("/api/expert-volunteer", content=body, headers=headers), status)


def test_a_body_of_another_type(hub: RunningHub, worker: Worker) -> None:
    headers = {"Content-Type": "text/plain", **bearer(worker.token)}
    answer = hub.client.post("/api/expert-volunteer", content=b'{"max_experts":1}', headers=headers)
    refused(answer, 415)


TOKENS: dict[str, tuple[str, int]] = {
    "no token": ("", 401),
    "a wrong token": ("Bearer wrong", 401),
    "a token of 500 characters": ("Bearer " + "a" * 500, 401),
    "a token of 10 kB": ("Bearer " + "a" * 10_000, 401),
    "no bearer": ("Basic dXNlcjpwYXNz", 401),
    "a bearer of nothing": ("Bearer", 401),
    "a hostile character": ("Bearer \xff\xfe", 401),
}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("path", ["/api/expert-volunteer", "/api/coordinators"])
def test_foreign_tokens(hub: RunningHub, name: str, path: str) -> None:
    header, status = TOKENS[name]
    body = json.dumps({"max_experts": 1} if "volunteer" in path else _registration())
    headers = {"Content-Type": "application/json"}
    raw = [(k.encode(), v.encode()) for k, v in headers.items()]
    if header:
        raw.append((b"Authorization", header.encode("latin-1")))
    answer = hub.client.post(path, content=body, headers=httpx.Headers(raw))
    refused(answer, status, "unauthenticated")


def _registration(**changes: Any) -> dict[str, Any]:
    body = {"coordinator": "x", "model": MODEL, "layers": [0, 1, 2, 3], "experts": EXPERTS,
            "hidden_size": 64, "slots_url": "http://127.0.0.1:9"}  # fmt: skip
    return {**body, **changes}


def test_a_wrong_token_is_refused_where_none_is_needed(hub: RunningHub) -> None:
    refused(hub.get("/api/moe/recruitment", "wrong"), 401)


def test_a_node_does_not_act_as_a_service_nor_a_service_as_a_node(
    hub: RunningHub, worker: Worker
) -> None:
    refused(hub.post("/api/coordinators", worker.token, **_registration()), 403, "wrong_scope")
    refused(hub.get("/api/expert-dispatch-map", worker.token, model=MODEL), 403, "wrong_scope")
    rows = {"coordinator": "c", "rows": []}
    refused(hub.post("/api/expert-serving", worker.token, **rows), 403, "wrong_scope")
    refused(hub.post("/api/expert-volunteer", hub.token, max_experts=1), 403, "wrong_scope")


BAD_REGISTRATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "an address elsewhere": ({"slots_url": "http://10.0.0.1:8000"}, 403),
    "the cloud's metadata": ({"slots_url": "http://169.254.169.254:80"}, 403),
    "any address": ({"slots_url": "http://0.0.0.0:8000"}, 403),
    "a name": ({"slots_url": "http://metadata.internal:80"}, 403),
    "loopback by another name": ({"slots_url": "http://127.0.0.1.evil.example:80"}, 403),
    "a file": ({"slots_url": "file:///etc/passwd"}, 400),
    "a path": ({"slots_url": "http://127.0.0.1:9/shutdown"}, 400),
    "a query": ({"slots_url": "http://127.0.0.1:9?x=1"}, 400),
    "a user": ({"slots_url": "http://127.0.0.1:9@10.0.0.1:80"}, 400),
    "a port too far": ({"slots_url": "http://127.0.0.1:99999"}, 400),
    "no port": ({"slots_url": "http://127.0.0.1:"}, 400),
    "no address": ({"slots_url": ""}, 400),
    "a line break": ({"slots_url": "http://127.0.0.1:9\r\nX: y"}, 400),
    "a broken bracket": ({"slots_url": "http://[::1:9"}, 400),
    "no layers": ({"layers": []}, 400),
    "layers that descend": ({"layers": [3, 2, 1, 0]}, 409),
    "other numbers": ({"experts": 8}, 409),
    "a model without a file": ({"model": "unheard-of"}, 404),
    "a file that is none": ({"model": "x", "model_file": "/etc/hostname"}, 400),
    "a file that is not there": ({"model": "x", "model_file": "/nowhere.gguf"}, 400),
    "a relative file": ({"model": "x", "model_file": "tiny.gguf"}, 400),
    "a file with a zero byte": ({"model": "x", "model_file": "/tmp/\0"}, 400),
    "a known model from elsewhere": ({"model_file": "/tmp/\0"}, 409),
    "a device": ({"model": "x", "model_file": "/dev/zero"}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_REGISTRATIONS)
def test_hostile_registrations(hub: RunningHub, name: str) -> None:
    changes, status = BAD_REGISTRATIONS[name]
    refused(hub.post("/api/coordinators", hub.token, **_registration(**changes)), status)
    assert list(hub.service.control.targets) == ["c"]


def test_a_coordinator_too_many(hub: RunningHub) -> None:
    for name in ("d", "e"):
        answer = hub.post("/api/coordinators", hub.token, **_registration(coordinator=name))
        assert answer.status_code == 200
    refused(hub.post("/api/coordinators", hub.token, **_registration()), 503, "full")
    for name in ("d", "e"):
        hub.client.delete(f"/api/coordinators/{name}", headers=bearer(hub.token))


BAD_REPORTS: dict[str, tuple[dict[str, Any], int]] = {
    "of an unknown coordinator": ({"coordinator": "nobody"}, 404),
    "an unknown standing": ({"standing": "excellent"}, 400),
    "a negative time": ({"last_serve_ms": -1}, 400),
    "a time that is no number": ({"last_serve_ms": float(1)}, 400),
    "an inverted range": ({"experts": [4, 0]}, 400),
    "absurd pairs": ({"pairs": 2**40}, 400),
}


@pytest.mark.parametrize("name", BAD_REPORTS)
def test_hostile_reports(hub: RunningHub, worker: Worker, name: str) -> None:
    changes, status = BAD_REPORTS[name]
    row: dict[str, Any] = {"worker": worker.node, "layer": 0, "experts": [0, 8],
                           "standing": "proven", "last_serve_ms": 1, "pairs": 1}  # fmt: skip
    coordinator = changes.get("coordinator", "c")
    row.update({k: v for k, v in changes.items() if k != "coordinator"})
    refused(hub.post("/api/expert-serving", hub.token, coordinator=coordinator, rows=[row]), status)


BAD_SLICES: dict[str, tuple[str, int]] = {
    "past the experts": ("layer=0&begin=0&end=17", 400),
    "inverted": ("layer=0&begin=8&end=4", 400),
    "empty": ("layer=0&begin=4&end=4", 400),
    "negative": ("layer=0&begin=-1&end=4", 400),
    "a layer that is not there": ("layer=4&begin=0&end=4", 400),
    "a fraction": ("layer=0&begin=0.0&end=4", 400),
    "a plus": ("layer=0&begin=%2B0&end=4", 400),
    "other digits": ("layer=0&begin=0&end=%D9%A4", 400),
    "an underscore": ("layer=0&begin=0&end=1_0", 400),
    "a blank": ("layer=0&begin=0&end=%204", 400),
    "20 digits": ("layer=0&begin=0&end=10000000000000000004", 400),
    "one missing": ("layer=0&begin=0", 400),
    "one twice": ("layer=0&begin=0&end=4&end=8", 400),
    "one too many": ("layer=0&begin=0&end=4&path=/etc/passwd", 400),
    "3 kB": ("layer=0&begin=0&end=" + "4" * 3000, 400),
}


@pytest.mark.parametrize("name", BAD_SLICES)
def test_hostile_slices(hub: RunningHub, worker: Worker, name: str) -> None:
    query, status = BAD_SLICES[name]
    url = f"/api/models/{MODEL}/expert-shard?{query}"
    refused(hub.client.get(url, headers=bearer(worker.token)), status)
    assert hub.service.slices.downloads == 0


@pytest.mark.parametrize(
    "model", ["nobody", "..%2F..%2Fetc%2Fpasswd", "%00", "a" * 300, "tiny%0a", "%C3%A9"]
)
def test_slices_of_hostile_models(hub: RunningHub, worker: Worker, model: str) -> None:
    url = f"/api/models/{model}/expert-shard?layer=0&begin=0&end=4"
    answer = hub.client.get(url, headers=bearer(worker.token))
    refused(answer, 404 if model in ("nobody", "..%2F..%2Fetc%2Fpasswd", "tiny%0a") else 400)


def test_a_range_outside_a_slice(hub: RunningHub, worker: Worker) -> None:
    url = f"/api/models/{MODEL}/expert-shard?layer=0&begin=0&end=1"
    headers = {**bearer(worker.token), "Range": "bytes=99999999-"}
    answer = hub.client.get(url, headers=headers)
    refused(answer, 416, "invalid_range")
    assert answer.headers["content-range"].startswith("bytes */")


def test_paths_and_methods_that_are_not_there(hub: RunningHub) -> None:
    refused(hub.client.get("/api/nothing"), 404, "not_found")
    refused(hub.client.get("/api/../../etc/passwd"), 404)
    refused(hub.client.post("/api/expert-demand"), 405)
    refused(hub.client.put("/api/expert-coverage", json={}), 405)
    refused(hub.client.get("/api/swarm?verbose=1"), 400)
    refused(hub.client.get("/api/expert-demand?model="), 400)
    refused(hub.client.get("/api/expert-demand?model=nobody"), 404)
    refused(hub.client.get("/api/expert-relay"), 426, "upgrade_required")
    refused(hub.client.delete("/api/coordinators/nobody", headers=bearer(hub.token)), 404)


def test_a_web_page_of_another_site(hub: RunningHub) -> None:
    refused(hub.client.get("/api/swarm", headers={"Origin": "https://evil.example"}), 403)
    refused(hub.client.get("/api/swarm", headers={"Host": "evil.example"}), 403)


def test_what_is_said_twice_is_refused(hub: RunningHub, worker: Worker) -> None:
    token = bearer(worker.token)
    for body in (
        b'{"max_experts": 1, "max_experts": 2}',
        b'{"max_experts": 1, "holds": [{"a": 1, "a": 1}]}',
    ):
        headers = {**token, "Content-Type": "application/json"}
        answer = hub.client.post("/api/expert-volunteer", content=body, headers=headers)
        assert "twice" in refused(answer, 400, "invalid_json")
    twice = [*token.items(), ("Authorization", "Bearer other")]
    refused(hub.client.get("/api/swarm", headers=twice), 400)


def _socket(hub: RunningHub) -> socket.socket:
    host, port = hub.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def _read_all(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


def test_a_body_that_drips_is_cut_off(hub: RunningHub, worker: Worker) -> None:
    with _socket(hub) as connection:
        connection.sendall(
            b"POST /api/expert-volunteer HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        started = time.monotonic()
        assert b" 408 " in _read_all(connection)
        assert time.monotonic() - started < 8


def test_headers_that_drip_are_cut_off(hub: RunningHub) -> None:
    with _socket(hub) as connection:
        connection.sendall(b"GET /api/swarm HTTP/1.1\r\nHost: loc")
        assert b" 408 " in _read_all(connection)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET /" + b"a" * 100_000,
    ],
)
def test_what_is_no_http_is_refused(hub: RunningHub, raw: bytes) -> None:
    with _socket(hub) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(raw)
        answer = _read_all(connection)
    assert b" 400 " in answer or not answer


def test_a_websocket_without_a_relay_is_refused(hub: RunningHub) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with pytest.raises(InvalidStatus) as found:
        connect(hub.url.replace("http", "ws") + "/api/expert-relay").close()
    assert found.value.response.status_code == 403


def test_a_herd_of_identities_is_slowed_not_served_for_ever(tmp_path: Path) -> None:
    limits = HubLimits(node_rate_per_s=0.001, node_burst=3, stranger_rate_per_s=0.001,
                       stranger_burst=12)  # fmt: skip
    with running_hub(tmp_path, limits=limits) as hub:
        worker = Worker(hub).login()
        for _ in range(3):
            worker.cover([0, 0, 8])
        answer = hub.post("/api/expert-volunteer", worker.token, max_experts=1)
        refused(answer, 429, "too_often")
        assert int(answer.headers["retry-after"]) >= 1
        other = Worker(hub).login()  # Another node is not slowed...
        assert other.cover([0, 0, 8])["ok"]
        answers = [hub.get("/health").status_code for _ in range(12)]
        assert answers[-1] == 429  # ...but strangers from one address are.
        assert hub.get("/api/moe/recruitment", hub.token).status_code == 200
