"""Real rings of tiny models of any architecture against transformers, from the same file."""

import random
from pathlib import Path

import pytest

from tests.rt.exact_rings import check_ring
from tests.rt.oracles import load_oracle, oracle_options
from tests.rt.tiny_models import VOCAB, TinyModel, write_tiny_model


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3moe"])
def test_a_ring_of_any_architecture_gives_the_tokens_of_transformers(
    tmp_path: Path, architecture: str
) -> None:
    model = TinyModel(architecture=architecture)
    path = write_tiny_model(tmp_path / "tiny.gguf", model)
    chance = random.Random(architecture)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randrange(1, 60))] for _ in range(8)]
    check_ring(path, load_oracle(path, **oracle_options(model)), prompts, 32, 3, 4)
