"""Section `costs`: how long a stage holds a micro-batch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from kvasir_scenario.schema_ring import Stage
from kvasir_scenario.schema_types import Factor, Hold, PathText, PositiveShare, Section

_Multiple = Annotated[int, Field(ge=1, le=1 << 16)]


class FixedCosts(Section):
    """`pass_s + pass_s_per_layer * layers + per_token_s * rows`; stages may have their own."""

    kind: Literal["fixed"]
    pass_s: Hold = 1.0
    per_token_s: Hold = 0.0
    pass_s_per_layer: Hold = 0.0
    """Seconds more for each layer of the stage; with it `pass_s` is 0 unless given."""
    turnaround_s: Hold = 0.0
    """From a micro-batch's return to the next one's launch: what the bridge does."""

    @model_validator(mode="before")
    @classmethod
    def _layers_make_the_pass(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "pass_s_per_layer" in data and "pass_s" not in data:
            return {**data, "pass_s": 0.0}
        return data


class FixedTimes(NamedTuple):
    """What one stage takes, in seconds."""

    pass_s: float
    pass_s_per_layer: float
    per_token_s: float


def fixed_times(costs: FixedCosts, stage: Stage) -> FixedTimes:
    """The stage's own figures, or the section's; its own time per layer replaces the pass too."""
    own_layer = stage.pass_s_per_layer
    pass_s = costs.pass_s if own_layer is None else 0.0
    return FixedTimes(
        pass_s if stage.pass_s is None else stage.pass_s,
        costs.pass_s_per_layer if own_layer is None else own_layer,
        costs.per_token_s if stage.per_token_s is None else stage.per_token_s,
    )


class TableCosts(Section):
    """Measured times of one layer block by rows, decode width and context (an .npz file)."""

    kind: Literal["table"]
    file: PathText
    """Arrays block_tokens_ms, kv_save_ms, attn_decode_ms, attn_prefill_ms, send_recv_ms."""
    rows_multiple: _Multiple = 8
    """Rows are rounded up to a multiple of this in block_tokens_ms and send_recv_ms."""
    kv_multiple: _Multiple = 64
    """Tokens of KV per entry of the attention tables."""
    several_factor: Factor = 1.1
    """On attention, for more than one decode; likewise for more than one prompt chunk."""


class RooflineCosts(Section):
    """Bytes over bandwidth or FLOPs over peak, whichever is longer; from shape and device."""

    kind: Literal["roofline"]
    matmul_efficiency: PositiveShare | None = None
    """Share of peak FLOP/s that dense layers reach; without it the device's figure."""
    attention_efficiency: PositiveShare | None = None
    """Share of peak FLOP/s that attention reaches in prefill."""
    bandwidth_efficiency: PositiveShare | None = None
    """Share of peak bandwidth that reading weights and KV reaches."""


class ProfileCosts(Section):
    """Hold times measured by `kvasir-rt profile`."""

    kind: Literal["profile"]
    file: PathText
    noise: bool = False
    """Draw holds from the measured spread (seeded) instead of its middle."""


Costs = Annotated[
    FixedCosts | TableCosts | RooflineCosts | ProfileCosts, Field(discriminator="kind")
]
