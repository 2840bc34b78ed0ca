"""Tiny models on real stage processes: seeds (A7), odd requests (A5), crowds, a killed stage."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.serving import Server, serving, wait_for
from tests.rt.tiny_models import BOS, TinyModel, write_tiny_model

MODEL = "tiny"


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no_bos"])
def has_bos(request: pytest.FixtureRequest) -> bool:
    has: bool = request.param
    return has


@pytest.fixture(scope="module")
def server(has_bos: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tiny")
    model = TinyModel(bos_id=BOS, add_bos=True) if has_bos else TinyModel()
    path = write_tiny_model(folder / "tiny.gguf", model)
    with serving(folder / "run", str(path), "--running-max", "16") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def test_a7_a_seed_gives_the_same_text_alone_and_in_company(client: openai.OpenAI) -> None:
    def seeded(seed: int | None = 42, prompt: str = "My favourite animal is") -> str:
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=16, temperature=0.8, seed=seed
        )
        return answer.choices[0].text

    alone = [seeded(), seeded()]
    with ThreadPoolExecutor(7) as pool:
        others = [pool.submit(seeded, None, f"Number {n} is") for n in range(5)]
        others.append(pool.submit(seeded, 7))
        company = [pool.submit(seeded).result(), pool.submit(seeded).result()]
        together = [future.result() for future in [pool.submit(seeded), pool.submit(seeded)]]
        assert all(other.result() for other in others)
    assert len({*alone, *company, *together}) == 1
    assert seeded(43) != alone[0]


def test_a7_choices_differ_and_are_the_same_the_next_time(client: openai.OpenAI) -> None:
    def three() -> Any:
        return client.completions.create(
            model=MODEL, prompt="Roses are", n=3, seed=7, temperature=1.0, max_tokens=12
        )

    first, second = three(), three()
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice.text for choice in second.choices]
    one = client.completions.create(model=MODEL, prompt="Roses are", max_tokens=1)
    assert first.usage.prompt_tokens == one.usage.prompt_tokens  # type: ignore[union-attr]
    greedy = client.completions.create(
        model=MODEL, prompt="Roses are", n=2, temperature=0, max_tokens=8
    )
    assert greedy.choices[0].text == greedy.choices[1].text


LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "the ring",
    "max_tokens": 400,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


def test_a5_odd_requests_disturb_neither_a_long_stream_nor_the_stages(
    server: Server, client: openai.OpenAI, has_bos: bool
) -> None:
    undisturbed = client.completions.create(**LONG).choices[0].text
    pids = server.pids()
    stream = client.completions.create(**LONG, stream=True)
    text = next(stream).choices[0].text
    empty = 200 if has_bos else 400
    odd: list[tuple[int, dict[str, Any]]] = [
        (empty, {"prompt": "", "max_tokens": 1}),
        (empty, {"prompt": [""], "max_tokens": 1}),
        (400, {"prompt": []}),
        (400, {"prompt": [-1]}),
        (400, {"prompt": [10**9]}),
        (400, {"prompt": "x", "max_tokens": 0}),
        (400, {"prompt": "x", "max_tokens": -1}),
        (200, {"prompt": "x", "max_tokens": 1}),
        (400, {"prompt": "x", "temperature": -1}),
        (400, {"messages": []}),
        (200, {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}),
    ]
    for status, body in odd:
        path = "chat/completions" if "messages" in body else "completions"
        answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=30)
        assert answer.status_code == status, (body, answer.text)
        if status == 400:
            assert answer.json()["error"]["message"]
        else:
            assert answer.json()["usage"]["completion_tokens"] == 1
        if "prompt" in body and status == 200 and body["prompt"] != "x":
            assert answer.json()["usage"]["prompt_tokens"] == 1
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == undisturbed
    assert server.pids() == pids


def test_many_clients_at_once_get_what_they_get_alone(client: openai.OpenAI) -> None:
    def ask(number: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=f"{number} plus one is", max_tokens=8, temperature=0
        )
        return answer.choices[0].text

    alone = [ask(number) for number in range(4)]
    with ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(ask, [number % 4 for number in range(24)]))
    assert texts == [alone[number % 4] for number in range(24)]


def test_a_client_that_leaves_gives_its_place_back(server: Server) -> None:
    def running() -> int:
        slots = httpx.get(server.url + "/slots").json()
        return sum(slot["is_processing"] for slot in slots)

    body = {"prompt": "Count:", "max_tokens": 480, "ignore_eos": True, "stream": True, "n": 3}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()  # Kept: without it the response is closed at once.
        next(lines)
        assert running() == 3
    wait_for(lambda: running() == 0, "the places", 10)
    wait_for(lambda: server.ring()["kv"]["blocks_in_use"] == 0, "the release's lap", 10)


def test_a_stream_goes_on_when_a_stage_is_killed(server: Server, client: openai.OpenAI) -> None:
    """Last in this module: the ring is reborn."""
    undisturbed = client.completions.create(**LONG).choices[0].text
    victim, epoch = server.pids()[1], server.ring()["epoch"]
    chunks: list[str] = []
    has_begun = threading.Event()

    def read() -> None:
        for chunk in client.completions.create(**LONG, stream=True):
            chunks.append(chunk.choices[0].text)
            has_begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(30)
    os.kill(victim, signal.SIGKILL)
    thread.join(90)
    assert not thread.is_alive()
    assert "".join(chunks) == undisturbed
    assert server.pids()[1] != victim
    assert server.ring()["epoch"] == epoch + 1
