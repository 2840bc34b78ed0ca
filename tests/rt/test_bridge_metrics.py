"""`/metrics` in a hostile world (case O3), what its figures mean, and the log lines."""

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvasir_rt import logs
from kvasir_rt.submission import Submission
from tests.rt.bridge_thread import Running, running_bridge, wait_for
from tests.rt.scripted_engine import PieceTokenizer, ScriptedEngine, small_plan

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def three(_: Submission) -> list[int]:
    return [97, 98, 99]


@pytest.fixture
def running() -> Iterator[Running]:
    with running_bridge(ScriptedEngine(three), PieceTokenizer()) as it:
        yield it


def scrape(running: Running) -> tuple[str, Series]:
    response = running.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    series = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    return response.text, series


def value(series: Series, name: str, **labels: str) -> float:
    return series[f"kvasir_{name}", tuple(sorted(labels.items()))]


def test_o3_bogus_names_and_paths_make_no_series_of_their_own(running: Running) -> None:
    running.client.post("/v1/completions", json={"prompt": "x"})
    _, before = scrape(running)
    for number in range(1000):
        running.client.post("/v1/completions", json={"prompt": "x", "model": f"bogus-{number}"})
    for number in range(200):
        running.client.get(f"/bogus/{number}")
    for number in range(50):
        running.client.get("/v1/models/" + f"bogus{number}" * 1000)
        name = f'bogus"\n\\{number}' * 1000
        running.client.post("/v1/completions", json={"prompt": "x", "model": name})
        running.client.request(f"BOGUS{number}", "/v1/models")
    text, after = scrape(running)
    assert len(after) - len(before) <= 20
    assert "bogus" not in text.lower()
    assert value(after, "http_requests_total", route="other", method="GET", status="404") == 200
    assert len(text) < 100_000
    started = time.thread_time()
    scrape(running)
    assert time.thread_time() - started < 0.1


def test_o3_stage_counters_have_one_series_per_stage_and_only_rise(running: Running) -> None:
    _, before = scrape(running)
    running.client.post("/v1/completions", json={"prompt": "x"})
    _, after = scrape(running)
    for name in ("busy", "blocked", "starved"):
        for scraped in (before, after):
            stages = [
                labels for key, labels in scraped if key == f"kvasir_stage_{name}_seconds_total"
            ]
            assert stages == [(("stage", "0"),), (("stage", "1"),)]
    for key, old in before.items():
        if key[0].endswith(("_total", "_count", "_bucket", "_sum")):
            assert after[key] >= old, key
    assert value(after, "stage_starved_seconds_total", stage="0") > value(
        before, "stage_starved_seconds_total", stage="0"
    )


def test_requests_and_tokens_are_counted(running: Running) -> None:
    assert running.client.get("/health").status_code == 200  # Its probe is not counted.
    running.client.post("/v1/completions", json={"prompt": "12345", "n": 2})
    running.client.post("/v1/completions", json={"prompt": "1", "max_tokens": 1})
    _, series = scrape(running)
    assert value(series, "prompt_tokens_total") == 6
    assert value(series, "generation_tokens_total") == 4 + 4 + 1
    assert value(series, "time_to_first_token_seconds_count") == 3
    assert value(series, "inter_token_latency_seconds_count") == 6
    assert value(series, "e2e_request_latency_seconds_count") == 3
    assert value(series, "request_success_total", finished_reason="stop") == 2
    assert value(series, "request_success_total", finished_reason="length") == 1
    assert value(series, "request_queue_time_seconds_count") == 4  # The ring's own, probe too.
    assert value(series, "num_requests_running") == 0
    assert value(series, "ring_up") == 1


def test_waiting_and_running_are_told_apart_and_kv_is_in_use() -> None:
    engine = ScriptedEngine(three, plan=small_plan(running_max=1))
    engine.hold()
    with running_bridge(engine, PieceTokenizer()) as running:
        with running.client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "n": 3, "stream": True}
        ):
            _, series = scrape(running)
            assert value(series, "num_requests_running") == 1
            assert value(series, "num_requests_waiting") == 2
            assert value(series, "kv_cache_usage_perc") > 0
        wait_for(lambda: running.bridge.live == 0, "the end")


def test_log_lines_are_json_with_the_request_id_and_cannot_be_forged(running: Running) -> None:
    stream = io.StringIO()
    logger = logs.configure(form="json", stream=stream)
    try:
        running.client.post(
            "/v1/completions",
            json={"prompt": "x", "user": 'a\n{"event": "forged"}'},
            headers={"x-request-id": "mine-3"},
        )
        running.client.get('/a%0A{"event":"forged"}')
        wait_for(lambda: stream.getvalue().count("\n") >= 2, "two lines")
    finally:
        logger.handlers.clear()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    first = next(line for line in lines if line.get("request_id") == "mine-3")
    assert first["event"] == "request answered"
    assert (first["status"], first["prompt_tokens"], first["output_tokens"]) == (200, 1, 4)
    assert first["finish"] == "stop"
    assert not any(line["event"] == "forged" for line in lines)


def test_text_lines_quote_what_could_be_mistaken() -> None:
    stream = io.StringIO()
    logger = logs.configure(form="text", stream=stream)
    try:
        logs.log_event(logger, "ended", path="/a b", tokens=3, name="x\ny", level=logging.WARNING)
    finally:
        logger.handlers.clear()
    assert stream.getvalue().rstrip("\n").partition(" ")[2] == (
        'warning ended path="/a b" tokens=3 name="x\\ny"'
    )
