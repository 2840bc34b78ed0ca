"""transformers as the oracle: it reads the same file, in float32."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rt.tiny_models import VOCAB, TinyModel

transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
pytest.importorskip("accelerate", reason="transformers needs it to load a GGUF file")


def load_oracle(path: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Not ours.
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, **options
        ).eval()


def output_logits(oracle: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """What the oracle makes of each place of `output`, after what stands before it: one pass."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    row: torch.Tensor = logits[len(prompt) - 1 :]
    return row


def is_greedy(oracle: Any, prompt: list[int], output: list[int]) -> bool:
    """Whether each token is the oracle's likeliest."""
    return bool(output_logits(oracle, prompt, output).argmax(dim=-1).tolist() == output)


def oracle_shape(model: TinyModel) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": model.hidden, "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim, "rms_norm_eps": 1e-6, "max_position_embeddings": model.context,
        "rope_theta": 10_000.0, "tie_word_embeddings": model.is_tied,
        "intermediate_size": model.ffn,
    }  # fmt: skip


def oracle_options(model: TinyModel) -> dict[str, Any]:
    """What transformers' GGUF maps leave out."""
    shared = oracle_shape(model)
    if model.architecture == "qwen3":
        return {"config": transformers.Qwen3Config(**shared)}
    if model.architecture == "qwen3moe":
        config = transformers.Qwen3MoeConfig(
            **shared,
            num_experts=model.experts,
            num_experts_per_tok=model.experts_used,
            moe_intermediate_size=model.expert_ffn,
            norm_topk_prob=True,
            decoder_sparse_step=1,
        )
        return {"config": config}
    return {}
