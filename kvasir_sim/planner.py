"""The planner: layers per stage, order, window, widths and KV for given devices and links.

It minimises the longest time that any stage or link is taken by the *average* micro-batch of the
scenario's load: so many decodes at the mean context, and the prompt rows that come with them
(prompt tokens / output tokens for each decode). Head, tail, sending that occupies the stage, slow
stages and memory count.

1. **Split** (`kvasir_sim.split`): exact for a given order and micro-batch.
2. **Order**: layers are alike, so the order matters only through who is head and who is tail. Each
   pair of *kinds* of stage is tried for the two, the others keep their order: no permutation is
   better, since it has the same holds as one of those tried. Where links, KV or faults are given
   for each place, the order is part of the question and stays.
3. **Window**: ceil((sum of holds and links + turnaround) / longest hold), as in DESIGN.md.
4. **Widths**: the micro-batch width lets a full window hold all running requests; the row width is
   the smallest at which a prompt chunk runs at 90 % of the best rate, and less if `slo.tpot_s`
   asks for shorter laps. Only `roofline` and `profile` know enough to choose.
5. **KV**: what the load needs, as far as memory allows; then all that fits at the scarcest stage.

Window, widths and KV depend on the split and the split on them: steps 1-5 repeat until nothing
changes, at most `ROUNDS_MAX` times. Whatever the scenario states is kept.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvasir_core.errors import PlanError
from kvasir_core.plan import split_evenly
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_scenario.planning import LayerRanges
from kvasir_scenario.schema_ring import WINDOW_MAX, Stage
from kvasir_sim.plan_load import Load, load_of
from kvasir_sim.plan_reasons import reasons
from kvasir_sim.split import StageCost, best_split, longest_ns
from kvasir_sim.stage_costs import Reference, RingCosts

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario

ROUNDS_MAX = 8  # It settles in two or three.
ROW_WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
KNEE = 0.9  # Of the best rows per second.
ROUNDING = 1e-9  # Of a lap that is a whole number of holds.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRing:
    """A solved ring.

    Attributes:
        stages: In the new order, without layers.
        order: Places in the scenario's order.
        layers: Per stage, half-open.
        kv_tokens: Per stage; None where no memory is known (KV as the scenario says).
        reference: The average micro-batch.
        holds_ns, links_ns, even_ns: Predicted holds, transfers (the return last), and the holds of
            an even split in the scenario's order (None if memory does not hold it).
        memory: Per stage, bytes that weights and KV take, and bytes there are; None: not known.
        why: Sentences.
    """

    stages: tuple[Stage, ...]
    order: tuple[int, ...]
    layers: LayerRanges
    window: int
    row_width: int
    micro_batch_width: int
    kv_tokens: int | None
    reference: Reference
    holds_ns: tuple[int, ...]
    links_ns: tuple[int, ...]
    even_ns: tuple[int, ...] | None
    memory: tuple[tuple[int, int] | None, ...]
    why: tuple[str, ...] = ()

    @property
    def longest_ns(self) -> int:
        """The busiest stage's or link's time per average micro-batch."""
        return max(*self.holds_ns, *self.links_ns)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second with a full window of average micro-batches.

        An upper bound in practice: real micro-batches vary, and the ring waits for the long ones.
        """
        return self.reference.decodes * NANOS_PER_SECOND / self.longest_ns


def plan_scenario(scenario: "Scenario") -> PlannedRing:
    """The best ring that the scenario leaves room for.

    Raises:
        ScenarioError: No split fits; both numbers.
    """
    load = load_of(scenario)
    given = stages_given(scenario)
    solved = [_Solver(scenario, load, given, order).solve() for order in orders(scenario, given)]
    best = min(solved, key=_rank)
    return replace(best, why=reasons(scenario, load, best))


def _rank(planned: PlannedRing) -> tuple[int, bool, int, tuple[int, ...]]:
    """The shortest longest hold; then the scenario's own order; then the shortest lap."""
    is_changed = planned.order != tuple(sorted(planned.order))
    return planned.longest_ns, is_changed, sum(planned.holds_ns), planned.order


def auto_layers(scenario: "Scenario") -> LayerRanges:
    """Solves `layers: auto` for the order, widths and KV that the scenario has.

    Raises:
        ScenarioError: No split fits.
    """
    given = stages_given(scenario)
    solver = _Solver(scenario, load_of(scenario), given, tuple(range(len(given))), is_free=False)
    return solver.solve().layers


