"""`what_if`: variants of a scenario that run beside the baseline; and any other changed copy."""

from collections.abc import Iterable
from typing import Any

from kvasir_scenario.overrides import apply_change
from kvasir_scenario.schema import Scenario
from kvasir_scenario.validate import scenario_of


def variants_of(scenario: Scenario) -> list[tuple[str, Scenario]]:
    """Each variant's name and its scenario, in the file's order; the baseline is not among them.

    Raises:
        ScenarioError: A variant is no valid scenario; the message names its line under `what_if`.
    """
    place = scenario._origin.place  # noqa: SLF001 - a variant is born from its baseline's data.
    return [
        (
            name,
            variant_of(
                scenario,
                [
                    (key, value, f"{place(('what_if', name, key))}: what_if.{name}")
                    for key, value in changes.items()
                ],
            ),
        )
        for name, changes in scenario.what_if.items()
    ]


def variant_of(scenario: Scenario, changes: Iterable[tuple[str, Any, str]]) -> Scenario:
    """The scenario with keys changed, and without `what_if`.

    Args:
        scenario: The baseline.
        changes: Key (dotted), value, and the place that complaints about it name.

    Raises:
        ScenarioError: It is no valid scenario.
    """
    origin = scenario._origin  # noqa: SLF001 - as above.
    for key, value, place in changes:
        origin = apply_change(origin, key, value, place)
    return scenario_of(apply_change(origin, "what_if", {}, origin.place(("what_if",))))
