"""Shapes of well-known models by name: `model: {preset: llama-3-8b}`.

The figures are those of the published configuration files, except the two marked as made up.
"""

from collections.abc import Mapping
from types import MappingProxyType

Shape = Mapping[str, int | str | bool]


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int
) -> Shape:
    return MappingProxyType(
        {
            "layers": layers,
            "context": context,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": hidden // heads,
            "ffn": ffn,
            "vocab": vocab,
            "dtype": "bfloat16",
        }
    )


def _with(shape: Shape, **changes: int | str | bool) -> Shape:
    return MappingProxyType({**shape, **changes})


MODEL_PRESETS: Mapping[str, Shape] = MappingProxyType(
    {
        "llama-3-8b": _dense(32, 4096, 32, 8, 14336, 128256, 8192),
        "llama-3-70b": _dense(80, 8192, 64, 8, 28672, 128256, 8192),
        "qwen2.5-7b": _dense(28, 3584, 28, 4, 18944, 152064, 32768),
        "qwen2.5-32b": _dense(64, 5120, 40, 8, 27648, 152064, 32768),
        "smollm2-135m": _with(_dense(30, 576, 9, 3, 1536, 49152, 8192), tied_embeddings=True),
        # Made up: a dense model of 45 layers, about 23 billion parameters, that splits unevenly.
        "dense-45-layers": _dense(45, 6144, 48, 8, 21504, 131072, 32768),
        "mixtral-8x7b": _with(
            _dense(32, 4096, 32, 8, 14336, 32000, 32768),
            experts=8,
            experts_used=2,
            expert_ffn=14336,
        ),
        "qwen3-30b-a3b": _with(
            _dense(48, 2048, 32, 4, 6144, 151936, 40960),
            head_dim=128,
            experts=128,
            experts_used=8,
            expert_ffn=768,
        ),
        "qwen3-235b-a22b": _with(
            _dense(94, 4096, 64, 4, 12288, 151936, 40960),
            head_dim=128,
            experts=128,
            experts_used=8,
            expert_ffn=1536,
        ),
        # Made up, about 122 billion parameters of which about 6 billion work on a token.
        "moe-122b": _with(
            _dense(48, 3072, 32, 4, 9216, 151936, 32768),
            head_dim=128,
            experts=256,
            experts_used=8,
            expert_ffn=1056,
        ),
    }
)

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Bytes of one element of a boundary or of the KV cache."""
