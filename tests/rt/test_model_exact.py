"""Against transformers, from the same file: logits within 1e-3 and equal greedy tokens in float32."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_rt.gguf_file import open_gguf
from tests.rt.batches import forward, greedy, greedy_mixed, micro_batch, stages_of
from tests.rt.oracles import is_greedy, load_oracle, oracle_options, oracle_shape, transformers
from tests.rt.tiny_models import VOCAB, TinyModel, write_tiny_model

LOGITS_TOLERANCE = 1e-3


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3moe"])
def test_a_tiny_model_has_the_logits_and_greedy_tokens_of_transformers(
    tmp_path: Path, architecture: str, is_tied: bool
) -> None:
    model = TinyModel(architecture=architecture, is_tied=is_tied)
    path = write_tiny_model(tmp_path / "tiny.gguf", model)
    oracle = load_oracle(path, **oracle_options(model))
    prompts = [[5, 10, 300, 40, 7], [100], [17, 17, 250, 3, 9, 81, 200, 44, 61]]
    with open_gguf(path) as gguf:
        stages = stages_of(gguf, [0, 1, 3, 4])
    for prompt in prompts:
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt])).logits[0, -1]
        mb = micro_batch([], [(0, 0, len(prompt))], [0])
        mine = forward(stages, mb, prompt)[0]
        for stage in stages:
            stage.release([0])
        assert (mine - logits).abs().max() < LOGITS_TOLERANCE
    outputs = [greedy(stages, prompt, 32) for prompt in prompts]
    assert greedy_mixed(stages, prompts, 32, seed=1) == outputs
    if not is_tied:
        assert len({token for tokens in outputs for token in tokens}) > 16
    for prompt, output in zip(prompts, outputs, strict=True):
        assert is_greedy(oracle, prompt, output)


def llama3_factors(head_dim: int, scaling: dict[str, Any]) -> tuple[float, ...]:
    """What the converter writes as `rope_freqs.weight`: Llama 3's stretching of slow rotations."""
    factors: list[float] = []
    old = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    for pair in range(head_dim // 2):
        length = 2 * math.pi * scaling["rope_theta"] ** (2 * pair / head_dim)
        if length < old / high:
            factors.append(1.0)
        elif length > old / low:
            factors.append(scaling["factor"])
        else:
            smooth = (old / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return tuple(factors)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "scaling"),
    [
        (TinyModel(rope_factors=llama3_factors(16, LLAMA3)), LLAMA3),
        (
            TinyModel(extra=(("rope.scaling.type", "linear"), ("rope.scaling.factor", 2.5))),
            {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
        ),
    ],
    ids=["llama3", "linear"],
)
def test_stretched_positions_have_the_logits_of_transformers(
    tmp_path: Path, model: TinyModel, scaling: dict[str, Any]
) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", model)
    shared = oracle_shape(model)
    del shared["rope_theta"]
    config = transformers.LlamaConfig(**shared, rope_parameters=scaling)
    oracle = load_oracle(path, config=config)
    prompt = [each * 13 % VOCAB for each in range(100)]
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt])).logits[0, -1]
    with open_gguf(path) as gguf:
        mine = forward(stages_of(gguf, [0, 4]), micro_batch([], [(0, 0, 100)], [0]), prompt)[0]
    assert (mine - logits).abs().max() < LOGITS_TOLERANCE
    plain = write_tiny_model(tmp_path / "plain.gguf")
    with open_gguf(plain) as gguf:
        other = forward(stages_of(gguf, [0, 4]), micro_batch([], [(0, 0, 100)], [0]), prompt)[0]
    assert (other - logits).abs().max() > 0.1
