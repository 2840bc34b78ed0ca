"""Sections `model` and `devices`: what is computed, and on what."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from kvasir_core.plan import WIDTH_MAX
from kvasir_scenario.presets import ELEMENT_BYTES, MODEL_PRESETS
from kvasir_scenario.schema_types import (
    Bytes,
    PathText,
    Price,
    Rate,
    Section,
    broken,
    did_you_mean,
)

LAYERS_MAX = 10_000  # The deepest published model has a few hundred.

Layers = Annotated[int, Field(ge=1, le=LAYERS_MAX)]
Width = Annotated[int, Field(ge=1, le=WIDTH_MAX)]
DType = Literal["float32", "bfloat16", "float16"]


def _any_source(schema: dict[str, Any]) -> None:
    """For editors: layers may come from a preset or a file."""
    schema["required"].remove("layers")
    schema["anyOf"] = [{"required": [key]} for key in ("layers", "preset", "path")]


class Model(Section):
    """The model's shape: by `preset`, from a GGUF file (`path`), or key by key.

    Keys that are given win over the preset's. Only `layers` is needed where the costs do not
    depend on the shape (kinds `fixed` and `table`).
    """

    model_config = ConfigDict(json_schema_extra=_any_source)

    preset: Annotated[str, Field(json_schema_extra={"enum": [*MODEL_PRESETS]})] | None = None
    """Name of a known model, for example llama-3-8b."""
    path: PathText | None = None
    """A GGUF file: `kvasir-rt` serves it, `kvasir-sim` reads its shape."""
    layers: Layers
    """Transformer layers."""
    context: Width = 4096
    """Most positions (prompt + output) of one request."""
    hidden: Width | None = None
    """Elements of one row of hidden states."""
    heads: Width | None = None
    """Query heads."""
    kv_heads: Width | None = None
    """Key and value heads."""
    head_dim: Width | None = None
    """Elements of one head; without it hidden / heads."""
    ffn: Width | None = None
    """Inner width of the dense feed-forward block."""
    vocab: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Entries of the vocabulary."""
    tied_embeddings: bool = False
    """The output matrix is the embedding (both the head and the tail then hold it)."""
    dtype: DType = "bfloat16"
    """Type of weights, KV and boundaries."""
    experts: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Routed experts per layer; none for a dense model."""
    experts_used: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Experts that each token uses (top-k)."""
    expert_ffn: Width | None = None
    """Inner width of one expert."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("preset"), str):
            return data
        shape = MODEL_PRESETS.get(data["preset"])
        if shape is None:
            hint = did_you_mean(data["preset"], MODEL_PRESETS)
            raise broken("preset", f"found {data['preset']!r}, which is no known model; {hint}")
        return {**shape, **{key: value for key, value in data.items() if value is not None}}

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise broken(
                "kv_heads",
                f"found {self.kv_heads}; it must divide heads ({self.heads}) without remainder",
            )
        mixture = (self.experts, self.experts_used, self.expert_ffn)
        if any(mixture) and not (self.experts and self.experts_used):
            missing = "experts_used" if self.experts else "experts"
            raise broken(missing, "missing; a mixture of experts needs experts and experts_used")
        if self.experts and self.experts_used and self.experts_used > self.experts:
            raise broken(
                "experts_used",
                f"found {self.experts_used}; it must be at most experts ({self.experts})",
            )
        return self

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of `dtype`."""
        return ELEMENT_BYTES[self.dtype]


class Device(Section):
    """A machine that runs stages: by catalogue name, by numbers, or a name with corrections."""

    preset: str | None = None
    """Catalogue name, for example a100-80g."""
    flops: Rate | None = None
    """Peak dense FLOP/s at the model's dtype."""
    bandwidth_bytes_per_s: Rate | None = None
    """Peak memory bandwidth, bytes per second."""
    memory_bytes: Bytes | None = None
    """Memory for weights and KV."""
    overhead_s: Annotated[float, Field(ge=0, le=1)] | None = None
    """Time per micro-batch that no formula covers (launches, scheduling)."""
    price_per_hour: Price | None = None
    """US dollars, for `kvasir-sim capacity`; `--price` goes before it."""

    @model_validator(mode="after")
    def _check_is_described(self) -> Self:
        if self.preset is None and (self.flops is None or self.bandwidth_bytes_per_s is None):
            missing = "flops" if self.flops is None else "bandwidth_bytes_per_s"
            raise broken(
                missing, "missing; a device needs a preset, or flops and bandwidth_bytes_per_s"
            )
        return self
