"""Experts: sharded sums equal the whole, and a stage goes on with others while it waits."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvasir_core.microbatch import MicroBatch
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.gguf_read import read_rows
from kvasir_rt.model.linear import Numerics, Packer
from kvasir_rt.model.moe import DoneCall, ExpertCall, MoeBlock, expert_sum
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model.stage_model import StageModel
from kvasir_rt.model.weights import load_experts
from tests.rt.batches import forward, greedy, micro_batch, stages_of
from tests.rt.tiny_models import TinyModel, write_tiny_model

PROMPT = [5, 10, 300, 40, 7, 101, 33]
PACKER = Packer(Numerics.of("cpu", "float32"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    return write_tiny_model(folder / "moe.gguf", TinyModel(architecture="qwen3moe"))


def routed(rows: int, experts: int = 16, used: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 64, generator=random)
    shares = torch.randn(rows, experts, generator=random).softmax(dim=-1)
    best, chosen = shares.topk(used, dim=-1)
    return x, chosen, best / best.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("rows", [1, 8, 33])
def test_disjoint_ranges_sum_to_the_whole_and_to_the_plain_formula(path: Path, rows: int) -> None:
    x, chosen, weights = routed(rows)
    with open_gguf(path) as gguf:
        shape = ModelShape.of(gguf)
        whole = expert_sum(load_experts(gguf, shape, PACKER, 1, 0, 16), x, chosen, weights)
        parts = [
            expert_sum(load_experts(gguf, shape, PACKER, 1, begin, end), x, chosen, weights)
            for begin, end in ((0, 1), (1, 6), (6, 15), (15, 16))
        ]
        names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        tensors = [gguf.tensors[f"blk.1.{name}.weight"] for name in names]
        gate, up, down = (
            torch.from_numpy(read_rows(gguf, each).reshape(each.shape)) for each in tensors
        )
    scale = whole.abs().max()
    assert (sum(parts) - whole).abs().max() / scale < 1e-5
    plain = torch.zeros_like(x)
    for row in range(rows):
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            inner = torch.nn.functional.silu(gate[expert] @ x[row]) * (up[expert] @ x[row])
            plain[row] += weight * (down[expert] @ inner)
    assert (plain - whole).abs().max() / scale < 1e-5


def test_a_row_that_chose_none_of_the_range_is_zero(path: Path) -> None:
    x, chosen, weights = routed(4)
    with open_gguf(path) as gguf:
        experts = load_experts(gguf, ModelShape.of(gguf), PACKER, 0, 3, 5)
    chosen = chosen.clone()
    chosen[2] = torch.tensor([0, 1, 2, 9])
    assert torch.equal(expert_sum(experts, x, chosen, weights)[2], torch.zeros(64))


def test_the_sum_of_a_row_does_not_depend_on_the_rows_beside_it(path: Path) -> None:
    x, chosen, weights = routed(12)
    with open_gguf(path) as gguf:
        experts = load_experts(gguf, ModelShape.of(gguf), PACKER, 0, 0, 16)
    together = expert_sum(experts, x, chosen, weights)
    for row in range(12):
        alone = expert_sum(experts, x[row : row + 1], chosen[row : row + 1], weights[row : row + 1])
        assert torch.allclose(together[row], alone[0], atol=1e-5)


def test_the_router_renormalises_the_best_before_any_sharding(path: Path) -> None:
    with open_gguf(path) as gguf:
        (stage,) = stages_of(gguf, [0, 4])
    block = stage._layers[0].ffn
    assert isinstance(block, MoeBlock)
    chosen, weights = block.route(torch.randn(5, 64))
    assert chosen.shape == weights.shape == (5, 4)
    assert torch.allclose(weights.sum(dim=-1), torch.ones(5))
    assert all(len(set(row)) == 4 for row in chosen.tolist())


@dataclass
class LateCall:
    """Answers when asked, as a remote worker would."""

    value: Tensor
    is_done: bool = False

    def result(self) -> Tensor:
        self.is_done = True
        return self.value


@dataclass
class LateExperts:
    """Computes with a local stage's experts, but never at once."""

    local: StageModel
    asked: list[tuple[int, int]] = field(default_factory=list)

    def start(
        self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor, mb: MicroBatch
    ) -> ExpertCall:
        self.asked.append((layer, len(x)))
        block = self.local._layers[layer].ffn
        assert isinstance(block, MoeBlock)
        done = block.backend.start(layer, x, chosen, weights, mb)
        assert isinstance(done, DoneCall)
        return LateCall(done.value)


def test_another_backend_is_asked_for_every_layer_and_gives_the_same_tokens(path: Path) -> None:
    with open_gguf(path) as gguf:
        (local,) = stages_of(gguf, [0, 4])
        remote = LateExperts(local)
        stage = StageModel(gguf, (0, 4), running_max=4, context=64, kv_tokens=256, experts=remote)
        expected = greedy([local], PROMPT, 12)
        assert greedy([stage], PROMPT, 12) == expected
    assert remote.asked[:5] == [(0, 7), (1, 7), (2, 7), (3, 7), (0, 1)]


def test_while_one_micro_batch_waits_for_experts_others_are_computed(path: Path) -> None:
    with open_gguf(path) as gguf:
        (local,) = stages_of(gguf, [0, 4])
        stage = StageModel(
            gguf, (0, 4), running_max=4, context=64, kv_tokens=256, experts=LateExperts(local)
        )
    prompts = {0: PROMPT, 1: [1, 2, 3], 2: [9] * 12}
    batches = {
        number: micro_batch([], [(number, 0, len(prompt))], [number])
        for number, prompt in prompts.items()
    }
    expected = {number: forward([local], batches[number], prompts[number]) for number in prompts}
    runs = {
        number: stage.begin(batches[number], torch.tensor(prompts[number])) for number in prompts
    }
    parked = {number: run.advance() for number, run in runs.items()}
    while parked:  # Resumed in the reverse order of parking.
        for number in sorted(parked, reverse=True):
            call = parked.pop(number)
            if call is not None:
                call.result()
                parked[number] = runs[number].advance()
    for number, run in runs.items():
        assert torch.equal(run.output, expected[number])
