"""A resolved scenario back to YAML that reads as the same scenario."""

from typing import Any

import yaml
from pydantic import BaseModel

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

    Paths stand as the user wrote them: relative to the original file. Keys that are null by
    default are left out while they are, and `ring.layers` where every stage has its own.
    """
    tree = _plain(scenario)
    ring = scenario.ring
    stages = ring.stages if isinstance(ring.stages, tuple) else ()
    if stages and ring.layers == "even" and all(stage.layers is not None for stage in stages):
        del tree["ring"]["layers"]
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {
            name: _plain(item)
            for name, field in type(value).model_fields.items()
            if (item := getattr(value, name)) is not None or field.default is not None
        }
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
