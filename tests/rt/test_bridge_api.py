"""The API as clients use it: cases A1, A3 and A5 over HTTP, shapes, refusals, the error form."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvasir_core.microbatch import FinishReason
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.submission import Submission
from tests.rt.bridge_thread import MODEL, Running, running_bridge, wait_for
from tests.rt.scripted_engine import EOS, PieceTokenizer, ScriptedEngine

PIECES = ["alpha", " be", "ta ga", "mma!", " delta"]


def echo(submission: Submission) -> list[int]:
    """The prompt's letters again, each in upper case."""
    return [id_ - 32 if 97 <= id_ <= 122 else id_ for id_ in submission.prompt_ids]


@pytest.fixture
def echoing() -> Iterator[Running]:
    with running_bridge(ScriptedEngine(echo), PieceTokenizer()) as running:
        yield running


@pytest.fixture
def alpha() -> Iterator[Running]:
    tokenizer = PieceTokenizer(PIECES)
    engine = ScriptedEngine(lambda _: tokenizer.piece_ids)
    with running_bridge(engine, tokenizer) as running:
        yield running


def events(response: httpx.Response) -> list[Any]:
    """The stream's events; the last one must be [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def completion(running: Running, **body: Any) -> httpx.Response:
    return running.client.post("/v1/completions", json={"model": MODEL, **body})


def chat(running: Running, **body: Any) -> httpx.Response:
    body.setdefault("messages", [{"role": "user", "content": "hello"}])
    return running.client.post("/v1/chat/completions", json={"model": MODEL, **body})


def text_of(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["text"] for c in chunks if c["choices"])


def refused(response: httpx.Response, status: int, *words: str) -> None:
    """It is an error of the one form, and its message has these words."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code"}
    assert all(isinstance(value, str) and value for value in error.values())
    for word in words:
        assert word in error["message"], error


def test_a_completion_has_the_usual_shape_and_counts(echoing: Running) -> None:
    body = completion(echoing, prompt="abc", max_tokens=8, temperature=0).json()
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "ABC", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_length_ends_a_completion_with_exactly_that_many_tokens(echoing: Running) -> None:
    body = completion(echoing, prompt="abcdef", max_tokens=1).json()
    assert body["choices"][0]["text"] == "A"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


def test_the_four_forms_of_prompt(echoing: Running) -> None:
    for prompt, texts in (
        ("ab", ["AB"]),
        (["ab", "cd"], ["AB", "CD"]),
        ([97, 98], ["AB"]),
        ([[97], [98, 99]], ["A", "BC"]),
    ):
        body = completion(echoing, prompt=prompt).json()
        assert [c["text"] for c in body["choices"]] == texts
        assert [c["index"] for c in body["choices"]] == list(range(len(texts)))


def test_a1_usage_is_in_a_chunk_of_its_own_only_when_asked_for(echoing: Running) -> None:
    whole = chat(echoing, max_tokens=5, temperature=0).json()
    for options in (None, {}, {"include_usage": False}):
        body = {} if options is None else {"stream_options": options}
        chunks = events(chat(echoing, stream=True, max_tokens=5, temperature=0, **body))
        assert all(chunk["choices"] for chunk in chunks)
        assert all(chunk.get("usage") is None for chunk in chunks)
    chunks = events(
        chat(echoing, stream=True, max_tokens=5, stream_options={"include_usage": True})
    )
    assert [i for i, chunk in enumerate(chunks) if not chunk["choices"]] == [len(chunks) - 1]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"] == whole["usage"]
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    finishes = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert [f for f in finishes if f] == ["length"]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


def test_a1_stream_options_without_a_stream_are_refused(echoing: Running) -> None:
    refused(chat(echoing, stream=False, stream_options={"include_usage": True}), 400, "stream")


@pytest.mark.parametrize(
    ("stops", "text", "tokens", "finish"),
    [
        (["beta gamma"], "alpha ", 4, "stop"),
        (["betamax"], "alpha beta gamma! delta", 6, "stop"),
        (["a g", "beta"], "alpha ", 3, "stop"),
        ("gamma", "alpha beta ", 4, "stop"),
    ],
)
def test_a3_stop_strings_streamed_and_not(
    alpha: Running, stops: list[str] | str, text: str, tokens: int, finish: str
) -> None:
    body = completion(alpha, prompt="x", stop=stops).json()
    assert body["choices"][0]["text"] == text
    assert body["choices"][0]["finish_reason"] == finish
    assert body["usage"]["completion_tokens"] == tokens
    options = {"include_usage": True}
    chunks = events(completion(alpha, prompt="x", stop=stops, stream=True, stream_options=options))
    assert text_of(chunks) == text
    assert chunks[-1]["usage"] == body["usage"]
    assert chunks[-2]["choices"][0]["finish_reason"] == finish


