"""The bridge's live page over HTTP: who may see what, how many, and that streams end in order."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from kvasir_core.causes import Cause
from kvasir_core.microbatch import BindingLimit
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_rt.bridge.live_feed import LISTENERS_MAX
from kvasir_rt.bridge.live_page import RING_FILES
from kvasir_rt.bridge.live_view import SPAN_NS, LiveView, _queue
from kvasir_rt.laps import StageTimes
from kvasir_rt.snapshot import RingSnapshot
from tests.rt.bridge_thread import Running, running_bridge, wait_for
from tests.rt.scripted_engine import PieceTokenizer, ScriptedEngine

LIVE = "/api/live"


@pytest.fixture
def running() -> Iterator[Running]:
    with running_bridge(ScriptedEngine(lambda _: [97] * 5), PieceTokenizer()) as it:
        yield it


def messages(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def test_the_page_and_its_files_come_under_a_strict_policy(running: Running) -> None:
    for path in RING_FILES:
        answer = running.client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    page = running.client.get("/").text
    assert "http" not in page.replace("http-equiv", "")  # Nothing from elsewhere.
    assert "<script>" not in page
    assert " style=" not in page


def test_a_message_is_the_ring_view_and_what_the_last_seconds_were_like(running: Running) -> None:
    running.client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3})
    with running.client.stream("GET", LIVE) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = messages(response)
        first, second = next(stream), next(stream)
    ring = running.client.get("/api/ring").json()
    assert first["live"] is None
    assert set(second) == {*ring, "live"}
    for name in ("model", "plan", "counts", "kv", "window", "micro_batches"):
        assert second[name] == ring[name]
    assert second["live"]["span_s"] == pytest.approx(1.0, rel=0.5)
    assert second["live"]["verdict"]["kind"] == "idle"
    assert second["elapsed_s"] > first["elapsed_s"]


def test_the_feed_needs_the_key_and_the_page_does_not() -> None:
    engine = ScriptedEngine(lambda _: [97])
    with running_bridge(engine, PieceTokenizer(), api_key="secret") as running:
        assert running.client.get("/").status_code == 200
        assert "secret" not in running.client.get("/live.js").text
        refused = running.client.get(LIVE)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        headers = {"Authorization": "Bearer secret"}
        with running.client.stream("GET", LIVE, headers=headers) as response:
            assert next(messages(response))["model"] == "scripted"


def test_a_page_of_another_site_cannot_listen(running: Running) -> None:
    evil = {"origin": "http://evil.example"}
    assert running.client.get(LIVE, headers=evil).status_code == 403
    assert running.client.get(LIVE, headers={"host": "evil.example"}).status_code == 403


def test_while_the_model_is_loaded_the_page_is_there_and_the_feed_says_loading() -> None:
    engine = ScriptedEngine(lambda _: [97])
    with running_bridge(engine, PieceTokenizer(), is_loaded=False) as running:
        assert running.client.get("/").status_code == 200
        answer = running.client.get(LIVE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")


def test_listeners_are_bounded_and_one_who_leaves_makes_room(running: Running) -> None:
    feed = running.bridge._live
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=running.url, timeout=20))
        streams = [stack.enter_context(client.stream("GET", LIVE)) for _ in range(LISTENERS_MAX)]
        wait_for(lambda: feed.listeners == LISTENERS_MAX, "all listeners")
        refused = running.client.get(LIVE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "listeners_full")
        assert int(refused.headers["retry-after"]) > 0
        assert all(next(messages(stream))["model"] == "scripted" for stream in streams)
        streams[0].close()
        wait_for(lambda: feed.listeners < LISTENERS_MAX, "a place")
        with running.client.stream("GET", LIVE) as response:
            assert next(messages(response))["model"] == "scripted"
    wait_for(lambda: feed.listeners == 0, "nobody")
    wait_for(lambda: feed._maker is None, "nothing is made for nobody")


def test_a_stopping_server_ends_its_streams_at_once() -> None:
    ended = threading.Event()
    with running_bridge(ScriptedEngine(lambda _: [97]), PieceTokenizer()) as running:

        def listen() -> None:
            with httpx.stream("GET", running.url + LIVE, timeout=20) as response:
                for _ in messages(response):
                    pass
            ended.set()

        thread = threading.Thread(target=listen)
        thread.start()
        wait_for(lambda: running.bridge._live.listeners == 1, "the listener")
    assert ended.wait(3)
    thread.join(5)


# ---------------------------------------------------------------------- the view by itself


def snapshot_at(
    engine: ScriptedEngine, second: float, *, busy: float, laps: int, tokens: int
) -> RingSnapshot:
    """A snapshot of a ring that was busy for a share of the time and let nobody wait."""
    from dataclasses import replace

    now = round(second * NANOS_PER_SECOND)
    base = engine.snapshot()
    starved = dict.fromkeys(Cause, 0) | {Cause.UPSTREAM: now - round(busy * now)}
    times = StageTimes(now, round(busy * now), 0, 0, starved, laps, 4 * laps)
    return replace(
        base,
        now_ns=now,
        stages=tuple(replace(stage, times=times) for stage in base.stages),
        binding_limits={BindingLimit.ROW_WIDTH: laps},
        laps=laps,
        spans=2 * laps,
        tokens=tokens,
    )


def test_the_verdict_is_about_the_last_seconds_and_rates_are_differences() -> None:
    engine = ScriptedEngine(lambda _: [97])
    try:
        view = LiveView("m")
        shown: dict[str, Any] = {}
        for second in range(30):
            found = snapshot_at(engine, second, busy=0.9, laps=10 * second, tokens=40 * second)
            shown = view.take(found)
        now = shown["live"]
        assert now["span_s"] == SPAN_NS / NANOS_PER_SECOND
        assert now["output_tokens_per_s"] == pytest.approx(40)
        assert now["micro_batches_per_s"] == pytest.approx(10)
        assert now["binding_limits"]["row_width"] == 100
        assert now["stages"][0]["busy"] == pytest.approx(0.9)
        assert now["stages"][0]["starved_by"]["upstream"] == pytest.approx(0.1)
        assert now["stages"][0]["rows_per_s"] == pytest.approx(40)
        assert now["verdict"]["kind"] == "saturated"
        assert "2.0 of 8 spans and 4.0 of 64 rows" in now["verdict"]["evidence"][0]
        again = view.take(snapshot_at(engine, 300, busy=0.9, laps=1, tokens=1))
        assert again["live"] is None  # Nobody looked for minutes: what was then is not now.
    finally:
        engine.close()


def test_a_queue_that_grows_is_told_from_one_that_stands() -> None:
    growing, standing = _queue(list(range(10)), 20), _queue([5] * 10, 20)
    assert growing.grown == pytest.approx(9)
    assert growing.later_mean > growing.earlier_mean
    assert standing.grown == pytest.approx(0)
    assert standing.occupied_share == 1
    assert _queue([3], 1).length_max == 3