def stages_given(scenario: "Scenario") -> tuple[Stage, ...]:
    """The stages in the scenario's order, their layers taken away."""
    stages = scenario.ring.stages
    if isinstance(stages, int):
        return (Stage(),) * stages
    return tuple(stage.model_copy(update={"layers": None}) for stage in stages)


def orders(scenario: "Scenario", given: tuple[Stage, ...]) -> Iterator[tuple[int, ...]]:
    """One order for each choice of head and tail that differs; see the module."""
    places = tuple(range(len(given)))
    if not is_order_free(scenario):
        yield places
        return
    tried: set[str] = set()
    for head in places:
        for tail in places:
            if head == tail:
                continue
            key = f"{given[head]!r} {given[tail]!r}"
            if key not in tried:
                tried.add(key)
                middle = tuple(place for place in places if place not in (head, tail))
                yield (head, *middle, tail)


def is_order_free(scenario: "Scenario") -> bool:
    """Nothing in the scenario belongs to a place in the ring."""
    ring = scenario.ring
    return ring.links is None and not isinstance(ring.kv_tokens, tuple) and not scenario.faults


class _Solver:
    """Steps 1 and 3-5 for one order."""

    def __init__(
        self,
        scenario: "Scenario",
        load: Load,
        given: tuple[Stage, ...],
        order: tuple[int, ...],
        *,
        is_free: bool = True,
    ) -> None:
        self._scenario = scenario
        self._load = load
        self._given = given
        self._order = order
        self._stages = tuple(given[place] for place in order)
        self._costs = RingCosts(scenario, self._stages)
        self._total = scenario.model.layers
        self._no_kv = (0,) * len(given)
        ring = scenario.ring
        self._kept = set(ring.model_fields_set)
        if not is_free or scenario.costs.kind not in {"roofline", "profile"}:
            self._kept |= {"row_width", "micro_batch_width"}
        self._decodes_max, self._rows_max = self._costs.widths_max

    def solve(self) -> PlannedRing:
        ring = self._scenario.ring
        window = len(self._stages) if ring.window == "auto" else ring.window
        solved = self._round(window, ring.row_width)
        for _ in range(ROUNDS_MAX):
            again = self._round(solved.window, solved.row_width)
            if again == solved:
                break
            solved = again
        return solved

    def _round(self, window: int, row_width: int) -> PlannedRing:
        """Steps 1 and 3-5 once, for a ring of this window and row width."""
        width = self._width(window, row_width)
        reference = self._load.reference(min(width, self._load.cohort(window)), row_width)
        counts, costs = self._split(reference, window)
        if "row_width" not in self._kept:
            row_width = self._row_width(counts, window, reference)
        holds = [cost.hold_ns(count) for cost, count in zip(costs, counts, strict=True)]
        edges = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        kv_tokens = self._kv(counts)
        return PlannedRing(
            stages=self._stages,
            order=self._order,
            layers=tuple(itertools.pairwise(edges)),
            window=self._window(holds, reference),
            row_width=row_width,
            micro_batch_width=width,
            kv_tokens=kv_tokens,
            reference=reference,
            holds_ns=tuple(round(hold) for hold in holds),
            links_ns=tuple(self._transfers(reference)),
            even_ns=self._even(reference),
            memory=self._memory(counts, kv_tokens),
        )

    def _width(self, window: int, row_width: int) -> int:
        if "micro_batch_width" in self._kept:
            return self._scenario.ring.micro_batch_width
        return max(1, min(self._load.cohort(window), row_width, self._decodes_max))

    def _split(self, reference: Reference, window: int) -> tuple[tuple[int, ...], list[StageCost]]:
        """The best split with as much KV as the load needs, or as can be had."""
        refused: PlanError | None = None
        for kv_tokens in self._kv_wanted(reference, window):
            costs = self._with_sending(self._costs.of(reference, kv_tokens), reference)
            try:
                return best_split(costs, self._total), costs
            except PlanError as error:
                refused = error
        raise self._scenario.error("ring.stages", f"no split fits: {refused}")

    def _kv_wanted(self, reference: Reference, window: int) -> list[tuple[int, ...]]:
        """KV per stage to keep room for: first what the load needs, then ever less."""
        stages, kv = len(self._stages), self._scenario.ring.kv_tokens
        if isinstance(kv, tuple):
            return [kv]
        if isinstance(kv, int):
            return [(kv,) * stages]
        least = self._load.longest_request
        wanted = [window * reference.decodes * self._load.request_tokens]
        while wanted[-1] > least:
            wanted.append(max(wanted[-1] // 2, least))
        return [(tokens,) * stages for tokens in wanted]

    def _transfers(self, reference: Reference) -> list[int]:
        """Time each hop's bytes take; the return carries output rows only."""
        outputs = reference.decodes + reference.completes
        rows = [reference.rows] * (len(self._stages) - 1) + [outputs]
        return [hop.transfer_ns(count) for hop, count in zip(self._costs.links, rows, strict=True)]

    def _with_sending(self, costs: list[StageCost], reference: Reference) -> list[StageCost]:
        """The same costs, and the transfer where it occupies the sending stage."""
        transfers = self._transfers(reference)
        return [
            replace(cost, fixed_ns=cost.fixed_ns + transfer * hop.occupies_sender)
            for cost, transfer, hop in zip(costs, transfers, self._costs.links, strict=True)
        ]

    def _window(self, holds: list[float], reference: Reference) -> int:
        ring = self._scenario.ring
        if ring.window != "auto":
            return ring.window
        lap = sum(holds) + self._costs.turnaround_ns
        transfers = self._transfers(reference)
        for hop, transfer in zip(self._costs.links, transfers, strict=True):
            lap += hop.latency_ns + transfer * (not hop.occupies_sender)
        bound = min(ring.window_max or WINDOW_MAX, WINDOW_MAX)
        needed = math.ceil(lap / max(*holds, *transfers) - ROUNDING)
        return max(1, min(needed, bound))

    def _row_width(self, counts: tuple[int, ...], window: int, reference: Reference) -> int:
        """The knee of rows per second, below what `slo.tpot_s` allows."""
        widths = [width for width in ROW_WIDTHS if width <= self._rows_max] or [self._rows_max]
        start = self._load.prompt_tokens // 2
        rate = {}
        for width in widths:
            chunk = Reference(decodes=0, context=1, chunk_rows=width, chunk_start=start)
            rate[width] = width / longest_ns(self._costs.of(chunk, self._no_kv), counts)
        knee = next(width for width in widths if rate[width] >= KNEE * max(rate.values()))
        slo_s = self._scenario.slo.tpot_s
        while slo_s is not None and knee > widths[0]:
            full = replace(reference, chunk_rows=max(knee - reference.decodes, 0))
            lap_ns = window * longest_ns(self._costs.of(full, self._no_kv), counts)
            if lap_ns <= slo_s * NANOS_PER_SECOND:
                break
            knee = widths[widths.index(knee) - 1]
        return max(knee, reference.decodes)

    def _kv(self, counts: tuple[int, ...]) -> int | None:
        """All that fits at the scarcest stage, at most what can ever be used."""
        if not isinstance(self._scenario.ring.kv_tokens, str):
            return None
        rooms = [self._costs.kv_room(stage, count) for stage, count in enumerate(counts)]
        known = [room for room in rooms if room is not None]
        if not known:
            return None
        block = self._scenario.ring.kv_block
        return min(*known, self._load.kv_most) // block * block

    def _memory(
        self, counts: tuple[int, ...], kv_tokens: int | None
    ) -> tuple[tuple[int, int] | None, ...]:
        """What each stage takes of its memory, with the KV planned or given."""
        given = self._scenario.ring.kv_tokens if kv_tokens is None else kv_tokens
        if isinstance(given, str):
            return (None,) * len(counts)
        each = given if isinstance(given, tuple) else (given,) * len(counts)
        return tuple(map(self._costs.memory, range(len(counts)), counts, each))

    def _even(self, reference: Reference) -> tuple[int, ...] | None:
        """Holds of an even split in the scenario's order; None where memory does not hold it."""
        costs = RingCosts(self._scenario, self._given).of(reference, self._no_kv)
        counts = [stop - start for start, stop in split_evenly(self._total, len(costs))]
        if any(count > cost.layers_max for cost, count in zip(costs, counts, strict=True)):
            return None
        return tuple(
            round(cost.hold_ns(count))
            for cost, count in zip(self._with_sending(costs, reference), counts, strict=True)
        )