def test_a3_text_is_sent_before_the_next_token_and_the_ring_is_left_at_the_match() -> None:
    tokenizer = PieceTokenizer(PIECES)
    engine = ScriptedEngine(lambda _: [*tokenizer.piece_ids, *[97] * 50])
    engine.hold()
    with running_bridge(engine, tokenizer) as running:
        body = {"prompt": "x", "stop": ["beta gamma"], "stream": True, "max_tokens": 99}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            seen = ""
            engine.let_laps(2)  # Two tokens; what they may say must come without a third.
            while len(seen) < len("alpha "):
                line = next(lines)
                if line:
                    seen += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            assert seen == "alpha "
            engine.let_laps(2)
            wait_for(lambda: bool(engine.cancelled), "the end on the stop string")
            assert engine.cancelled == [(engine.submitted[0].request_id, FinishReason.STOP)]
            assert engine.laps == 4
            engine.run()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert "delta" not in "".join(rest)
        wait_for(lambda: engine.ring.statistics().running == 0, "the release")
        assert engine.laps <= 5, "the request stayed for more than one more trip"
        wait_for(lambda: running.bridge.live == 0, "the end")


def test_a3_too_many_stop_strings_or_an_empty_one_are_refused(alpha: Running) -> None:
    refused(completion(alpha, prompt="x", stop=["a", "b", "c", "d", "e"]), 400, "5", "4")
    refused(completion(alpha, prompt="x", stop=["a", ""]), 400, "0 characters")
    refused(completion(alpha, prompt="x", stop=""), 400, "0 characters")


def test_characters_split_over_tokens_come_out_whole() -> None:
    emoji = "🦉é".encode()
    tokenizer = PieceTokenizer()
    engine = ScriptedEngine(lambda _: [*emoji, *emoji[:2]])
    with running_bridge(engine, tokenizer) as running:
        body = completion(running, prompt="x").json()
        assert body["choices"][0]["text"] == "🦉é\ufffd"
        chunks = events(completion(running, prompt="x", stream=True))
        assert [c["choices"][0]["text"] for c in chunks] == ["🦉", "é", "\ufffd", ""]


def test_a_stop_string_may_hold_characters_split_over_tokens() -> None:
    tokenizer = PieceTokenizer()
    engine = ScriptedEngine(lambda _: list("ab🦉c".encode()))
    with running_bridge(engine, tokenizer) as running:
        body = completion(running, prompt="x", stop="b🦉").json()
        assert body["choices"][0]["text"] == "a"
        assert body["usage"]["completion_tokens"] == 6


def test_a5_odd_requests_get_an_answer_and_disturb_nobody() -> None:
    tokenizer = PieceTokenizer()
    long = list(b"a long answer " * 20)
    engine = ScriptedEngine(lambda s: long if s.output_tokens_max == len(long) else echo(s))
    engine.hold()
    with running_bridge(engine, tokenizer) as running:
        body = {"prompt": "x", "max_tokens": len(long), "stream": True}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            for status, odd in ODD_COMPLETIONS:
                if status == 200:
                    continue  # Below, when laps turn again.
                refused(completion(running, **odd), status)
            for odd in ODD_CHATS:
                refused(chat(running, **odd), 400)
            engine.run()
            for status, odd in ODD_COMPLETIONS:
                if status == 200:
                    assert completion(running, **odd).json()["usage"]["completion_tokens"] == 1
            assert chat(running, messages=[{"role": "user", "content": ""}]).status_code == 200
            lines = [line for line in response.iter_lines() if line]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert text_of(chunks) == bytes(long).decode()


