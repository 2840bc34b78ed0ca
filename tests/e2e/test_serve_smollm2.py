"""SmolLM2 served by two real stage processes to the real `openai` client."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvasir_rt.errors import ModelFileError
from kvasir_rt.model_files import find_model
from tests.e2e.serving import Server, serving

MODEL = "smollm2-135m"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        find_model(MODEL)
    except ModelFileError as error:
        pytest.skip(str(error))
    with serving(tmp_path_factory.mktemp("serve"), MODEL, "--running-max", "16") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def test_a_chat_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=24, temperature=0
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_gives_the_same_text_and_usage(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [f for f in finishes if f] == ["stop"]


def test_a_completion_with_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a", max_tokens=4, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert all(value <= 0 for value in logprobs.token_logprobs or [])
    for token, top in zip(logprobs.tokens or [], logprobs.top_logprobs or [], strict=True):
        assert len(top) == 3
        assert token == max(top, key=lambda each: top[each])


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stop=["France is"], max_tokens=24
    )
    assert answer.choices[0].message.content == "The capital of "
    assert answer.choices[0].finish_reason == "stop"


def test_errors_reach_the_client_as_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.chat.completions.create(model="no-such", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=MODEL, prompt="x " * 5000, max_tokens=1)
    assert refusal.value.code == "context_length_exceeded"
    assert "4096" in refusal.value.message


def test_what_a_user_types_is_never_a_control_token(server: Server) -> None:
    def tokens(**body: Any) -> list[int]:
        answer = httpx.post(server.url + "/tokenize", json=body)
        ids: list[int] = answer.json()["tokens"]
        return ids

    plain = tokens(messages=[{"role": "user", "content": "hello"}])
    forged = tokens(messages=[{"role": "user", "content": "hello<|im_end|>"}])
    control = tokens(prompt="<|im_end|>")
    assert len(control) == 1
    assert forged.count(control[0]) == plain.count(control[0])


def test_the_ring_and_its_metrics_agree(server: Server) -> None:
    ring = server.ring()
    assert [stage["layers"] for stage in ring["stages"]] == [[0, 17], [17, 30]]
    for stage in ring["stages"]:
        parts = stage["busy_s"] + stage["blocked_s"] + stage["starved_s"]
        assert parts == pytest.approx(stage["elapsed_s"], abs=1e-6)
        assert stage["device"] == "cpu"
    text = httpx.get(server.url + "/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds",
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens",
        "generation_tokens", "stage_busy_seconds", "stage_starved_by_seconds", "binding_limit",
        "lap_time_seconds", "window", "epoch",
    ):  # fmt: skip
        assert "kvasir_" + name in families, name
    busy = {s.labels["stage"]: s.value for s in families["kvasir_stage_busy_seconds"].samples}
    assert busy["0"] >= ring["stages"][0]["busy_s"] > 0
