"""Real rings against transformers, from the same file: the greedy tokens, and how likely they are.

Requests come in a shuffled order and some are cancelled on the way; that may change nobody's tokens.
"""

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_core.microbatch import FinishReason
from kvasir_core.plan import Plan
from kvasir_rt import wire
from kvasir_rt.engine import Engine, EngineOptions
from kvasir_rt.errors import ModelFileError
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.member import CrewOptions
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model_files import find_model
from kvasir_rt.sampling import SamplingParams
from kvasir_rt.serve_plan import RingOptions, plan_for
from kvasir_rt.submission import EngineEvent, TokenEvent
from kvasir_rt.switchboard import LineOptions
from kvasir_rt.tokenizer import load_tokenizer
from tests.rt.oracles import load_oracle, oracle_options, output_logits
from tests.rt.rings import Clients, running
from tests.rt.tiny_models import VOCAB, TinyModel, write_tiny_model

TOLERANCE = 1e-3
LIKELIEST = SamplingParams(logprobs=5)
CANCELLED_FROM = 1000  # Ids of requests that are cancelled.
TEXTS = (
    "The capital of France is Paris. The capital of Germany is",
    "def add(a, b):\n    return",
    "Once upon a time",
    "1 2 3 4 5",
    "Water boils at a temperature of 100 degrees Celsius, because",
    "Dear Sir or Madam,",
    "Le chat est sur la table et",
    "x" * 40,
    "SELECT name FROM rivers WHERE",
    "To be, or not to be",
    "A ring of stages passes what it computed on to the next stage, and " * 6,
    "🙂 漢字",
    "The quick brown fox",
    "In 1969",
    "Q: What is the largest planet?\nA:",
    "import numpy as np\n\n",
)


class LikelyClients(Clients):
    """Keeps the likeliest tokens of each place, with their log-probabilities."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.top: defaultdict[int, list[dict[int, float]]] = defaultdict(list)

    def _take(self, event: EngineEvent) -> None:
        if isinstance(event, TokenEvent):
            self.top[event.request_id].append(dict(event.top))
        super()._take(event)


def ring_of(path: Path, plan: Plan, vocabulary: int) -> Engine:
    crew = CrewOptions(
        plan=plan,
        dtype="float32",
        compute=wire.ModelSpec(str(path), "", ("cpu",) * plan.stages),
        secret="only for this test",
    )
    return Engine(EngineOptions(lines=LineOptions(crew=crew, threads=1), vocabulary=vocabulary))


def plan_from(path: Path, stages: int, window: int) -> tuple[Plan, int]:
    with open_gguf(path) as gguf:
        shape = ModelShape.of(gguf)
    options = RingOptions(
        stages=stages, window=window, row_width=24, micro_batch_width=4, context=256, running_max=12
    )
    return plan_for(shape, options), shape.vocab


def check_ring(
    path: Path, oracle: Any, prompts: list[list[int]], tokens: int, stages: int, window: int
) -> None:
    """Every request's tokens and their log-probabilities are the oracle's."""
    chance = random.Random(10 * stages + window)
    order = list(range(len(prompts)))
    chance.shuffle(order)
    plan, vocabulary = plan_from(path, stages, window)
    with running(ring_of(path, plan, vocabulary)) as engine:
        clients = LikelyClients(engine)
        leaving = [CANCELLED_FROM + each for each in order[::3]]
        for request in order:
            clients.submit(request, prompts[request], tokens, sampling=LIKELIEST)
            if CANCELLED_FROM + request in leaving:
                clients.submit(CANCELLED_FROM + request, prompts[request][::-1], 200)
        for step, request in enumerate(leaving, 1):
            seen = step * tokens
            clients.wait(lambda seen=seen: clients.total >= seen, "progress", 240)  # type: ignore[misc]
            engine.cancel(request)
        clients.wait_all(240)
        assert not clients.errors
    assert any(clients.ends[each].reason is FinishReason.CANCELLED for each in leaving)
    for request, prompt in enumerate(prompts):
        output = clients.tokens[request]
        assert len(output) == tokens
        logits = output_logits(oracle, prompt, output)
        assert output == logits.argmax(dim=-1).tolist(), f"request {request}"
        right = torch.log_softmax(logits.double(), dim=-1)
        for place, top in enumerate(clients.top[request]):
            assert len(top) == LIKELIEST.logprobs
            for token, logprob in top.items():
                assert logprob == pytest.approx(float(right[place, token]), abs=TOLERANCE)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return find_model("smollm2-135m")
    except ModelFileError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2: Path) -> Any:
    return load_oracle(smollm2)


@pytest.fixture(scope="module")
def smollm2_prompts(smollm2: Path) -> list[list[int]]:
    with open_gguf(smollm2) as gguf:
        tokenizer = load_tokenizer(gguf)
    return [tokenizer.encode(text, add_bos=True, parse_special=False) for text in TEXTS]


@pytest.mark.parametrize(("stages", "window"), [(2, 1), (2, 2), (3, 4), (4, 8)])
def test_a_ring_of_smollm2_gives_the_tokens_of_transformers(
    smollm2: Path,
    smollm2_oracle: Any,
    smollm2_prompts: list[list[int]],
    stages: int,
    window: int,
) -> None:
    check_ring(smollm2, smollm2_oracle, smollm2_prompts[:8], 16, stages, window)


@pytest.mark.nightly
@pytest.mark.parametrize("window", range(1, 9))
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_long_answers_of_any_ring_of_smollm2_are_those_of_transformers(
    smollm2: Path,
    smollm2_oracle: Any,
    smollm2_prompts: list[list[int]],
    stages: int,
    window: int,
) -> None:
    check_ring(smollm2, smollm2_oracle, smollm2_prompts, 64, stages, window)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3moe"])
def test_a_ring_of_any_architecture_gives_the_tokens_of_transformers(
    tmp_path: Path, architecture: str
) -> None:
    model = TinyModel(architecture=architecture)
    path = write_tiny_model(tmp_path / "tiny.gguf", model)
    chance = random.Random(architecture)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randrange(1, 60))] for _ in range(8)]
    check_ring(path, load_oracle(path, **oracle_options(model)), prompts, 32, 3, 4)
