"""From a scenario's devices and efficiencies to roofline costs."""

from dataclasses import replace
from typing import TYPE_CHECKING

from kvasir_core.errors import ScenarioError
from kvasir_core.plan import Plan
from kvasir_scenario.planning import stages_of
from kvasir_scenario.schema_costs import RooflineCosts as RooflineSection
from kvasir_sim.costs.base import Provenance
from kvasir_sim.costs.efficiency import FITTED, FITTED_DEVICE, FITTED_DTYPE, Efficiency
from kvasir_sim.costs.roofline import DeviceCosts, RooflineCosts
from kvasir_sim.costs.routing import shares_of
from kvasir_sim.costs.shape import shape_from
from kvasir_sim.devices import device_from

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario


def build_roofline(scenario: "Scenario", section: RooflineSection, plan: Plan) -> RooflineCosts:
    """Roofline costs of every stage on its device; stages on one device share one object.

    Raises:
        ScenarioError: The shape or a device is incomplete, or a stage does not fit.
    """
    stages = device_costs(scenario, section, [stage.device for stage in stages_of(scenario, plan)])
    costs = RooflineCosts(plan, stages, _provenance(scenario, section))
    try:
        costs.check_memory()
    except ScenarioError as error:
        raise scenario.error("ring.stages", str(error)) from error
    return costs


def device_costs(
    scenario: "Scenario", section: RooflineSection, names: list[str | None]
) -> list[DeviceCosts]:
    """For each of these devices its costs; the same object for the same name.

    Raises:
        ScenarioError: The shape or a device is incomplete or unknown.
    """
    shape = shape_from(scenario)
    efficiency = _efficiency(section)
    shares = shares_of(scenario, shape.experts, "roofline") if shape.experts else ()
    known: dict[str, DeviceCosts] = {}
    for name in names:
        assert name is not None, "the schema demands a device per stage"
        if name not in known:
            try:
                device = device_from(name, scenario.devices[name], shape.dtype)
                known[name] = DeviceCosts(shape, device, efficiency, shares)
            except ScenarioError as error:
                raise scenario.error(f"devices.{name}", str(error)) from error
    return [known[name] for name in names if name is not None]


def _efficiency(section: RooflineSection) -> Efficiency:
    efficiency = FITTED
    if (share := section.matmul_efficiency) is not None:
        efficiency = replace(efficiency, matrix_flops=share, expert_flops=share)
    if (share := section.attention_efficiency) is not None:
        efficiency = replace(efficiency, prompt_flops=share)
    if (share := section.bandwidth_efficiency) is not None:
        efficiency = replace(
            efficiency,
            matrix_memory=share,
            expert_memory=share,
            decode_memory=share,
            prompt_memory=share,
        )
    return efficiency


def _provenance(scenario: "Scenario", section: RooflineSection) -> Provenance:
    """Fitted only for the very device, type and efficiencies of the fit."""
    own = section.matmul_efficiency, section.attention_efficiency, section.bandwidth_efficiency
    used = [device for name, device in scenario.devices.items() if _is_used(scenario, name)]
    is_fitted = (
        all(value is None for value in own)
        and scenario.model.dtype == FITTED_DTYPE
        and all(
            device.preset == FITTED_DEVICE
            and device.flops is None
            and device.bandwidth_bytes_per_s is None
            for device in used
        )
    )
    return "fitted" if is_fitted else "assumed"


def _is_used(scenario: "Scenario", name: str) -> bool:
    ring = scenario.ring
    if isinstance(ring.stages, int):
        return name == ring.device
    return any((stage.device or ring.device) == name for stage in ring.stages)
