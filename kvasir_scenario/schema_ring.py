"""Sections `ring` and `policy`: stages, widths, links, and how micro-batches are composed."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, Tag, model_validator

from kvasir_core.plan import STAGES_MAX, WIDTH_MAX
from kvasir_scenario.schema_model import LAYERS_MAX
from kvasir_scenario.schema_types import (
    AsTuple,
    Count,
    Hold,
    Name,
    Rate,
    Section,
    broken,
    choose,
    is_number,
)

WINDOW_MAX = 4096  # Open micro-batches; four per stage of the longest ring.

_Edge = Annotated[int, Field(ge=0, le=LAYERS_MAX)]
_Width = Annotated[int, Field(ge=1, le=WIDTH_MAX)]
_Places = Annotated[int, Field(ge=1, le=WINDOW_MAX)]
_Packer = Literal["drained", "greedy", "cohort", "sarathi"]
_WHY_TWO = "a ring has at least 2 stages: head and tail are different roles"


def _form(*words: str) -> Any:
    """Tells a number, a list, and the given words apart."""

    def tag_of(value: Any) -> str | None:
        if is_number(value):
            return "number"
        if isinstance(value, list | tuple):
            return "list"
        return value if isinstance(value, str) and value in words else None

    return tag_of


StageLayers = Annotated[
    Annotated[int, Field(ge=1, le=LAYERS_MAX), Tag("number")]
    | Annotated[tuple[_Edge, _Edge], AsTuple, Tag("list")]
    | Annotated[Literal["auto"], Tag("auto")],
    choose(_form("auto"), "it must be a number of layers, [start, stop), or auto"),
]


class Stage(Section):
    """One stage of the ring, and what differs from the ring's defaults."""

    layers: StageLayers | None = None
    """A count, [start, stop), or auto (the planner decides); without it as `ring.layers` says."""
    device: Name | None = None
    """Name of an entry of `devices`; without it `ring.device`."""
    pass_s: Hold | None = None
    """Costs `fixed`: seconds a micro-batch takes here; without it `costs.pass_s`."""
    pass_s_per_layer: Hold | None = None
    """Costs `fixed`: seconds more for each layer; with it the pass alone is 0 unless given."""
    per_token_s: Hold | None = None
    """Costs `fixed`: seconds more for each row; without it `costs.per_token_s`."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if isinstance(self.layers, tuple) and self.layers[0] >= self.layers[1]:
            start, stop = self.layers
            raise broken("layers", f"found [{start}, {stop}); it must hold at least one layer")
        return self


def _refuse_single(count: int) -> int:
    if count < 2:
        raise broken("", f"found {count}; {_WHY_TWO}")
    return count


def _refuse_short(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    if len(stages) < 2:
        raise broken("", f"found a list of {len(stages)}; {_WHY_TWO}")
    return stages


def _listed(kv_tokens: int | tuple[int, ...] | str) -> tuple[int, ...]:
    if isinstance(kv_tokens, tuple):
        return kv_tokens
    return (kv_tokens,) if isinstance(kv_tokens, int) else ()


class Link(Section):
    """A hop between neighbours: latency is pipelined, bytes over bandwidth queue on the link."""

    latency_s: Hold = 0.0
    bandwidth_bytes_per_s: Rate | None = None
    """null: bytes take no time."""
    occupies_sender: bool = False
    """The sending stage is busy until its boundary is out."""


class Ring(Section):
    """The pipeline: stages in order, the widths of the plan, and the links."""

    stages: Annotated[
        Annotated[
            int,
            Field(ge=1, le=STAGES_MAX, json_schema_extra={"minimum": 2}),
            AfterValidator(_refuse_single),
            Tag("number"),
        ]
        | Annotated[
            tuple[Stage, ...],
            AsTuple,
            Field(max_length=STAGES_MAX, json_schema_extra={"minItems": 2}),
            AfterValidator(_refuse_short),
            Tag("list"),
        ],
        choose(_form(), "it must be a number of stages (at least 2), or a list of stages"),
    ]
    """N: an even split of the layers; or a list, head first."""
    device: Name | None = None
    """Name of an entry of `devices`, for stages that name none."""
    layers: Literal["even", "auto"] = "even"
    """With `stages: N`: split evenly, or let the planner decide."""
    row_width: _Width = 512
    """Most rows (token positions) in one micro-batch."""
    micro_batch_width: _Width = 64
    """Most requests in one micro-batch."""
    window: Annotated[
        Annotated[_Places, Tag("number")] | Annotated[Literal["auto"], Tag("auto")],
        choose(_form("auto"), f"it must be a whole number from 1 to {WINDOW_MAX}, or auto"),
    ] = "auto"
    """Most micro-batches in the ring at once; auto follows measured holds up to window_max."""
    window_max: _Places | None = None
    """Bound of `window: auto`; without it 4 times the number of stages."""
    running_max: _Width = 256
    """Most requests admitted and unfinished."""
    kv_tokens: Annotated[
        Annotated[Count, Tag("number")]
        | Annotated[tuple[Count, ...], AsTuple, Field(max_length=STAGES_MAX), Tag("list")]
        | Annotated[Literal["unbounded"], Tag("unbounded")],
        choose(_form("unbounded"), "it must be a number of tokens, one per stage, or unbounded"),
    ] = "unbounded"
    """KV capacity in tokens, for every stage or one each; unbounded: running_max x context."""
    kv_block: _Width = 16
    """Tokens per block of KV."""
    credits: Annotated[
        Annotated[_Width, Tag("number")] | Annotated[Literal["unbounded"], Tag("unbounded")],
        choose(_form("unbounded"), "it must be a whole number of at least 1, or unbounded"),
    ] = 2
    """Input slots of each stage; without a free one the sender is blocked."""
    link: Link = Link()
    """Every hop that `links` and `return_link` do not describe."""
    links: Annotated[tuple[Link, ...], AsTuple, Field(max_length=STAGES_MAX)] | None = None
    """One per hop from stage to stage: stages - 1 entries."""
    return_link: Link | None = None
    """From the tail back to the head; without it as `link`."""
    prefix_cache: bool = False
    """Reuse KV of equal prefixes, where the trace carries prefix hashes (simulator only)."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        count = self.stage_count
        if self.links is not None and len(self.links) != count - 1:
            raise broken(
                "links",
                f"found {len(self.links)} links; {count} stages have {count - 1} hops "
                "(the way back from tail to head is return_link)",
            )
        if isinstance(self.kv_tokens, tuple) and len(self.kv_tokens) != count:
            raise broken(
                "kv_tokens", f"found {len(self.kv_tokens)} entries; there are {count} stages"
            )
        for index, tokens in enumerate(_listed(self.kv_tokens)):
            if tokens < self.kv_block:
                key = f"kv_tokens.{index}" if isinstance(self.kv_tokens, tuple) else "kv_tokens"
                raise broken(
                    key, f"found {tokens}; it must hold one block of kv_block ({self.kv_block})"
                )
        if self.window_max is not None and self.window != "auto" and self.window > self.window_max:
            raise broken(
                "window", f"found {self.window}; it must be at most window_max ({self.window_max})"
            )
        return self

    @property
    def stage_count(self) -> int:
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def hops(self) -> tuple[Link, ...]:
        """The links in order, one per stage: the return from tail to head is the last."""
        between = self.links if self.links is not None else (self.link,) * (self.stage_count - 1)
        return (*between, self.return_link or self.link)


class Policy(Section):
    """How micro-batches are composed."""

    packer: _Packer = "cohort"
    chunked_prefill: bool = True
    """false: a prompt enters whole, so row_width must hold the longest one."""
    prefill_rows_max: _Width | None = None
    """Most prompt rows in a micro-batch while any decode is live."""
    cohort_wait_s: Annotated[float, Field(ge=0, le=60)] = 0.002
    """How long a lone decode-only micro-batch may wait to fill its cohort."""
