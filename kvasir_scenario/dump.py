"""A resolved scenario back to YAML that reads as the same scenario."""

from typing import Any

import yaml

from kvasir_scenario.schema import Scenario
from kvasir_scenario.yaml_tree import plain_scalar


class _Dumper(yaml.SafeDumper):
    """Block style, no aliases, and quotes wherever our reader would not read text back."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    try:
        is_plain = plain_scalar(value) == value
    except ValueError:
        is_plain = False
    style = None if is_plain else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(scenario: Scenario) -> str:
    """Every key with its value, defaults included; nothing of the machine is in it.

    Paths stand as the user wrote them: relative to the original file. Keys that are null are left
    out (null is the default of each).
    """
    data = _without_null(scenario.model_dump(mode="python"))
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_null(item) for item in value]
    return value
