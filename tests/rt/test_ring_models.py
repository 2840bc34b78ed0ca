"""Rings of real models: any split gives the tokens of the whole model in one process (law R4)."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir_core.microbatch import BindingLimit, FinishReason, MicroBatch
from kvasir_core.plan import Plan, split_evenly
from kvasir_core.units import Epoch, MicroBatchId, RequestId
from kvasir_rt import wire
from kvasir_rt.engine import Engine, EngineOptions
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.member import CrewOptions
from kvasir_rt.model.stage_model import StageModel
from kvasir_rt.ring_errors import RingDown
from kvasir_rt.sampler import TokenHistory, sample
from kvasir_rt.sampling import SamplingParams
from kvasir_rt.switchboard import LineOptions
from tests.rt.rings import Clients, running, until
from tests.rt.tiny_models import VOCAB, TinyModel, write_tiny_model

LAYERS = 10
GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=42)
PENALISED = SamplingParams(
    temperature=0.7, seed=7, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=3
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder / "tiny.gguf", TinyModel(layers=LAYERS))


class WholeModel:
    """All layers in one process, one request at a time: the reference."""

    def __init__(self, path: Path) -> None:
        with open_gguf(path) as gguf:
            self._model = StageModel(
                gguf, (0, LAYERS), running_max=1, context=256, kv_tokens=256, dtype="float32"
            )

    def tokens(self, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
        history = list(prompt)
        done = 0
        counted = TokenHistory()
        for _ in range(count):
            rows = len(history) - done
            batch = MicroBatch(
                id=MicroBatchId(0),
                epoch=Epoch(0),
                requests=(RequestId(1),),
                starts=(done,),
                rows=(rows,),
                decodes=0,
                completing=(0,),
                row_count=rows,
                decode_context=0,
                binding=BindingLimit.NOTHING_WAITING,
            )
            logits = self._model.forward(batch, torch.tensor(history[done:]))
            counted.extend(history[done:])
            done = len(history)
            (picked,) = sample(logits, [params], [done], [counted])
            assert picked is not None
            history.append(picked.token)
        self._model.release([1])
        return history[len(prompt) :]


def engine_for(path: Path, stages: int, *, dtype: str = "float32", **changes: object) -> Engine:
    numbers: dict[str, object] = {
        "layers": split_evenly(LAYERS, stages),
        "row_width": 16,
        "micro_batch_width": 4,
        "window": stages,
        "window_max": stages,
        "running_max": 8,
        "context": 256,
        "kv_tokens": (4096,) * stages,
        "hidden": 64,
        "element_bytes": 4 if dtype == "float32" else 2,
    }
    plan = Plan(**(numbers | changes))  # type: ignore[arg-type]
    crew = CrewOptions(
        plan=plan,
        dtype=dtype,
        compute=wire.ModelSpec(str(path), "", ("cpu",) * stages),
        secret="only for this test",
    )
    lines = LineOptions(crew=crew, threads=1)
    return Engine(EngineOptions(lines=lines, vocabulary=VOCAB))


def prompts(count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCAB) for _ in range(chance.randrange(1, 60))] for _ in range(count)]


@pytest.mark.parametrize(("stages", "window"), [(2, 1), (3, 4), (5, 6)])  # P5: ten layers.
def test_greedy_drawn_and_penalised_tokens_equal_the_whole_models(
    model: Path, stages: int, window: int
) -> None:
    whole = WholeModel(model)
    kinds = [GREEDY, DRAWN, PENALISED]
    with running(engine_for(model, stages, window=window, window_max=window)) as engine:
        clients = Clients(engine)
        for request, prompt in enumerate(prompts(9, stages)):
            clients.submit(request, prompt, 20, sampling=kinds[request % 3])
        clients.wait_all(120)
        assert not clients.errors
        for request, prompt in clients.prompts.items():
            right = whole.tokens(prompt, 20, kinds[request % 3])
            assert clients.tokens[request] == right, f"request {request}"
        assert len({tuple(tokens) for tokens in clients.tokens.values()}) == 9


def test_a_killed_stage_changes_no_token_whatever_the_sampling(model: Path) -> None:
    whole = WholeModel(model)
    kinds = [GREEDY, DRAWN, PENALISED]
    with running(engine_for(model, 2)) as engine:
        clients = Clients(engine)
        for request, prompt in enumerate(prompts(6, 9)):
            clients.submit(request, prompt, 60, sampling=kinds[request % 3])
        for stage, target in ((1, 60), (0, 180)):
            clients.wait(lambda target=target: clients.total >= target, "progress")  # type: ignore[misc]
            until(lambda: engine.snapshot().is_ready, "ready")
            pid = engine.snapshot().stages[stage].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            until(lambda: not engine.snapshot().is_ready, "found", 2.0)
        clients.wait_all(120)
        assert not clients.errors
        for request, prompt in clients.prompts.items():
            assert clients.tokens[request] == whole.tokens(prompt, 60, kinds[request % 3])
        assert engine.snapshot().statistics.epoch == 2


def test_preempted_requests_keep_their_drawn_tokens(model: Path) -> None:
    whole = WholeModel(model)
    with running(engine_for(model, 2, kv_tokens=(240, 240))) as engine:
        clients = Clients(engine)
        for request in range(5):
            clients.submit(request, [request + 1] * 20, 60, sampling=PENALISED)
        clients.wait_all(120)
        assert engine.snapshot().statistics.preemptions > 0
        for request, prompt in clients.prompts.items():
            assert clients.tokens[request] == whole.tokens(prompt, 60, PENALISED)


def test_bfloat16_boundaries_travel_and_requests_end(model: Path) -> None:
    with running(engine_for(model, 3, dtype="bfloat16")) as engine:
        clients = Clients(engine)
        for request, prompt in enumerate(prompts(4, 2)):
            clients.submit(request, prompt, 10)
        clients.wait_all(60)
        assert all(end.reason is FinishReason.LENGTH for end in clients.ends.values())
        assert all(0 <= token < VOCAB for tokens in clients.tokens.values() for token in tokens)


def test_a_prompt_of_several_chunks_gives_the_same_tokens_as_in_one(model: Path) -> None:
    """P7 on real stages: 200 tokens in row widths 64 and 256."""
    prompt = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 200)]
    given = []
    for row_width in (64, 256):
        with running(engine_for(model, 2, row_width=row_width)) as engine:
            clients = Clients(engine)
            clients.submit(0, prompt, 12)
            clients.wait_all(60)
            given.append(clients.tokens[0])
            assert engine.snapshot().laps == -(-200 // row_width) + 11
    assert given[0] == given[1]


def test_a_model_that_is_not_the_plans_stops_the_start_and_says_both(model: Path) -> None:
    engine = engine_for(model, 2, layers=split_evenly(7, 2))
    with pytest.raises(RingDown, match="has 10 layers of width 64; the plan says 7"):
        engine.start()


def test_a_token_outside_the_vocabulary_never_reaches_a_stage(model: Path) -> None:
    engine = engine_for(model, 2)
    clients = Clients(engine)
    with pytest.raises(ValueError, match=f"there is {VOCAB}"):
        clients.submit(0, [VOCAB], 1)
    engine.close()
