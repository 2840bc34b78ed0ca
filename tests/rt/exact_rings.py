"""A real ring against transformers: requests in a shuffled order, some cancelled on the way.

That may change nobody's tokens.
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
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.member import CrewOptions
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.sampling import SamplingParams
from kvasir_rt.serve_plan import RingOptions, plan_for
from kvasir_rt.submission import EngineEvent, TokenEvent
from kvasir_rt.switchboard import LineOptions
from tests.rt.oracles import output_logits
from tests.rt.rings import Clients, running

TOLERANCE = 1e-3
LIKELIEST = SamplingParams(logprobs=5)
CANCELLED_FROM = 1000  # Ids of requests that are cancelled.


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