ODD_COMPLETIONS: list[tuple[int, dict[str, Any]]] = [
    (400, {"prompt": ""}),
    (400, {"prompt": [""]}),
    (400, {"prompt": []}),
    (400, {"prompt": [[]]}),
    (400, {"prompt": ["a", 1]}),
    (400, {"prompt": {"a": 1}}),
    (400, {"prompt": None}),
    (400, {"prompt": [True]}),
    (400, {"prompt": [1.5]}),
    (400, {"prompt": [-1]}),
    (400, {"prompt": [10**9]}),
    (400, {"prompt": [10**30]}),
    (400, {"prompt": "x", "max_tokens": 0}),
    (400, {"prompt": "x", "max_tokens": -1}),
    (200, {"prompt": "x", "max_tokens": 1}),
    (400, {"prompt": "x", "max_tokens": 10**9}),
    (400, {"prompt": "x", "temperature": -1}),
    (400, {"prompt": "x", "temperature": "hot"}),
    (400, {"prompt": "x", "n": 0}),
    (400, {"prompt": "x", "n": 10_000}),
    (400, {"prompt": "x", "stream": "yes"}),
    (400, {"prompt": "x", "logit_bias": {"x": 1}}),
    (400, {"prompt": "x", "logit_bias": {"999999": 1}}),
    (400, {"prompt": "x", "logit_bias": {"9" * 5000: 1}}),
    (400, {"prompt": "x", "logit_bias": {"7": 1, "07": 2}}),
    (400, {"prompt": "x", "echo": True}),
    (400, {"prompt": "x", "nonsense": None}),
    (404, {"prompt": "x", "model": "other"}),
]
ODD_CHATS: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "json_object"}},
    {"max_tokens": 3, "max_completion_tokens": 4},
    {"top_logprobs": 3},
]


def test_an_empty_prompt_is_one_token_where_the_model_adds_a_beginning() -> None:
    tokenizer = PieceTokenizer(["<s>"], bos=EOS + 1)
    with running_bridge(ScriptedEngine(lambda _: [97]), tokenizer) as running:
        assert completion(running, prompt="").json()["usage"]["prompt_tokens"] == 1
        assert completion(running, prompt=[""]).json()["usage"]["prompt_tokens"] == 1


def test_neutral_values_of_unsupported_fields_are_accepted(echoing: Running) -> None:
    neutral: dict[str, Any] = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "someone",
        "n": None,
        "logit_bias": None,
        "stop": None,
        "metadata": None,
        "store": False,
        "stream_options": None,
    }
    assert chat(echoing, **neutral).status_code == 200


def test_a_message_may_be_a_list_of_text_parts(echoing: Running) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    body = chat(echoing, messages=[{"role": "user", "content": parts}]).json()
    assert body["choices"][0]["message"]["content"] == "<USER>ABC\n"


def test_log_probabilities_of_completions(echoing: Running) -> None:
    choice = completion(echoing, prompt="ab", logprobs=1).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["A", "B"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"A": -0.5}, {"B": -0.5}],
        "text_offset": [0, 1],
    }


def test_log_probabilities_of_chats_streamed_and_not(echoing: Running) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    whole = chat(echoing, **asked).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in whole] == ["<", "U", "S"]
    assert whole[0]["bytes"] == [60]
    assert [entry["token"] for entry in whole[0]["top_logprobs"]] == ["<", "="]
    chunks = events(chat(echoing, stream=True, **asked))
    streamed = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == whole


def test_tokens_of_a_stop_string_have_no_log_probabilities(alpha: Running) -> None:
    choice = completion(alpha, prompt="x", stop=["beta"], logprobs=0).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["alpha", " be"]
    assert choice["logprobs"]["top_logprobs"] == [{}, {}]


def test_streamed_choices_each_have_their_index_and_one_finish_reason(echoing: Running) -> None:
    chunks = events(chat(echoing, n=3, stream=True))
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert "".join(c["delta"].get("content", "") for c in mine) == "<USER>HELLO\n"


def test_choices_have_seeds_of_their_own_and_the_prompt_is_counted_once() -> None:
    engine = ScriptedEngine(echo)
    with running_bridge(engine, PieceTokenizer()) as running:
        body = completion(running, prompt="ab", n=3, seed=7).json()
        assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}
        completion(running, prompt="ab", n=3, seed=7)
        completion(running, prompt="ab", seed=7)
        seeds = [s.sampling.seed for s in engine.submitted]
        assert len(set(seeds[:3])) == 3
        assert seeds[:3] == seeds[3:6]
        assert seeds[6] == seeds[0]
        completion(running, prompt="ab")
        completion(running, prompt="ab")
        assert engine.submitted[-1].sampling.seed != engine.submitted[-2].sampling.seed


