"""Fixed costs: a stage holds a micro-batch for `pass_s + per_token_s * rows`.

Nothing is measured here. It is the model for reasoning about the ring itself: equal stages,
one slow stage, laps that can be computed by hand.
"""

import math
from collections.abc import Sequence

from kvasir_core.errors import ScenarioError
from kvasir_core.microbatch import MicroBatch
from kvasir_core.units import NANOS_PER_SECOND, nanos
from kvasir_sim.costs.base import HOLD_NS_MAX, Provenance


class FixedCosts:
    """Per stage an affine function of the rows, rounded once to the nearest nanosecond."""

    provenance: Provenance = "assumed"

    def __init__(
        self, pass_s: Sequence[float], per_token_s: Sequence[float], turnaround_ns: int = 0
    ) -> None:
        """Takes seconds per pass and per row, one of each per stage, and the bridge's part.

        Raises:
            ScenarioError: A value is negative, not finite, or all of a stage's are zero-length.
        """
        for name, values in (("pass_s", pass_s), ("per_token_s", per_token_s)):
            for stage, value in enumerate(values):
                if not (math.isfinite(value) and 0 <= value * 1e9 <= HOLD_NS_MAX):
                    raise ScenarioError(
                        f"stage {stage}: {name} is {value}; it must be from 0 to "
                        f"{HOLD_NS_MAX / 1e9:.0f} seconds"
                    )
        self.turnaround_ns = turnaround_ns
        self._stages = tuple(zip(pass_s, per_token_s, strict=True))
        self._by_rows: dict[int, list[int]] = {}

    def holds(self, micro_batch: MicroBatch) -> Sequence[int]:
        return self._for_rows(micro_batch.row_count)

    def _for_rows(self, rows: int) -> list[int]:
        known = self._by_rows.get(rows)
        if known is None:
            known = self._by_rows[rows] = [
                nanos(pass_s + per_token_s * rows) for pass_s, per_token_s in self._stages
            ]
        return known

    def predict(self, decodes: int, decode_context: int, chunk_rows: int, chunk_start: int) -> int:
        del decode_context, chunk_start  # A fixed cost knows no context.
        return max(self._for_rows(decodes + chunk_rows))

    def describe(self) -> list[str]:
        lines = ["costs: fixed, assumed (not measured): pass_s + per_token_s * rows per stage"]
        lines += [
            f"stage {stage}: {pass_s:g} s a pass, {per_token_s:g} s a row"
            for stage, (pass_s, per_token_s) in enumerate(self._stages)
        ]
        if self.turnaround_ns:
            lines.append(f"bridge: {self.turnaround_ns / NANOS_PER_SECOND:g} s a lap")
        return lines
