"""Costs measured on the machine itself, interpolated (`kvasir_scenario.profile` is the file).

A body's hold for d decodes of mean context c and prompt chunks of r[i] rows behind s[i] positions,
n rows in all, is put together from the three measured tables, linear between their points:

    H = rows(n) + (decode(d, c) - rows(d)) + sum over i of (prefill(r[i], s[i]) - rows(r[i]))

so that decodes alone, and one chunk alone, are exactly what was measured, and a mixture pays for
its weights once and for each span's attention. A stage of L layers takes
`pass_ns + (H - pass_ns) * L / body.layers`; head and tail add their own lines, and each layer with
routed experts what its rows' different choices cost (`measured_experts`).

Where the profile says what stages of one machine cost each other, a hold grows with the share of
it in which others compute, and where it says what a rest costs, with the rest before it
(`kvasir_sim.crowding`).

Outside the measured range the last slope goes on upwards, and the first value downwards; such
lookups are counted and the report says how many. With `noise` each hold is drawn around its
middle with the measured relative spread (normal, seeded by `run.seed`).
"""

from collections.abc import Sequence
from random import Random

from kvasir_core.errors import ScenarioError
from kvasir_core.microbatch import MicroBatch
from kvasir_core.plan import Plan
from kvasir_scenario.profile import Profile
from kvasir_sim.costs.base import Provenance
from kvasir_sim.costs.measured_experts import MeasuredExperts, Mixture
from kvasir_sim.costs.plane import LineTable, PlaneTable
from kvasir_sim.crowding import Crowding, Resting

NOISE_FACTOR_MIN = 0.2  # A normal tail must not make time run backwards.