def test_ignore_eos_sends_no_stop_tokens_to_the_ring() -> None:
    engine = ScriptedEngine(lambda _: [97, EOS, 98])
    with running_bridge(engine, PieceTokenizer()) as running:
        body = completion(running, prompt="x", ignore_eos=True, max_tokens=3).json()
        assert body["choices"][0]["text"] == "ab"
        assert body["choices"][0]["finish_reason"] == "length"


def test_a_request_over_the_context_is_refused_with_both_numbers(echoing: Running) -> None:
    response = completion(echoing, prompt="a" * 600)
    refused(response, 400, "512", "600")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    refused(completion(echoing, prompt="a" * 500, max_tokens=100), 400, "512", "500", "600")
    assert completion(echoing, prompt="a" * 511).json()["usage"]["completion_tokens"] == 1


def test_models_are_listed_and_found_by_name(echoing: Running) -> None:
    listed = echoing.client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == [MODEL]
    assert echoing.client.get(f"/v1/models/{MODEL}").json() == listed["data"][0]
    refused(echoing.client.get("/v1/models/no/such"), 404, "no/such")


def test_tokenize_shows_the_ids_that_a_request_would_have(echoing: Running) -> None:
    post = echoing.client.post
    assert post("/tokenize", json={"prompt": "ab"}).json()["tokens"] == [97, 98]
    messages = [{"role": "user", "content": "a"}]
    assert post("/tokenize", json={"messages": messages}).json()["count"] == len("<user>a\n")
    refused(post("/tokenize", json={}), 400, "prompt or messages")


def test_unknown_paths_and_methods_are_refused_in_the_one_form(echoing: Running) -> None:
    refused(echoing.client.get("/nothing/here"), 404)
    refused(echoing.client.get("/v1/models/"), 404)
    refused(echoing.client.post("/v1/completions/", json={}), 404)
    response = echoing.client.get("/v1/completions")
    refused(response, 405, "GET", "POST")
    assert response.headers["allow"] == "POST"
    refused(echoing.client.request("BREW", "/v1/models"), 405)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"prompt": "\xff"}', "JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "range"),
        (b'{"prompt": "x", "temperature": -Infinity}', "JSON"),
        (b"[1, 2]", "object"),
        (b'"text"', "object"),
        (b"[" * 200_000, "deeply"),
        (b'{"prompt":' * 100_000, "deeply"),
        (b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", "range"),
        (b'{"prompt": "\\ud800"}', "JSON"),
    ],
)
def test_bodies_that_are_not_sound_json_are_refused(
    echoing: Running, body: bytes, word: str
) -> None:
    headers = {"content-type": "application/json"}
    refused(echoing.client.post("/v1/completions", content=body, headers=headers), 400, word)


def test_another_content_type_is_refused(echoing: Running) -> None:
    response = echoing.client.post("/v1/completions", data={"prompt": "x"})
    refused(response, 415, "application/json")


def test_every_answer_carries_its_request_id(echoing: Running) -> None:
    given = echoing.client.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    bad = echoing.client.get("/nothing", headers={"x-request-id": "not ok!"})
    assert bad.headers["x-request-id"].startswith("req-")


def test_before_the_model_is_loaded_every_answer_says_so() -> None:
    engine = ScriptedEngine(echo)
    with running_bridge(engine, PieceTokenizer(), is_loaded=False) as running:
        for path in ("/health", "/v1/models", "/slots", "/api/ring"):
            response = running.client.get(path)
            refused(response, 503, "loaded")
            assert int(response.headers["retry-after"]) >= 1
        refused(completion(running, prompt="x"), 503, "loaded")
        assert running.client.get("/metrics").status_code == 200


def test_a_stream_that_waits_sends_comments_that_clients_skip() -> None:
    engine = ScriptedEngine(echo)
    engine.hold()
    limits = Limits(stream_opens_s=0.02, comment_s=0.02)
    with running_bridge(engine, PieceTokenizer(), limits=limits) as running:
        body = {"prompt": "ab", "stream": True}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == ": waiting"
            engine.run()
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"


def test_a_failed_ring_is_an_error_for_every_client() -> None:
    engine = ScriptedEngine(lambda _: [97] * 50)
    engine.hold()
    with running_bridge(engine, PieceTokenizer()) as running:
        body = {"prompt": "x", "stream": True, "max_tokens": 50}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            engine.let_laps(1)
            lines = response.iter_lines()
            assert "a" in next(lines)
            engine.fail_all("stage 1 was lost 4 times")
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["message"] == (
            "stage 1 was lost 4 times"
        )
        assert "data: [DONE]" not in rest
