"""What a cost model is: the time each stage computes a micro-batch, and how sure we are of it.

Every model states its provenance. *Measured* numbers come from the very machine and model;
*fitted* ones from a formula whose constants were fitted to measurements; all else is *assumed*.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from kvasir_core.microbatch import MicroBatch

Provenance = Literal["assumed", "fitted", "measured"]

HOLD_NS_MAX = 10**15  # Eleven days for one pass: beyond it the numbers are a mistake in units.


class CostModel(Protocol):
    """The time each stage computes a micro-batch, in integer nanoseconds."""

    @property
    def provenance(self) -> Provenance:
        """How far the numbers can be trusted."""

    @property
    def turnaround_ns(self) -> int:
        """Work of the head per lap that no stage does: from a tail result to the next launch."""

    def holds(self, micro_batch: MicroBatch) -> Sequence[int]:
        """Per stage, the time it computes this micro-batch. The result must not be changed.

        Raises:
            ScenarioError: The micro-batch is outside what the model knows.
        """

    def predict(self, decodes: int, decode_context: int, chunk_rows: int, chunk_start: int) -> int:
        """The longest stage's time for decodes of summed context and one prompt chunk."""

    def describe(self) -> list[str]:
        """Sentences for the report: source, trust, and what was outside the known range."""
