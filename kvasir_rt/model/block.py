"""One transformer layer: attention with rotary positions, then a feed-forward or experts."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_rt.model.attention import Batch
from kvasir_rt.model.linear import Linear, Numerics
from kvasir_rt.model.moe import MoeBlock, feed_forward
from kvasir_rt.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    norm: Tensor  # [hidden]
    qkv: Linear  # [rows, hidden] -> [rows, (heads + 2 * kv_heads) * head_dim]
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim], of q then k
    output: Linear


@dataclass(frozen=True, slots=True)
class DenseWeights:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention: AttentionWeights
    ffn_norm: Tensor
    ffn: DenseWeights | MoeBlock


class Rotary:
    """Cosines and sines of positions, in the form `x * cos + roll(x) * sin`."""

    def __init__(self, shape: ModelShape, factors: Tensor | None, numerics: Numerics) -> None:
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        rates = 1.0 / (shape.rope_base**half) / shape.rope_scale
        if factors is not None:
            rates = rates / factors
        self._rates = rates.to(numerics.device)
        self._dtype = numerics.compute

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[rows, 1, head_dim]` each; the sines carry the rotation's signs."""
        angles = positions.float().unsqueeze(1) * self._rates
        cosines, sines = angles.cos(), angles.sin()
        return (
            torch.cat((cosines, cosines), dim=1).unsqueeze(1).to(self._dtype),
            torch.cat((-sines, sines), dim=1).unsqueeze(1).to(self._dtype),
        )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last dimension.

    On the CPU the library's own is eight passes; this is half the time at decode widths.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return functional.rms_norm(x, weight.shape[-1:], None, epsilon).mul_(weight)
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = scale.square_().mul_(1.0 / x.shape[-1]).add_(epsilon).rsqrt_()
    return torch.mul(x, scale).mul_(weight)


def attend(
    weights: AttentionWeights,
    shape: ModelShape,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    batch: Batch,
    layer: int,
) -> Tensor:
    """`x` plus its attention: `[rows, hidden]`."""
    rotated_heads = shape.heads + shape.kv_heads
    qkv = weights.qkv(rms_norm(x, weights.norm, shape.rms_epsilon))
    qkv = qkv.view(len(x), rotated_heads + shape.kv_heads, shape.head_dim)
    heads = qkv[:, :rotated_heads]
    if weights.qk_norm is not None:
        heads.copy_(rms_norm(heads, weights.qk_norm, shape.rms_epsilon))
    cosines, sines = angles
    rolled = heads.roll(shape.head_dim // 2, -1)
    heads.mul_(cosines).addcmul_(rolled, sines)
    mixed = batch.attend(layer, qkv[:, : shape.heads], qkv[:, shape.heads :])
    return weights.output(mixed).add_(x)


def dense(weights: DenseWeights, x: Tensor, normalised: Tensor) -> Tensor:
    """`x` plus its feed-forward."""
    return feed_forward(normalised, weights.gate_up, weights.down).add_(x)