class ProfileCosts:
    """Interpolated holds; see the module for the formula."""

    provenance: Provenance = "measured"

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        source: str,
        *,
        mixture: Mixture | None = None,
        noise_seed: int | None = None,
    ) -> None:
        """Without `noise_seed` each hold is its measured middle.

        Args:
            plan: Of the ring.
            profile: Of this model and machine.
            source: Its file's name, for sentences.
            mixture: How rows choose experts, for a mixture of experts.
            noise_seed: Seeds the spread.
        """
        body = profile.body
        self._profile = profile
        self._source = source
        self._rows = LineTable(body.rows)
        self._decode = PlaneTable(body.decode)
        self._prefill = PlaneTable(body.prefill)
        self._head = LineTable(profile.head)
        self._tail = LineTable(profile.tail)
        self._pass_ns = body.pass_ns
        self._layers = [stop - start for start, stop in plan.layers]
        self._is_mixture = mixture is not None
        self.experts: MeasuredExperts | None = None
        if mixture is not None and profile.experts is not None:
            self.experts = MeasuredExperts(profile.experts, mixture)
        self._scales = [(stop - start) / body.layers for start, stop in plan.layers]
        self._random = None
        if noise_seed is not None:
            self._random = Random(f"costs.profile {noise_seed}")  # noqa: S311 - seeded noise.
        self.turnaround_ns = profile.lap.bridge_ns
        self.crowding: Crowding | None = None
        if profile.crowd is not None:
            self.crowding = Crowding(plan, profile.crowd)
        self.resting: Resting | None = None
        if profile.rest is not None:
            self.resting = Resting(plan, profile.rest)
        self.extrapolated = 0
        self.lookups = 0

    @property
    def widths_max(self) -> tuple[int, int]:
        """Most decodes and most rows that were measured."""
        return self._decode.first.sizes[-1], self._rows.axis.sizes[-1]

    def holds(self, micro_batch: MicroBatch) -> Sequence[int]:
        decodes = micro_batch.decodes
        middle, spread, is_outside = self._holds(
            micro_batch.row_count,
            decodes,
            micro_batch.decode_context,
            micro_batch.starts[decodes:],
            micro_batch.rows[decodes:],
            decodes + len(micro_batch.completing),
        )
        self.lookups += 1
        self.extrapolated += is_outside
        middle = self._grown(middle, micro_batch.row_count)
        if self._random is not None:
            gauss = self._random.gauss
            middle = [hold * max(gauss(1.0, spread), NOISE_FACTOR_MIN) for hold in middle]
        return [round(hold) for hold in middle]

    def note(self, stamps: list[int], slower: Sequence[float]) -> None:
        """A lap has returned: four stamps per stage, and how much slowed each stage is."""
        if self.crowding is not None:
            self.crowding.note(stamps, slower)
        if self.resting is not None:
            self.resting.note(stamps)

    def _grown(self, holds: list[float], rows: int) -> list[float]:
        if self.crowding is not None:
            holds = self.crowding.grown(holds, rows)
        if self.resting is not None:
            holds = self.resting.grown(holds, rows)
        return holds

    def _holds(
        self,
        rows: int,
        decodes: int,
        context: int,
        starts: Sequence[int],
        chunks: Sequence[int],
        outputs: int,
    ) -> tuple[list[float], float, bool]:
        body, is_outside = self._rows.at(rows)
        spread = 0.0
        if decodes:
            ns, spread, outside = self._decode.at(decodes, context / decodes)
            body += ns - self._rows.at(decodes)[0]
            is_outside |= outside
        for start, count in zip(starts, chunks, strict=True):
            ns, of_chunk, outside = self._prefill.at(count, start)
            body += ns - self._rows.at(count)[0]
            spread = max(spread, of_chunk)
            is_outside |= outside
        layers_ns = max(body - self._pass_ns, 0.0)
        holds = [self._pass_ns + layers_ns * scale for scale in self._scales]
        if self.experts is not None:
            more = self.experts.extra_ns(rows)
            holds = [hold + n * more for hold, n in zip(holds, self._layers, strict=True)]
        extra, outside = self._head.at(rows)
        holds[0] += extra
        is_outside |= outside
        if outputs:
            extra, outside = self._tail.at(outputs)
            holds[-1] += extra
            is_outside |= outside
        return holds, spread, is_outside

    def predict(self, decodes: int, decode_context: int, chunk_rows: int, chunk_start: int) -> int:
        starts, chunks = ((chunk_start,), (chunk_rows,)) if chunk_rows else ((), ())
        rows = decodes + chunk_rows
        holds = self._holds(rows, decodes, decode_context, starts, chunks, decodes)[0]
        return round(max(self._grown(holds, rows)))

    def describe(self) -> list[str]:
        profile = self._profile
        rows, decode, prefill = self._rows.axis, self._decode, self._prefill
        lines = [
            (
                f"costs: measured profile {self._source}: {profile.model}, {profile.dtype}, on "
                f"{profile.machine}, {profile.repeats} repeats, commit {profile.commit}"
            ),
            (
                f"measured range: rows {rows.sizes[0]}-{rows.sizes[-1]}, decodes "
                f"{decode.first.sizes[0]}-{decode.first.sizes[-1]} at context "
                f"{decode.second.sizes[0]}-{decode.second.sizes[-1]}, chunks "
                f"{prefill.first.sizes[0]}-{prefill.first.sizes[-1]} behind "
                f"{prefill.second.sizes[0]}-{prefill.second.sizes[-1]}"
            ),
        ]
        if profile.rescaled is not None:
            factors = [now / then for _, then, now in profile.rescaled]
            lines.append(
                "scaled to the machine's speed of a later moment: holds take "
                f"{min(factors):.2f} to {max(factors):.2f} times as long"
            )
        if self._profile.experts is None and self._is_mixture:
            lines.append(
                "the profile has no table of experts: rows are taken to choose the same ones, "
                "which is too fast; measure it again"
            )
        if self.crowding is not None:
            lines.append(self.crowding.describe())
        if self.resting is not None:
            lines.append(self.resting.describe())
        if self._random is not None:
            lines.append("holds are drawn from the measured spread (seeded)")
        if self.extrapolated:
            lines.append(
                f"extrapolated: {self.extrapolated} of {self.lookups} micro-batches lie outside "
                "the measured range; trust them less, or profile wider"
            )
        return lines


def check_profile(plan: Plan, profile: Profile, dtype: str, source: str) -> None:
    """Refuses a profile of another model or type.

    Raises:
        ScenarioError: With both values.
    """
    is_served = dtype in {"float32", "bfloat16"}
    again = f": measure with `kvasir-rt profile --dtype {dtype}`" if is_served else ""
    wanted_hidden = profile.hidden if plan.hidden == 1 else plan.hidden  # 1: not given.
    for what, measured, wanted, remedy in (
        ("model.layers", profile.model_layers, plan.layers[-1][1], ""),
        ("model.hidden", profile.hidden, wanted_hidden, ""),
        ("dtype", profile.dtype, dtype, again),
    ):
        if measured != wanted:
            raise ScenarioError(
                f"{source}: {what} of the profile is {measured}, of the scenario {wanted}; "
                f"a profile is worth nothing for another model or type{remedy}"
            )
