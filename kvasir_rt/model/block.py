"""One transformer layer: attention with rotary positions, then a feed-forward or experts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_rt.model.attention import Batch
from kvasir_rt.model.linear import Linear, Numerics
from kvasir_rt.model.moe import MoeBlock, feed_forward
from kvasir_rt.model.shape import ModelShape


class Norm:
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last dimension.

    On the CPU the library's own is eight small passes. Here it is four: with n elements it equals
    `x / hypot(|x|, sqrt(n epsilon)) * (weight sqrt(n))`, at half the time for a few rows.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon
        self._is_split = weight.dtype == torch.float32 and weight.device.type == "cpu"
        if self._is_split:
            self._weight = weight * math.sqrt(weight.shape[-1])
            self._floor = torch.tensor(math.sqrt(weight.shape[-1] * epsilon))

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_split:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)
            return torch.div(x, length).mul_(self._weight)
        return functional.rms_norm(x, x.shape[-1:], None, self._epsilon).mul_(self._weight)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    norm: Norm
    qkv: Linear  # [rows, hidden] -> [rows, (heads + 2 * kv_heads) * head_dim]
    qk_norm: Norm | None  # Of every head of q, then of k.
    output: Linear


@dataclass(frozen=True, slots=True)
class DenseWeights:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention: AttentionWeights
    ffn_norm: Norm
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
    qkv = weights.qkv(weights.norm(x))
    qkv = qkv.view(len(x), rotated_heads + shape.kv_heads, shape.head_dim)
    heads = qkv[:, :rotated_heads]
    if weights.qk_norm is not None:
        heads.copy_(weights.qk_norm(heads))
    cosines, sines = angles
    rolled = heads.roll(shape.head_dim // 2, -1)
    heads.mul_(cosines).addcmul_(rolled, sines)
    mixed = batch.attend(layer, qkv[:, : shape.heads], qkv[:, shape.heads :])
    return weights.output(mixed).add_(x)


def dense(weights: DenseWeights, x: Tensor, normalised: Tensor) -> Tensor:
    """`x` plus its feed-forward."""
    return feed_forward(normalised, weights.gate_up, weights.down).add_(x)
