"""What each stage would cost, as a function of its layers: the planner's view of a cost model.

Every model is affine in a stage's layers, so two trial rings (1 layer a stage, and `TRIAL` more)
give both constants for any kind of costs, without a second formula for any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from kvasir_core.microbatch import BindingLimit, MicroBatch
from kvasir_core.plan import Plan
from kvasir_core.units import Epoch, MicroBatchId, RequestId, nanos
from kvasir_scenario.data_paths import existing_file
from kvasir_scenario.schema_costs import FixedCosts as FixedSection
from kvasir_scenario.schema_costs import ProfileCosts as ProfileSection
from kvasir_scenario.schema_costs import RooflineCosts as RooflineSection
from kvasir_scenario.schema_costs import TableCosts as TableSection
from kvasir_scenario.schema_costs import fixed_times
from kvasir_scenario.schema_faults import StageSlow
from kvasir_scenario.schema_ring import Stage
from kvasir_sim.costs.base import CostModel
from kvasir_sim.costs.fixed import FixedCosts
from kvasir_sim.costs.profile import ProfileCosts
from kvasir_sim.costs.shape import ModelShape, shape_from
from kvasir_sim.devices import device_from
from kvasir_sim.links import build_links
from kvasir_sim.split import StageCost

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario

TRIAL = 1000  # Layers more in the second ring: rounding to nanoseconds is then a thousandth.
DECODES_MAX = 256  # Wider cohorts gain little and double the lap.
ROWS_MAX = 4096
LASTING_S = 86_400.0  # A stage slowed from the start for a day is a slow stage.


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The average micro-batch, for which the split is balanced.

    Attributes:
        decodes: Decode rows, each reading `context` positions.
        chunk_rows: Rows of one prompt chunk, `chunk_start` positions behind it.
        completes: The chunk ends its prompt, so the tail samples for it.
    """

    decodes: int
    context: int
    chunk_rows: int = 0
    chunk_start: int = 0
    completes: bool = False

    @property
    def rows(self) -> int:
        return self.decodes + self.chunk_rows

    @property
    def micro_batch(self) -> MicroBatch:
        chunk = (self.chunk_rows,) if self.chunk_rows else ()
        spans = self.decodes + len(chunk)
        return MicroBatch(
            id=MicroBatchId(0),
            epoch=Epoch(0),
            requests=tuple(RequestId(place) for place in range(spans)),
            starts=(self.context - 1,) * self.decodes + (self.chunk_start,) * len(chunk),
            rows=(1,) * self.decodes + chunk,
            decodes=self.decodes,
            completing=(self.decodes,) if chunk and self.completes else (),
            row_count=self.rows,
            decode_context=self.decodes * self.context,
            binding=BindingLimit.NOTHING_WAITING,
        )


class RingCosts:
    """Costs of one order of stages: holds by layers, memory, and the head's turnaround."""

    def __init__(self, scenario: "Scenario", stages: tuple[Stage, ...]) -> None:
        """`stages` in order, whatever their layers.

        Raises:
            ScenarioError: As `build_costs`.
        """
        self._scenario = scenario
        self._stages = stages
        self._models = [_model(scenario, stages, layers) for layers in (1, 1 + TRIAL)]
        self._memory = [_memory(scenario, stage) for stage in stages]
        self._slower = _slower(scenario, len(stages))
        self.turnaround_ns = self._models[0].turnaround_ns
        self.links = build_links(scenario, _trial_plan(scenario, len(stages), 1))

    @property
    def widths_max(self) -> tuple[int, int]:
        """Most decodes and rows that the costs know something of."""
        model = self._models[0]
        return model.widths_max if isinstance(model, ProfileCosts) else (DECODES_MAX, ROWS_MAX)

    def of(self, reference: Reference, kv_tokens: Sequence[int]) -> list[StageCost]:
        """Each stage's cost for this micro-batch, with memory for its KV kept free."""
        batch = reference.micro_batch
        few, many = (model.holds(batch) for model in self._models)
        costs = []
        for stage, (one, more) in enumerate(zip(few, many, strict=True)):
            layer_ns = (more - one) / TRIAL
            slower = self._slower[stage]
            most = self._layers_max(stage, kv_tokens[stage])
            costs.append(StageCost((one - layer_ns) * slower, layer_ns * slower, most))
        return costs

    def _layers_max(self, stage: int, kv_tokens: int) -> int:
        memory = self._memory[stage]
        if memory is None:
            return self._scenario.model.layers
        shape, room = memory
        room -= self._vocabularies(stage) * shape.vocabulary_bytes
        return max(room, 0) // (shape.layer_bytes + kv_tokens * shape.kv_bytes)

    def _vocabularies(self, stage: int) -> int:
        return (stage == 0) + (stage == len(self._stages) - 1)

    def memory(self, stage: int, layers: int, kv_tokens: int) -> tuple[int, int] | None:
        """Bytes that weights and so much KV take, and bytes there are; None: not known."""
        memory = self._memory[stage]
        if memory is None:
            return None
        shape, room = memory
        taken = layers * (shape.layer_bytes + kv_tokens * shape.kv_bytes)
        return taken + self._vocabularies(stage) * shape.vocabulary_bytes, room

    def kv_room(self, stage: int, layers: int) -> int | None:
        """KV tokens that fit beside so many layers; None: memory is not known."""
        memory = self._memory[stage]
        if memory is None:
            return None
        shape, room = memory
        room -= self._vocabularies(stage) * shape.vocabulary_bytes + layers * shape.layer_bytes
        return max(room, 0) // (layers * shape.kv_bytes)


