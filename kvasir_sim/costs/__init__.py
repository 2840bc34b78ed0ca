"""How long a stage computes a micro-batch: the cost models, chosen by `costs.kind`."""

from typing import TYPE_CHECKING, assert_never

from kvasir_core.errors import ScenarioError
from kvasir_core.plan import Plan
from kvasir_core.units import nanos
from kvasir_scenario.data_paths import existing_file
from kvasir_scenario.planning import stages_of
from kvasir_scenario.schema_costs import (
    FixedCosts as FixedSection,
)
from kvasir_scenario.schema_costs import (
    ProfileCosts as ProfileSection,
)
from kvasir_scenario.schema_costs import (
    RooflineCosts as RooflineSection,
)
from kvasir_scenario.schema_costs import (
    TableCosts as TableSection,
)
from kvasir_sim.costs.base import CostModel, Provenance
from kvasir_sim.costs.fixed import FixedCosts

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario
    from kvasir_sim.costs.measured_experts import Mixture

__all__ = ["CostModel", "Provenance", "build_costs"]


def build_costs(scenario: "Scenario", plan: Plan) -> CostModel:
    """The scenario's cost model for this plan.

    Raises:
        ScenarioError: A file is missing or wrong, the plan is wider than what was measured, a
            device is unknown, or a stage does not fit in its device's memory.
    """
    costs = scenario.costs
    match costs:
        case FixedSection():
            stages = stages_of(scenario, plan)
            return FixedCosts(
                [stage.pass_s for stage in stages], [stage.per_token_s for stage in stages],
                nanos(costs.turnaround_s),
            )  # fmt: skip
        case TableSection():
            return _table(scenario, costs, plan)
        case RooflineSection():
            from kvasir_sim.costs.roofline_setup import build_roofline

            return build_roofline(scenario, costs, plan)
        case ProfileSection():
            return _profile(scenario, costs, plan)
        case _:
            assert_never(costs)


def _table(scenario: "Scenario", section: TableSection, plan: Plan) -> CostModel:
    from kvasir_sim.costs.table import TableCosts, read_tables

    path = existing_file(scenario, "costs.file", section.file)
    try:
        model = TableCosts(
            [stop - start for start, stop in plan.layers],
            read_tables(path),
            section.file,
            rows_multiple=section.rows_multiple,
            kv_multiple=section.kv_multiple,
            several_factor=section.several_factor,
        )
        model.check_plan(plan)
    except ScenarioError as error:
        raise scenario.error("costs.file", str(error)) from error
    return model


def _profile(scenario: "Scenario", section: ProfileSection, plan: Plan) -> CostModel:
    from kvasir_scenario.profile import read_profile
    from kvasir_sim.costs.profile import ProfileCosts, check_profile

    path = existing_file(scenario, "costs.file", section.file)
    try:
        profile = read_profile(path)
        dtype = scenario.runtime.dtype or scenario.model.dtype
        check_profile(plan, profile, dtype, section.file)
    except ScenarioError as error:
        raise scenario.error("costs.file", str(error)) from error
    seed = scenario.run.seed if section.noise else None
    return ProfileCosts(plan, profile, section.file, mixture=_mixture(scenario), noise_seed=seed)


def _mixture(scenario: "Scenario") -> "Mixture | None":
    from kvasir_sim.costs.measured_experts import Mixture
    from kvasir_sim.costs.routing import shares_of

    model = scenario.model
    if not model.experts or not model.experts_used:
        return None
    return Mixture(model.experts_used, shares_of(scenario, model.experts, "profile"))
