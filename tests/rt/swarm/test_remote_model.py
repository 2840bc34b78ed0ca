"""A model whose experts are elsewhere gives the tokens of one whose experts are all here."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_rt.experts.backend import RemoteCall, RemoteExpertBackend
from kvasir_rt.experts.caller import ExpertCaller
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.model.stage_model import StageModel
from kvasir_rt.worker import pause as pauses
from tests.rt.batches import micro_batch
from tests.rt.swarm.swarms import TINY, Swarm, live_swarm, wait_for
from tests.rt.swarm.traffic import Traffic

PROMPTS = ([5, 17, 3, 99, 41, 200, 7, 12], [250, 1, 2, 3])
TOKENS = 24


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "PAUSE_S", 0.1)


def model_of(path: Path, experts: Any = None) -> StageModel:
    with open_gguf(path) as gguf:
        return StageModel(
            gguf, (0, TINY.layers), running_max=4, context=128, kv_tokens=512, experts=experts
        )


def greedy(model: StageModel, between: Callable[[int], None] = lambda _: None) -> list[list[int]]:
    """Tokens of both prompts, decoded side by side."""
    model.reset()
    chunks = [(request, 0, len(prompt)) for request, prompt in enumerate(PROMPTS)]
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    logits = model.forward(micro_batch([], chunks, completing=[0, 1]), ids)
    found: list[list[int]] = [[], []]
    for step in range(TOKENS):
        best = logits.argmax(dim=1)
        for request, token in enumerate(best.tolist()):
            found[request].append(token)
        between(step)
        at = [(request, len(prompt) + step) for request, prompt in enumerate(PROMPTS)]
        logits = model.forward(micro_batch(at), best)
    return found


@contextmanager
def remote_model(swarm: Swarm) -> Iterator[tuple[StageModel, ExpertCaller]]:
    caller = swarm.caller()
    caller.start()
    try:
        yield model_of(swarm.model_file, RemoteExpertBackend(caller)), caller
    finally:
        caller.close()


def test_greedy_tokens_are_equal_whoever_computes_the_experts(tmp_path: Path) -> None:
    with live_swarm(tmp_path) as swarm, remote_model(swarm) as (model, caller):
        right = greedy(model_of(swarm.model_file))
        assert len(set(right[0])) > 8  # Tokens that mean something.
        assert greedy(model) == right  # All here.
        assert caller.statistics().calls.calls == 0
        threads = [swarm.thread_worker(name, experts_max=12) for name in "abc"]
        wait_for("three serve", lambda: all(thread.is_serving for thread in threads))
        Traffic(caller).run_until_accepted(300)
        before = caller.statistics().calls
        assert greedy(model) == right  # Most of it remote.
        after = caller.statistics().calls
        assert after.pairs_accepted - before.pairs_accepted > (after.pairs - before.pairs) // 2

        def kill(step: int) -> None:
            if step in (3, 9):
                threads.pop().stop()
                swarm.threads.pop()

        assert greedy(model, kill) == right  # And while they leave.
        assert caller.statistics().calls.mismatches == 0


def test_a_stage_computes_other_micro_batches_while_one_waits_for_its_experts(
    tmp_path: Path,
) -> None:
    delay_s = 0.1
    with live_swarm(tmp_path) as swarm, remote_model(swarm) as (model, caller):
        thread = swarm.thread_worker("far", experts_max=32, delay_s=delay_s)
        wait_for("it serves", lambda: thread.worker and len(thread.worker.desk.slices) == 2)
        Traffic(caller).run_until_accepted(1000)  # Past its first answers, all of them checked.
        batches = [micro_batch([], [(request, 0, 6)], completing=[request]) for request in range(4)]
        ids = torch.arange(6)
        model.reset()
        started = time.monotonic()
        blocking = [model.forward(mb, ids) for mb in batches]
        one_by_one_s = time.monotonic() - started

        model.reset()
        woken: list[int] = []
        started = time.monotonic()
        runs = [model.begin(mb, ids) for mb in batches]
        parked = {index: run.advance() for index, run in enumerate(runs)}
        assert all(call is not None for call in parked.values())
        for index, call in parked.items():
            assert isinstance(call, RemoteCall)
            call.on_news(lambda index=index: woken.append(index))  # type: ignore[misc]
        while parked:
            for index, call in list(parked.items()):
                if call is not None and call.is_done:
                    parked[index] = runs[index].advance()
                if parked[index] is None:
                    del parked[index]
            time.sleep(0.001)
        overlapped_s = time.monotonic() - started
        for run, right in zip(runs, blocking, strict=True):
            assert torch.allclose(run.output, right, rtol=1e-4, atol=1e-4)
        assert set(woken) == {0, 1, 2, 3}
        assert overlapped_s < one_by_one_s * 0.7