def _model(scenario: "Scenario", stages: tuple[Stage, ...], layers: int) -> CostModel:
    """The scenario's cost model for a trial ring of `layers` layers in each stage."""
    plan = _trial_plan(scenario, len(stages), layers)
    section = scenario.costs
    match section:
        case FixedSection():
            times = [fixed_times(section, stage) for stage in stages]
            return FixedCosts(
                [time.pass_s + time.pass_s_per_layer * layers for time in times],
                [time.per_token_s for time in times],
                nanos(section.turnaround_s),
            )
        case TableSection():
            from kvasir_sim.costs.table import TableCosts, read_tables

            return TableCosts(
                [layers] * len(stages),
                read_tables(existing_file(scenario, "costs.file", section.file)),
                section.file,
                rows_multiple=section.rows_multiple,
                kv_multiple=section.kv_multiple,
                several_factor=section.several_factor,
            )
        case RooflineSection():
            from kvasir_sim.costs.roofline import RooflineCosts
            from kvasir_sim.costs.roofline_setup import device_costs

            names = [stage.device or scenario.ring.device for stage in stages]
            return RooflineCosts(plan, device_costs(scenario, section, names), "assumed")
        case ProfileSection():
            from kvasir_scenario.profile import read_profile

            path = existing_file(scenario, "costs.file", section.file)
            return ProfileCosts(plan, read_profile(path), section.file)
        case _:
            assert_never(section)


def _trial_plan(scenario: "Scenario", stages: int, layers: int) -> Plan:
    model = scenario.model
    return Plan(
        layers=tuple((k * layers, (k + 1) * layers) for k in range(stages)),
        row_width=scenario.ring.row_width,
        micro_batch_width=scenario.ring.micro_batch_width,
        window=1,
        window_max=1,
        running_max=1,
        context=model.context,
        kv_tokens=(model.context,) * stages,
        kv_block=1,
        hidden=model.hidden or 1,
        element_bytes=model.element_bytes,
    )


def _memory(scenario: "Scenario", stage: Stage) -> tuple[ModelShape, int] | None:
    """Shape and bytes of memory, where the scenario tells both."""
    name = stage.device or scenario.ring.device
    model = scenario.model
    needs = (
        model.hidden,
        model.heads,
        model.vocab,
        model.expert_ffn if model.experts else model.ffn,
    )
    if name is None or None in needs:
        return None
    memory = device_from(name, scenario.devices[name], model.dtype).memory_bytes
    return None if memory is None else (shape_from(scenario), memory)


def _slower(scenario: "Scenario", stages: int) -> list[float]:
    """Factors of stages that are slow from the start to the end."""
    factors = [1.0] * stages
    for fault in scenario.faults:
        if not isinstance(fault, StageSlow) or fault.at_s != 0 or isinstance(fault.stage, str):
            continue
        if isinstance(fault.for_s, int | float) and fault.for_s >= min(
            scenario.run.horizon_s or LASTING_S, LASTING_S
        ):
            factors[fault.stage] *= fault.factor
    return factors
