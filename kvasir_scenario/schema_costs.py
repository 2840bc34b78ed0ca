"""Section `costs`: how long a stage holds a micro-batch."""

from typing import Annotated, Literal

from pydantic import Field

from kvasir_scenario.schema_types import Factor, PathText, PositiveShare, Seconds, Section

_Multiple = Annotated[int, Field(ge=1, le=1 << 16)]


class FixedCosts(Section):
    """`pass_s + per_token_s * rows`; a stage may have its own figures."""

    kind: Literal["fixed"]
    pass_s: Seconds = 1.0
    per_token_s: Seconds = 0.0


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
