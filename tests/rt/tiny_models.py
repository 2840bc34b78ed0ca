"""Tiny random models as GGUF files: every supported architecture, with a real BPE tokenizer.

The weights are scaled so that greedy decoding does not fall into one token: large embeddings and a
large down projection make the text wander, and equal tokens mean something.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from kvasir_rt.tokenizer import byte_characters

CONTROL_TEXTS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
BOS, END = 256, 257
WORDS = ("the", "ring", "head", "tail", "hello", "world", "stage", "lap", "boundary", "token")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """What to write. `split_tensors` puts so many tensors in each file of a split model."""

    architecture: str = "llama"
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 128
    context: int = 512
    experts: int = 16
    experts_used: int = 4
    expert_ffn: int = 32
    quantisation: str = "F32"
    is_tied: bool = False
    seed: int = 1
    split_tensors: int = 0
    without: tuple[str, ...] = ()  # Tensors left out.
    has_tokenizer: bool = True
    bos_id: int | None = None
    add_bos: bool | None = None
    chat_template: str | None = CHAT_TEMPLATE
    rope_factors: tuple[float, ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()  # Keys below the architecture's name.


def tokenizer_parts() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types, and merges of the tiny byte-level BPE."""
    tokens = byte_characters() + list(CONTROL_TEXTS)
    types = [1] * 256 + [3] * len(CONTROL_TEXTS)
    merges: list[str] = []
    for word in WORDS:
        pairs = [(word[:cut], word[cut]) for cut in range(1, len(word))]
        for left, right in [*pairs, ("\u0120", word)]:  # GPT-2 spells a space so.
            if left + right not in tokens:
                merges.append(f"{left} {right}")
                tokens.append(left + right)
                types.append(1)
    while len(tokens) % 32:
        tokens.append(f"<|unused{len(tokens)}|>")
        types.append(5)
    return tokens, types, merges


VOCAB = len(tokenizer_parts()[0])


def write_tiny_model(path: Path, model: TinyModel | None = None) -> Path:
    """Write the model; returns the file to open (of a split model the first part)."""
    model = model or TinyModel()
    writer = gguf.GGUFWriter(
        path, model.architecture, split_max_tensors=model.split_tensors, use_temp_file=False
    )
    _add_keys(writer, model)
    if model.has_tokenizer:
        _add_tokenizer(writer, model)
    kind = gguf.GGMLQuantizationType[model.quantisation]
    for name, values in _tensors(model):
        if name in model.without:
            continue
        if values.ndim == 1 or "ffn_gate_inp" in name or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            stored = gguf.quants.quantize(values, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    first: Path = writer.format_shard_names(path)[0]
    writer.close()
    return first


def _add_keys(writer: Any, model: TinyModel) -> None:
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    if model.architecture == "qwen3moe":
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(model.experts_used)
        writer.add_expert_feed_forward_length(model.expert_ffn)
        writer.add_feed_forward_length(model.ffn)
    else:
        writer.add_feed_forward_length(model.ffn)
    if model.architecture != "qwen2":
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    if model.architecture == "llama":
        writer.add_rope_dimension_count(model.head_dim)
        writer.add_vocab_size(VOCAB)
    for key, value in model.extra:
        name = f"{model.architecture}.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case _:
                writer.add_string(name, value)


def _add_tokenizer(writer: Any, model: TinyModel) -> None:
    tokens, types, merges = tokenizer_parts()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if model.architecture.startswith("qwen") else "smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(END)
    if model.bos_id is not None:
        writer.add_bos_token_id(model.bos_id)
    if model.add_bos is not None:
        writer.add_add_bos_token(model.add_bos)
    if model.chat_template is not None:
        writer.add_chat_template(model.chat_template)


def _tensors(model: TinyModel) -> Sequence[tuple[str, NDArray[np.float32]]]:
    random = np.random.Generator(np.random.PCG64(model.seed))

    def matrix(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        values = random.standard_normal(shape) * (scale / np.sqrt(shape[-1]))
        return np.asarray(values, dtype=np.float32)

    def vector(length: int, mean: float = 1.0) -> NDArray[np.float32]:
        return (mean + 0.1 * random.standard_normal(length)).astype(np.float32)

    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    made = [("token_embd.weight", matrix(VOCAB, model.hidden, scale=np.sqrt(model.hidden)))]
    for layer in range(model.layers):
        prefix = f"blk.{layer}."
        made += [
            (prefix + "attn_norm.weight", vector(model.hidden)),
            (prefix + "attn_q.weight", matrix(query, model.hidden, scale=1.5)),
            (prefix + "attn_k.weight", matrix(kv, model.hidden, scale=1.5)),
            (prefix + "attn_v.weight", matrix(kv, model.hidden)),
            (prefix + "attn_output.weight", matrix(model.hidden, query, scale=2.0)),
            (prefix + "ffn_norm.weight", vector(model.hidden)),
        ]
        if model.architecture == "qwen2":
            made += [
                (f"{prefix}attn_{part}.bias", vector(width, mean=0.0))
                for part, width in (("q", query), ("k", kv), ("v", kv))
            ]
        if model.architecture.startswith("qwen3"):
            made += [
                (prefix + "attn_q_norm.weight", vector(model.head_dim)),
                (prefix + "attn_k_norm.weight", vector(model.head_dim)),
            ]
        if model.architecture == "qwen3moe":
            count, wide = model.experts, model.expert_ffn
            made += [
                (prefix + "ffn_gate_inp.weight", matrix(count, model.hidden, scale=2.0)),
                (prefix + "ffn_gate_exps.weight", matrix(count, wide, model.hidden)),
                (prefix + "ffn_up_exps.weight", matrix(count, wide, model.hidden)),
                (prefix + "ffn_down_exps.weight", matrix(count, model.hidden, wide, scale=4.0)),
            ]
        else:
            made += [
                (prefix + "ffn_gate.weight", matrix(model.ffn, model.hidden)),
                (prefix + "ffn_up.weight", matrix(model.ffn, model.hidden)),
                (prefix + "ffn_down.weight", matrix(model.hidden, model.ffn, scale=4.0)),
            ]
    if model.rope_factors:
        made.append(("rope_freqs.weight", np.array(model.rope_factors, dtype=np.float32)))
    made.append(("output_norm.weight", vector(model.hidden)))
    if not model.is_tied:
        made.append(("output.weight", matrix(VOCAB, model.hidden, scale=np.sqrt(model.hidden))))
    return made
