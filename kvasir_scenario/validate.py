"""From raw data to a checked `Scenario`; complaints name the place of each key."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvasir_scenario.complaints import scenario_error
from kvasir_scenario.origin import Origin
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_types import NAME_PATTERN


def scenario_of(origin: Origin) -> Scenario:
    """Validates data; the scenario remembers where each key came from.

    Raises:
        ScenarioError: One line per complaint.
    """
    data: Mapping[str, Any] = origin.data
    stem = Path(origin.label).stem
    if "name" not in data and re.match(NAME_PATTERN, stem):
        data = {"name": stem, **data}
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as error:
        raise scenario_error(error, origin) from None
    scenario._origin = origin  # noqa: SLF001 - set once, here, where a scenario is born.
    return scenario
