"""`what_if`: variants of a scenario that run beside the baseline."""

from kvasir_scenario.overrides import apply_change
from kvasir_scenario.schema import Scenario
from kvasir_scenario.validate import scenario_of


def variants_of(scenario: Scenario) -> list[tuple[str, Scenario]]:
    """Each variant's name and its scenario, in the file's order; the baseline is not among them.

    Raises:
        ScenarioError: A variant is no valid scenario; the message names its line under `what_if`.
    """
    base = scenario._origin  # noqa: SLF001 - a variant is born from its baseline's data.
    variants: list[tuple[str, Scenario]] = []
    for name, changes in scenario.what_if.items():
        origin = base
        for key, value in changes.items():
            place = base.place(("what_if", name, key))
            origin = apply_change(origin, key, value, f"{place}: what_if.{name}")
        origin = apply_change(origin, "what_if", {}, base.place(("what_if", name)))
        variants.append((name, scenario_of(origin)))
    return variants
