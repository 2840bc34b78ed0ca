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
        data: The file's data after changes, before defaults.
        lines: Key path to line in the file; a key that is not there has its parent's line.
        changes: Key paths changed since, oldest first, each with its place (`--set key=value`).
    """

    label: str = "scenario"
    base: Path = Path()
    data: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    changes: tuple[tuple[KeyPath, str], ...] = ()

    def place(self, path: KeyPath) -> str:
        """`file:line`, or the change that last wrote this key or a map around it."""
        for changed, place in reversed(self.changes):
            if path[: len(changed)] == changed:
                return place
        if path and path not in self.lines:  # A map that a change inside it has made.
            for changed, place in reversed(self.changes):
                if changed[: len(path)] == path:
                    return place
        for length in range(len(path), -1, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return f"{self.label}:{line}"
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
