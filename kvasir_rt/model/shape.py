"""What a model file says about the model's structure, checked before anything is loaded.

Whatever a file asks for and this runtime does not do is refused by name: a key that changes the
arithmetic and is ignored gives fluent, wrong text.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvasir_rt.errors import ModelFileError, UnsupportedModel
from kvasir_rt.gguf_file import GgufFile

LAYERS_MAX = 1024
HIDDEN_MAX = 65_536
HEADS_MAX = 1024
FFN_MAX = 1 << 20
VOCAB_MAX = 4 << 20
CONTEXT_MAX = 16 << 20
EXPERTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Architecture:
    """What distinguishes the families; all are pre-norm transformers with rotary positions."""

    name: str
    has_interleaved_rope: bool = False  # The file stores rows of q and k in rotated pairs.
    has_qk_norm: bool = False
    has_experts: bool = False


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", has_interleaved_rope=True),
        Architecture("qwen2"),
        Architecture("qwen3", has_qk_norm=True),
        Architecture("qwen3moe", has_qk_norm=True, has_experts=True),
    )
}

# Keys that change the arithmetic, with the values under which they change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.sliding_window": (0,),
    "attention.scale": (0,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.logit_softcapping": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "use_parallel_residual": (False,),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),  # 1 is softmax.
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "pooling_type": (0,),
    "nextn_predict_layers": (0,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and constants of a model.

    Attributes:
        context: Most positions the model was trained for.
        ffn: Width of the dense feed-forward layers; 0 in a mixture of experts.
        rope_scale: Positions are divided by this (linear scaling); 1.0 is none.
        experts, experts_used, expert_ffn: 0 in a dense model.
        is_tied: The output matrix is the embedding.
    """

    architecture: Architecture
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rope_base: float
    rope_scale: float
    rms_epsilon: float
    experts: int
    experts_used: int
    expert_ffn: int
    is_tied: bool

    @classmethod
    def of(cls, gguf: GgufFile) -> Self:
        """The shape of an opened model.

        Raises:
            UnsupportedModel: An architecture or feature that is not implemented, by name.
            ModelFileError: A key is missing, of another type, or out of range.
        """
        keys = _Keys(gguf)
        architecture = keys.architecture()
        hidden = keys.whole("embedding_length", HIDDEN_MAX)
        heads = keys.whole("attention.head_count", HEADS_MAX)
        kv_heads = keys.whole("attention.head_count_kv", HEADS_MAX, default=heads)
        head_dim = keys.whole("attention.key_length", HIDDEN_MAX, default=hidden // heads)
        keys.check_heads(heads, kv_heads, head_dim)
        keys.check_neutral()
        has_experts = architecture.has_experts
        experts = keys.whole("expert_count", EXPERTS_MAX) if has_experts else 0
        if not has_experts and keys.whole("expert_count", EXPERTS_MAX, default=0, least=0):
            raise UnsupportedModel(
                f"{gguf.path}: {architecture.name} with experts is not supported; "
                "mixtures of experts: qwen3moe"
            )
        return cls(
            architecture=architecture,
            layers=keys.whole("block_count", LAYERS_MAX),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=0 if has_experts else keys.whole("feed_forward_length", FFN_MAX),
            vocab=_vocab(gguf, hidden),
            context=keys.whole("context_length", CONTEXT_MAX),
            rope_base=keys.real("rope.freq_base", default=10_000.0, least=1.0),
            rope_scale=keys.rope_scale(),
            rms_epsilon=keys.real("attention.layer_norm_rms_epsilon", default=None, least=0.0),
            experts=experts,
            experts_used=keys.whole("expert_used_count", experts) if has_experts else 0,
            expert_ffn=keys.whole("expert_feed_forward_length", FFN_MAX) if has_experts else 0,
            is_tied="output.weight" not in gguf.tensors,
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of K (or of V) per token and layer."""
        return self.kv_heads * self.head_dim


class _Keys:
    """Reads keys below the architecture's name, with ranges."""

    def __init__(self, gguf: GgufFile) -> None:
        self._path: Path = gguf.path
        self._metadata = gguf.metadata
        self._prefix = ""

    def architecture(self) -> Architecture:
        name = self._metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelFileError(f"{self._path}: the key 'general.architecture' is missing")
        if name not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self._path}: architecture {name[:64]!r} is not supported; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        self._prefix = name
        return ARCHITECTURES[name]

    def whole(self, key: str, most: int, *, default: int | None = None, least: int = 1) -> int:
        name = f"{self._prefix}.{key}"
        value = self._metadata.get(name, default)
        if value is None:
            raise ModelFileError(f"{self._path}: the key {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedModel(
                f"{self._path}: {name!r} must be one whole number; values per layer are not "
                "supported"
            )
        if not least <= value <= most:
            raise ModelFileError(
                f"{self._path}: {name!r} is {value}; it must be from {least} to {most}"
            )
        return value

    def real(self, key: str, *, default: float | None, least: float) -> float:
        name = f"{self._prefix}.{key}"
        value = self._metadata.get(name, default)
        if value is None:
            raise ModelFileError(f"{self._path}: the key {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileError(f"{self._path}: {name!r} must be one number")
        if not math.isfinite(value) or value < least:
            raise ModelFileError(
                f"{self._path}: {name!r} is {value}; it must be finite and at least {least}"
            )
        return float(value)

    def check_heads(self, heads: int, kv_heads: int, head_dim: int) -> None:
        if heads % kv_heads:
            raise ModelFileError(
                f"{self._path}: {heads} query heads cannot share {kv_heads} KV heads evenly"
            )
        if head_dim % 2:
            raise ModelFileError(f"{self._path}: a head has {head_dim} elements; it must be even")
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := self.whole(key, HIDDEN_MAX, default=head_dim)) != head_dim:
                raise UnsupportedModel(
                    f"{self._path}: {self._prefix}.{key} is {other} where heads have {head_dim} "
                    "elements; only equal sizes are supported"
                )

    def check_neutral(self) -> None:
        for key, neutral in NEUTRAL.items():
            value = self._metadata.get(f"{self._prefix}.{key}")
            if value is not None and (
                not isinstance(value, int | float | bool) or value not in neutral
            ):
                raise UnsupportedModel(
                    f"{self._path}: {self._prefix}.{key} is {str(value)[:40]}, "
                    "which is not supported; it would change the results"
                )

    def rope_scale(self) -> float:
        kind = self._metadata.get(f"{self._prefix}.rope.scaling.type", "none")
        old = self.real("rope.scale_linear", default=1.0, least=0.0) or 1.0
        if kind == "none":
            return old
        if kind != "linear":
            raise UnsupportedModel(
                f"{self._path}: {self._prefix}.rope.scaling.type {str(kind)[:40]!r} is not "
                "supported; supported are none and linear"
            )
        return self.real("rope.scaling.factor", default=old, least=1e-6)


def _vocab(gguf: GgufFile, hidden: int) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(
            f"{gguf.path}: tensor 'token_embd.weight' is missing; the model needs it"
        )
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise ModelFileError(
            f"{gguf.path}: tensor 'token_embd.weight' has shape {list(embedding.shape)}; "
            f"the model's metadata asks for [vocabulary, {hidden}]"
        )
    if embedding.shape[0] > VOCAB_MAX:
        raise ModelFileError(
            f"{gguf.path}: the vocabulary has {embedding.shape[0]} tokens; the limit is {VOCAB_MAX}"
        )
    return embedding.shape[0]
