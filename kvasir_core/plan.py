"""The plan: what is fixed before anything is loaded, and the sizes that follow from it.

Every message in the ring has a largest size that depends on the plan alone, so a receiver can
refuse a larger one before it reads it. A plan has a digest; peers with another one are refused.
"""

import hashlib
from dataclasses import dataclass, fields
from itertools import pairwise

from kvasir_core.errors import PlanError

STAGES_MAX = 1024  # A hop costs tens of microseconds; no ring of this length is useful.
WIDTH_MAX = 1 << 20  # Rows of one micro-batch; far above any useful chunk.
LOGPROBS_MAX = 20  # Alternatives per output row, as the OpenAI API allows.
RESULT_ROW_BYTES = 4 + 4 + 4 + LOGPROBS_MAX * 8  # Token, its log-probability, count, alternatives.


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A ring's fixed numbers. Construction refuses what contradicts itself.

    Attributes:
        layers: Per stage, its layers `(start, stop)`, half-open, contiguous from 0.
        row_width: Most rows in one micro-batch.
        micro_batch_width: Most spans (requests) in one micro-batch.
        window: Open micro-batches; the start value if `window_auto`.
        window_max: Bound of `window_auto`; equals `window` otherwise.
        running_max: Most requests admitted and unfinished.
        context: Most positions (prompt + output) of one request.
        kv_tokens: Per stage, KV capacity in tokens; rounded down to blocks.
        kv_block: Tokens per block.
        credits: Input slots of each stage; None is unbounded.
        hidden: Elements of one boundary row.
        element_bytes: Bytes of one boundary element.

    Raises:
        PlanError: With both numbers, before anything is loaded.
    """

    layers: tuple[tuple[int, int], ...]
    row_width: int
    micro_batch_width: int
    window: int
    window_max: int
    running_max: int
    context: int
    kv_tokens: tuple[int, ...]
    window_auto: bool = False
    kv_block: int = 16
    credits: int | None = 2
    hidden: int = 1
    element_bytes: int = 2
    packer: str = "cohort"
    chunked_prefill: bool = True
    prefill_rows_max: int | None = None  # Per micro-batch while any decode is live.
    cohort_wait_ns: int = 2_000_000  # A lone decode-only micro-batch may wait so long to fill.

    def __post_init__(self) -> None:
        self._check_layers()
        for name in (
            "row_width", "micro_batch_width", "window", "window_max", "running_max", "context",
            "kv_block", "hidden", "element_bytes",
        ):  # fmt: skip
            value = getattr(self, name)
            if not 1 <= value <= WIDTH_MAX:
                raise PlanError(f"{name} is {value}; it must be from 1 to {WIDTH_MAX}")
        if self.credits is not None and self.credits < 1:
            raise PlanError(f"credits is {self.credits}; it must be at least 1, or unbounded")
        if self.window > self.window_max:
            raise PlanError(f"window {self.window} is above window_max {self.window_max}")
        if len(self.kv_tokens) != self.stages:
            raise PlanError(f"kv_tokens has {len(self.kv_tokens)} entries for {self.stages} stages")
        if self.kv_blocks < 1:
            raise PlanError(
                f"kv_tokens {min(self.kv_tokens)} is less than one block of {self.kv_block}"
            )
        if not self.chunked_prefill and self.row_width < self.context:
            raise PlanError(
                f"without chunked prefill the row width must hold a whole prompt: row_width "
                f"{self.row_width} is less than context {self.context}"
            )
        if self.prefill_rows_max is not None and self.prefill_rows_max < 1:
            raise PlanError(f"prefill_rows_max is {self.prefill_rows_max}; it must be at least 1")
        if self.cohort_wait_ns < 0:
            raise PlanError(f"cohort_wait_ns is {self.cohort_wait_ns}; it must be at least 0")

    def _check_layers(self) -> None:
        if not 2 <= self.stages <= STAGES_MAX:
            raise PlanError(
                f"a ring has from 2 to {STAGES_MAX} stages, not {self.stages}: "
                "head and tail are different roles"
            )
        expected = 0
        for stage, (start, stop) in enumerate(self.layers):
            if start != expected or stop <= start:
                raise PlanError(
                    f"stage {stage} has layers [{start}, {stop}); it must start at {expected} "
                    "and hold at least one layer"
                )
            expected = stop

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def kv_blocks(self) -> int:
        """Blocks of the scarcest stage; every stage holds KV for the same tokens."""
        return min(self.kv_tokens) // self.kv_block

    @property
    def boundary_bytes_max(self) -> int:
        """Bytes of the largest boundary: `hidden[row_width, hidden]`."""
        return self.row_width * self.hidden * self.element_bytes

    @property
    def result_bytes_max(self) -> int:
        """Bytes of the largest tail result: at most one output row per span."""
        return min(self.micro_batch_width, self.row_width) * RESULT_ROW_BYTES

    @property
    def wants_stage_times(self) -> bool:
        """Whether the ring decides by measured stage times, so that shells should report them."""
        return self.window_auto or (self.packer == "cohort" and self.cohort_wait_ns > 0)

    def why_never(self, positions: int) -> str:
        """Why a request of so many positions (prompt + output) can never run; empty if it can."""
        if positions > self.context:
            return f"prompt and output need {positions} positions; the context is {self.context}"
        need = blocks_for(positions, self.kv_block)
        if need > self.kv_blocks:
            return f"prompt and output need {need} KV blocks; a stage holds only {self.kv_blocks}"
        return ""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over every field, the same in every process and run."""
        text = ";".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return hashlib.sha256(text.encode()).hexdigest()


def blocks_for(rows: int, block: int) -> int:
    """Blocks that hold so many rows."""
    return -(-rows // block)


def split_evenly(layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Layers per stage as even as can be: contiguous, disjoint, the remainder spread from the head.

    Raises:
        PlanError: More stages than layers, or none.
    """
    if not 1 <= stages <= layers:
        raise PlanError(f"{stages} stages cannot each hold one of {layers} layers")
    size, rest = divmod(layers, stages)
    edges = [k * size + min(k, rest) for k in range(stages + 1)]
    return tuple(pairwise(edges))
