"""From a scenario to the plan, and to the stages one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir_core.errors import PlanError
from kvasir_core.plan import Plan, split_evenly
from kvasir_core.units import nanos
from kvasir_scenario.presets import ELEMENT_BYTES
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_costs import FixedCosts, FixedTimes, fixed_times
from kvasir_scenario.schema_ring import Stage

LayerRanges = tuple[tuple[int, int], ...]
Planner = Callable[[Scenario], LayerRanges]
"""Solves `layers: auto`: the layers of each stage, contiguous from 0."""

WINDOW_MAX_PER_STAGE = 4  # Four micro-batches per stage cover links as long as three holds.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """One stage with the ring's defaults applied.

    Attributes:
        index: From the head, 0.
        layers: Half-open range.
        device: Name of an entry of `devices`, if any is given.
        pass_s: Costs `fixed`: seconds per micro-batch, its layers included; 0 for other kinds.
        per_token_s: Costs `fixed`: seconds per row; 0 for other kinds.
    """

    index: int
    layers: tuple[int, int]
    device: str | None
    pass_s: float
    per_token_s: float


def plan_of(scenario: Scenario, planner: Planner | None = None) -> Plan:
    """The ring's fixed numbers.

    Args:
        scenario: A valid scenario.
        planner: Called for `layers: auto`.

    Raises:
        ScenarioError: The layers do not make up the model, or the plan contradicts itself.
    """
    ring = scenario.ring
    layers = layers_of(scenario, planner)
    count = len(layers)
    window_max = ring.window_max or WINDOW_MAX_PER_STAGE * count
    is_auto = ring.window == "auto"
    window = min(count, window_max) if ring.window == "auto" else ring.window
    kv = ring.kv_tokens
    if kv == "unbounded":
        kv = _kv_for_all(scenario)
    if not scenario.policy.chunked_prefill and ring.row_width < scenario.model.context:
        raise scenario.error(
            "policy.chunked_prefill",
            f"found false; then a prompt enters whole, but ring.row_width ({ring.row_width}) is "
            f"less than model.context ({scenario.model.context}): raise the one or lower the other",
        )
    try:
        return Plan(
            layers=layers,
            row_width=ring.row_width,
            micro_batch_width=ring.micro_batch_width,
            window=window,
            window_max=window_max if is_auto else window,
            window_auto=is_auto,
            running_max=ring.running_max,
            context=scenario.model.context,
            kv_tokens=kv if isinstance(kv, tuple) else (kv,) * count,
            kv_block=ring.kv_block,
            credits=None if ring.credits == "unbounded" else ring.credits,
            hidden=scenario.model.hidden or 1,
            element_bytes=ELEMENT_BYTES[scenario.runtime.dtype or scenario.model.dtype],
            packer=scenario.policy.packer,
            chunked_prefill=scenario.policy.chunked_prefill,
            prefill_rows_max=scenario.policy.prefill_rows_max,
            cohort_wait_ns=nanos(scenario.policy.cohort_wait_s),
        )
    except PlanError as error:
        raise scenario.error("ring", str(error)) from None


def stages_of(scenario: Scenario, plan: Plan) -> tuple[StageFacts, ...]:
    """Each stage of the ring with defaults applied, head first."""
    ring, costs = scenario.ring, scenario.costs
    stages = ring.stages if isinstance(ring.stages, tuple) else (Stage(),) * ring.stages
    facts = []
    for index, (stage, layers) in enumerate(zip(stages, plan.layers, strict=True)):
        times = FixedTimes(0.0, 0.0, 0.0)
        if isinstance(costs, FixedCosts):
            times = fixed_times(costs, stage)
        facts.append(
            StageFacts(
                index=index,
                layers=layers,
                device=stage.device or ring.device,
                pass_s=times.pass_s + times.pass_s_per_layer * (layers[1] - layers[0]),
                per_token_s=times.per_token_s,
            )
        )
    return tuple(facts)


def layers_of(scenario: Scenario, planner: Planner | None = None) -> LayerRanges:
    """The layers of each stage: an even split, the given ones, or the planner's.

    Raises:
        ScenarioError: With both numbers, where they do not make up the model.
    """
    ring, total = scenario.ring, scenario.model.layers
    count = ring.stage_count
    stages = ring.stages if isinstance(ring.stages, tuple) else (Stage(),) * count
    given = [ring.layers if stage.layers is None else stage.layers for stage in stages]
    if all(value == "auto" for value in given):
        return _planned(scenario, planner)
    if all(value == "even" for value in given):
        try:
            return split_evenly(total, count)
        except PlanError as error:
            raise scenario.error("ring.stages", f"{error} (model.layers)") from None
    return _explicit(scenario, given)


def _planned(scenario: Scenario, planner: Planner | None) -> LayerRanges:
    key = "ring.layers" if scenario.ring.layers == "auto" else "ring.stages.0.layers"
    if planner is None:
        raise scenario.error(
            key, "found auto, and nobody here can solve it; give the layers of each stage"
        )
    return planner(scenario)


def _explicit(scenario: Scenario, given: Sequence[int | tuple[int, int] | str]) -> LayerRanges:
    total = scenario.model.layers
    ranges: list[tuple[int, int]] = []
    expected = 0
    for index, value in enumerate(given):
        key = f"ring.stages.{index}.layers"
        if isinstance(value, str):
            what = "found auto" if value == "auto" else "missing"
            raise scenario.error(
                key, f"{what}, while other stages say their layers; give all of them or none"
            )
        start, stop = (expected, expected + value) if isinstance(value, int) else value
        if start != expected:
            fault = "overlap" if start < expected else "leave a gap"
            raise scenario.error(
                key,
                f"found [{start}, {stop}); it must start at {expected}, where the stage before it "
                f"stops: the two {fault}",
            )
        ranges.append((start, stop))
        expected = stop
    if expected != total:
        raise scenario.error(
            "ring.stages",
            f"the stages hold {expected} layers, but model.layers is {total}",
        )
    return tuple(ranges)


def _kv_for_all(scenario: Scenario) -> int:
    """KV that never binds: every running request at full context, in whole blocks."""
    block = scenario.ring.kv_block
    return scenario.ring.running_max * -(-scenario.model.context // block) * block
