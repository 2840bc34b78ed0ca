"""Mixture-of-experts feed-forward: the router, and experts that may be computed elsewhere.

The router stays with the stage: softmax over all experts, the best k, renormalised *before* any
sharding, so that every pair (row, expert) carries its final weight and partial sums over disjoint
expert ranges simply add. `expert_sum` is that partial sum; the local backend uses it for all
experts, a remote worker for its range `[begin, end)`.

A backend may answer later. `ExpertBackend.start` returns a call; while it is not done, a stage may
compute another micro-batch (see `StageModel.steps`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_core.microbatch import MicroBatch
from kvasir_rt.model.linear import Linear


class ExpertCall(Protocol):
    """An expert sum under way."""

    @property
    def is_done(self) -> bool: ...

    def result(self) -> Tensor:
        """`[rows, hidden]`, waiting for it if need be."""
        ...


@dataclass(frozen=True, slots=True)
class DoneCall:
    """A sum that was computed at once."""

    value: Tensor

    @property
    def is_done(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self.value


class ExpertBackend(Protocol):
    """Computes the routed experts of one stage's layers."""

    def start(
        self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor, mb: MicroBatch
    ) -> ExpertCall:
        """Begin the sum of `weights[r, j] * expert[chosen[r, j]](x[r])` over j.

        Args:
            layer: Number of the layer in the model.
            x: `[rows, hidden]`, normalised.
            chosen: `int64[rows, k]`, expert numbers, distinct in a row.
            weights: `[rows, k]` in the dtype of `x`, final.
            mb: The micro-batch that asks; a dispatch decision travels with it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Experts:
    """Packed experts `[begin, end)` of one layer."""

    begin: int
    gate_up: Sequence[Linear]  # Each `[n, hidden] -> [n, 2 * ffn]`, gate before up.
    down: Sequence[Linear]

    @property
    def end(self) -> int:
        return self.begin + len(self.down)


def expert_sum(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The partial sum of these experts, in expert order whatever the batch.

    Args:
        experts: A range of one layer's experts.
        x: `[rows, hidden]`.
        chosen: `int64[rows, k]`; experts outside the range contribute nothing.
        weights: `[rows, k]`.

    Returns:
        `[rows, hidden]`; zero where no chosen expert is in the range.
    """
    total = torch.zeros_like(x)
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    sorted_experts = flat[order]
    edges = torch.arange(experts.begin, experts.end + 1, device=x.device)
    bounds = torch.searchsorted(sorted_experts, edges).tolist()
    width = chosen.shape[1]
    flat_weights = weights.flatten()
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            continue
        pairs = order[start:stop]
        rows = pairs // width
        mixed = feed_forward(x[rows], experts.gate_up[index], experts.down[index])
        total.index_add_(0, rows, mixed.mul_(flat_weights[pairs].unsqueeze(1)))
    return total


def feed_forward(x: Tensor, gate_up: Linear, down: Linear) -> Tensor:
    """`down(silu(gate x) * up x)`: a dense layer, or one expert."""
    both = gate_up(x)
    half = both.shape[-1] // 2
    return down(functional.silu(both[:, :half]).mul_(both[:, half:]))


class LocalExperts:
    """All experts of a stage's layers, computed in this process."""

    def __init__(self, by_layer: dict[int, Experts]) -> None:
        self.by_layer = by_layer

    def start(
        self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor, mb: MicroBatch
    ) -> DoneCall:
        del mb
        return DoneCall(expert_sum(self.by_layer[layer], x, chosen, weights))


class MoeBlock:
    """One layer's router in front of a backend."""

    def __init__(self, layer: int, router: Linear, used: int, backend: ExpertBackend) -> None:
        self._layer = layer
        self._router = router
        self._used = used
        self.backend = backend

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and their final weights per row: `int64[rows, k]`, `[rows, k]` like `x`."""
        shares = self._router(x).float().softmax(dim=-1)
        best, chosen = shares.topk(self._used, dim=-1)
        return chosen, (best / best.sum(dim=-1, keepdim=True)).to(x.dtype)

    def start(self, x: Tensor, mb: MicroBatch) -> ExpertCall:
        chosen, weights = self.route(x)
        return self.backend.start(self._layer, x, chosen, weights, mb)
