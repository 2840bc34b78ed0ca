"""`--set key.path=value`, `--seed`, and the entries of `what_if`: changes to a scenario's data."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir_core.errors import ScenarioError
from kvasir_scenario.origin import Origin
from kvasir_scenario.yaml_tree import DEPTH_MAX, KeyPath, read_tree

OVERRIDES_MAX = 1000


def apply_settings(origin: Origin, settings: Sequence[str]) -> Origin:
    """The data with each `key.path=value` applied, in order; the value is YAML.

    Raises:
        ScenarioError: Not of that form, or the path does not fit the data.
    """
    if len(settings) > OVERRIDES_MAX:
        raise ScenarioError(f"--set: {len(settings)} times; at most {OVERRIDES_MAX}")
    for setting in settings:
        place = f"--set {setting[:200]}"
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ScenarioError(f"{place}: it must be key.path=value, for example ring.window=1")
        origin = apply_change(origin, key.strip(), read_tree(text, place).data, place)
    return origin


def apply_change(origin: Origin, key: str, value: Any, place: str) -> Origin:
    """The origin with `key` (dotted) set; complaints about it will name `place`.

    Maps on the way are made where they are missing; list entries must exist.
    """
    data = copy.deepcopy(dict(origin.data))
    path = _set(data, key, value, place)
    places = {old: where for old, where in origin.places.items() if old[: len(path)] != path}
    places[path] = place
    return Origin(label=origin.label, base=origin.base, data=data, places=places)


def _set(data: dict[str, Any], key: str, value: Any, place: str) -> KeyPath:
    parts = key.split(".")
    if parts[0] == "what_if" and len(parts) > 2:
        parts = ["what_if", parts[1], ".".join(parts[2:])]  # Keys of a variant are dotted.
    if len(parts) > DEPTH_MAX or not all(parts):
        raise ScenarioError(f"{place}: {key[:100]} is no key path, for example ring.window")
    here: Any = data
    path: list[str | int] = []
    for depth, part in enumerate(parts):
        is_last = depth == len(parts) - 1
        step = _step(here, part, path, place)
        path.append(step)
        if is_last:
            here[step] = value
        else:
            if isinstance(here, dict) and here.get(part) is None:
                here[part] = {}
            here = here[step]
    return tuple(path)


def _step(here: Any, part: str, path: Sequence[str | int], place: str) -> str | int:
    name = ".".join(str(step) for step in path)
    if isinstance(here, Mapping):
        return part
    if not isinstance(here, list):
        raise ScenarioError(
            f"{place}: {name} is {here!r}, which has no {part}; set {name} as a whole"
        )
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(here):
        raise ScenarioError(
            f"{place}: {name} is a list of {len(here)}; {part} must be an index "
            f"from 0 to {len(here) - 1}"
        )
    return int(part)
