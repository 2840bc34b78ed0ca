"""A model's shape, and what follows from it: bytes of weights and KV, and which matrices run.

A layer is the decoder block of llama, qwen and mixtral: normalise, project to q, k and v, attend,
project back, normalise, gated feed-forward (dense, or routed experts).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir_core.errors import ScenarioError

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario

NEEDED = ("hidden", "heads", "vocab")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Widths of one model; `experts` 0 means a dense feed-forward block of width `ffn`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    dtype: str
    element_bytes: int
    experts: int = 0
    experts_used: int = 0
    expert_ffn: int = 0

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each dense matrix of a layer; experts are not among them."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = ((self.hidden, query + 2 * key_value), (query, self.hidden))
        if self.experts:
            return (*attention, (self.hidden, self.experts))  # The router.
        return (*attention, (self.hidden, 2 * self.ffn), (self.ffn, self.hidden))

    @property
    def expert_bytes(self) -> int:
        """Weights of one routed expert: gate, up and down."""
        return 3 * self.hidden * self.expert_ffn * self.element_bytes

    @property
    def layer_bytes(self) -> int:
        """Weights of one layer, with all its experts."""
        dense = sum(inputs * outputs for inputs, outputs in self.matrices) + 2 * self.hidden
        return dense * self.element_bytes + self.experts * self.expert_bytes

    @property
    def vocabulary_bytes(self) -> int:
        """The embedding at the head, or the output matrix at the tail: each holds its own copy."""
        return self.vocab * self.hidden * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        """KV of one position in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    def stage_bytes(self, layers: int, *, is_head: bool, is_tail: bool) -> int:
        """Weights that a stage of so many layers holds."""
        return layers * self.layer_bytes + (is_head + is_tail) * self.vocabulary_bytes


def shape_from(scenario: "Scenario") -> ModelShape:
    """The shape that a scenario's `model` section describes.

    Raises:
        ScenarioError: A width is missing; the message names them all.
    """
    model = scenario.model
    needed = [*NEEDED, *(("expert_ffn",) if model.experts else ("ffn",))]
    missing = [name for name in needed if getattr(model, name) is None]
    if missing:
        raise scenario.error(
            f"model.{missing[0]}",
            f"missing; this cost model needs the shape: give {', '.join(missing)}, or a preset",
        )
    heads, hidden = model.heads or 1, model.hidden or 1
    if model.head_dim is None and hidden % heads:
        raise ScenarioError(
            f"model.head_dim is missing and hidden {hidden} is no multiple of heads {heads}"
        )
    return ModelShape(
        layers=model.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=model.kv_heads or heads,
        head_dim=model.head_dim or hidden // heads,
        ffn=model.ffn or 0,
        vocab=model.vocab or 1,
        dtype=model.dtype,
        element_bytes=model.element_bytes,
        experts=model.experts or 0,
        experts_used=model.experts_used or 0,
        expert_ffn=model.expert_ffn or 0,
    )
