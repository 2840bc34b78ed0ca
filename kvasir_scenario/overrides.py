"""`--set key.path=value`, `--seed`, and the entries of `what_if`: changes to a scenario's data."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvasir_core.errors import ScenarioError
from kvasir_scenario.complaints import found
from kvasir_scenario.named_values import name_and_value, place_of
from kvasir_scenario.origin import Origin
from kvasir_scenario.yaml_tree import DEPTH_MAX, KeyPath, dotted, read_tree

OVERRIDES_MAX = 1000


def apply_settings(origin: Origin, settings: Sequence[str]) -> Origin:
    """The data with each `key.path=value` applied, in order; the value is YAML.

    Raises:
        ScenarioError: Not of that form, or the path does not fit the data.
    """
    if len(settings) > OVERRIDES_MAX:
        raise ScenarioError(f"--set: {len(settings)} times; at most {OVERRIDES_MAX}")
    for setting in settings:
        key, text = name_and_value("--set", setting, "key.path=value", "1")
        place = place_of("--set", setting)
        tree = read_tree(text, place, is_setting=True)
        origin = apply_change(origin, key, tree.data, place)
    return origin


def apply_change(origin: Origin, key: str, value: Any, place: str) -> Origin:
    """The origin with `key` (dotted) set; complaints about it will name `place`.

    Maps on the way are made where they are missing; list entries must exist.
    """
    parts = key.split(".")
    if parts[0] == "what_if" and len(parts) > 2:
        parts = ["what_if", parts[1], ".".join(parts[2:])]  # Keys of a variant are dotted.
    if len(parts) > DEPTH_MAX or not all(parts):
        raise ScenarioError(f"{place}: {key[:100]} is no key path, for example ring.window")
    data, path = _changed(origin.data, parts, value, (), place)
    return replace(origin, data=data, changes=(*origin.changes, (path, place)))


def _changed(
    here: Any, parts: Sequence[str], value: Any, path: KeyPath, place: str
) -> tuple[Any, KeyPath]:
    """A copy of `here` in which only what lies on the way is new, and the way as a key path."""
    if not parts:
        return value, path
    here = {} if here is None else here
    step = _step(here, parts[0], path, place)
    old = here[step] if isinstance(step, int) else here.get(step)
    new, path = _changed(old, parts[1:], value, (*path, step), place)
    if isinstance(step, int):
        return [*here[:step], new, *here[step + 1 :]], path
    return {**here, step: new}, path


def _step(here: Any, part: str, path: KeyPath, place: str) -> str | int:
    name = dotted(path)
    if isinstance(here, dict):
        return part
    if not isinstance(here, list):
        raise ScenarioError(
            f"{place}: {name} is {found(here)}, which has no {part}; set {name} as a whole"
        )
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(here):
        raise ScenarioError(
            f"{place}: {name} is a list of {len(here)}; {part[:20]} must be one of its indexes, "
            "counted from 0"
        )
    return int(part)
