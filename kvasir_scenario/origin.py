"""Where a scenario's values came from, so that any later complaint can name file and line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir_core.errors import ScenarioError
from kvasir_scenario.yaml_tree import KeyPath, dotted


@dataclass(frozen=True, slots=True)
class Origin:
    """The raw data of a scenario and the place of each key.

    Attributes:
        label: The file's name as the user wrote it.
        base: Directory that relative paths resolve against.
        data: The file's data after overrides, before defaults.
        places: Key path to `file:line` or `--set key=value`; a missing key has its parent's place.
    """

    label: str = "scenario"
    base: Path = Path()
    data: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        for length in range(len(path), -1, -1):
            found = self.places.get(path[:length])
            if found is not None:
                return found
        return self.label

    def error(self, path: KeyPath, message: str) -> ScenarioError:
        return ScenarioError(f"{self.place(path)}: {dotted(path)}: {message}")


def key_path(data: Any, key: str) -> KeyPath:
    """`ring.stages.0.pass_s` as a path into `data`: digits index lists, and name keys of maps."""
    path: list[str | int] = []
    for part in key.split("."):
        if isinstance(data, list | tuple) and part.isdecimal() and len(part) < 10:
            index = int(part)
            path.append(index)
            data = data[index] if index < len(data) else None
        else:
            path.append(part)
            data = data.get(part) if isinstance(data, Mapping) else None
    return tuple(path)
