"""SmolLM2 against transformers, from the same file: its parts in one process, and as a ring.

One file, for the oracle takes twenty seconds to load.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_rt.errors import ModelFileError
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.model_files import find_model
from kvasir_rt.tokenizer import Tokenizer, load_tokenizer
from tests.rt.batches import forward, greedy, greedy_mixed, micro_batch, stages_of
from tests.rt.exact_rings import check_ring
from tests.rt.oracles import is_greedy, load_oracle, transformers

LOGITS_TOLERANCE = 1e-3
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
SHORT = TEXTS[:8]


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
def tokenizer(smollm2: Path) -> Iterator[Tokenizer]:
    with open_gguf(smollm2) as gguf:
        yield load_tokenizer(gguf)


@pytest.fixture(scope="module")
def smollm2_prompts(smollm2: Path) -> list[list[int]]:
    with open_gguf(smollm2) as gguf:
        tokenizer = load_tokenizer(gguf)
    return [tokenizer.encode(text, add_bos=True, parse_special=False) for text in TEXTS]


def test_smollm2_has_the_logits_and_greedy_tokens_of_transformers_alone_and_mixed(
    smollm2: Path, smollm2_oracle: Any, tokenizer: Tokenizer
) -> None:
    prompts = [tokenizer.encode(text, add_bos=True, parse_special=False) for text in SHORT]
    with open_gguf(smollm2) as gguf:
        stages = stages_of(gguf, [0, 17, 30])
    with torch.inference_mode():
        logits = smollm2_oracle(torch.tensor([prompts[0]])).logits[0]
    for rows in (1, len(prompts[0])):  # Every position of the first prompt, then the last.
        mine = torch.cat(
            [
                forward(stages, micro_batch([], [(0, at, rows)], [0]), prompts[0][at : at + rows])
                for at in range(0, len(prompts[0]), rows)
            ]
        )
        stages[0].release([0])
        stages[1].release([0])
        assert (mine - logits[-len(mine) :]).abs().max() < LOGITS_TOLERANCE
    mixed = greedy_mixed(stages, prompts, 16, seed=3)
    for prompt, output in zip(prompts, mixed, strict=True):
        assert is_greedy(smollm2_oracle, prompt, output)
    assert greedy(stages, prompts[0], 16) == mixed[0]


def test_smollm2_bfloat16_stays_near_float32(
    smollm2: Path, smollm2_oracle: Any, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(TEXTS[0], add_bos=True, parse_special=False)
    with open_gguf(smollm2) as gguf:
        stages = stages_of(gguf, [0, 17, 30], dtype="bfloat16")
    mb = micro_batch([], [(0, 0, len(prompt))], [0])
    with torch.inference_mode():
        logits = smollm2_oracle(torch.tensor([prompt])).logits[0, -1]
    mine = forward(stages, mb, prompt)[0]
    assert (mine - logits).abs().max() < 1.0  # Of a scale of 28.
    assert int(mine.argmax()) == int(logits.argmax())


def test_smollm2_tokens_and_chat_are_those_of_transformers(
    smollm2: Path, tokenizer: Tokenizer
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    for text in (*SHORT, "don't ünïcödé 漢字 🙂\n\n\tx 3.14", "<|im_start|>user\nhi<|im_end|>", ""):
        ids = tokenizer.encode(text, add_bos=True, parse_special=True)
        assert ids == theirs(text).input_ids
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Why?"},
    ]
    for cut in (1, 2, 4):
        text = theirs.apply_chat_template(
            messages[:cut], tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.apply_chat_template(messages[:cut]) == text
        assert tokenizer.chat(messages[:cut]) == theirs(text).input_ids


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
