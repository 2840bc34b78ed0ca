"""YAML text to plain data plus the line of every key, within limits.

Scenario files come from strangers too, so nothing is built before it is counted: the text is read
as a stream of parser events, and depth, nodes and length are checked on the way. Anchors and
aliases are refused (a small file could expand to gigabytes), as are tags, repeated keys and more
than one document.

Plain scalars mean what YAML 1.2 says: `no`, `on` and `1:30` are text, `1e3` is a number. Two
liberties: `1_000` is a thousand, and `.nan` and `.inf` are refused outright.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from kvasir_core.errors import ScenarioError

FILE_BYTES_MAX = 1 << 20  # A scenario is a page or two; traces are files of their own.
DEPTH_MAX = 32  # The schema itself is not 8 deep.
NODES_MAX = 100_000  # A long inline trace still fits; more belongs into a CSV file.
NUMBER_CHARACTERS_MAX = 40  # A double needs 25.

KeyPath = tuple[str | int, ...]
"""Where a value stands: map keys and list indexes from the root."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)\Z")
_BASED_INT = re.compile(r"0(o[0-7]+|x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+\Z")
_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


@dataclass(frozen=True, slots=True)
class Tree:
    """Plain data (dict, list, str, int, float, bool, None) and the line of each key path."""

    data: Any
    lines: dict[KeyPath, int]


def dotted(path: KeyPath) -> str:
    """`ring.stages.0.pass_s`, or `(top level)`."""
    return ".".join(str(part) for part in path) or "(top level)"


def plain_scalar(text: str) -> str | float | bool | None:
    """What an unquoted scalar means.

    Raises:
        ValueError: `.nan`, `.inf`, or a number too large; the message says what to do.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _NOT_FINITE.match(text):
        raise ValueError(f"found {text}; a number must be finite")
    if _LEADING_ZERO.match(text):
        return text  # YAML 1.1 reads octal, 1.2 decimal: as text it meets "a number, please".
    is_integer = _INT.match(text) is not None
    if not is_integer and _BASED_INT.match(text) is None and _FLOAT.match(text) is None:
        return text
    if len(text) > NUMBER_CHARACTERS_MAX:
        raise ValueError(
            f"found a number of {len(text)} characters; at most {NUMBER_CHARACTERS_MAX} are read"
        )
    if is_integer:
        return int(text)
    if _BASED_INT.match(text):
        return int(text, 0)
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"found {text}, which is beyond a double; a number must be finite")
    return value


def read_tree(text: str, where: str, *, is_setting: bool = False) -> Tree:
    """Parses one YAML document.

    Args:
        text: The document.
        where: Stands before each message: a file's name, or `--set key=value`.
        is_setting: Messages name neither line nor key: `where` says it all.

    Raises:
        ScenarioError: Not YAML, or beyond a limit, or one of the refused constructs.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > FILE_BYTES_MAX:
        raise ScenarioError(
            f"{where}: {size} bytes; a scenario has at most {FILE_BYTES_MAX} "
            "(put a long trace into a CSV file: workload.path)"
        )
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Reader(iter(yaml.parse(text, Loader=loader)), where, is_setting).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and not is_setting else ""
        raise ScenarioError(f"{where}{line}: not valid YAML: {_one_line(error)}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise ScenarioError(f"{where}: not valid YAML: {_one_line(error)}") from None


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None  # Events that come from text carry one.
    return event.start_mark.line + 1


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        parts = [part for part in (error.context, error.problem) if part]
        return ", ".join(parts)
    return " ".join(str(error).split())[:200]


class _Reader:
    """Builds data from parser events; every check happens before the value is kept."""

    def __init__(self, events: Iterator[yaml.Event], where: str, is_setting: bool) -> None:
        self._is_setting = is_setting
        self._events = events
        self._where = where
        self._lines: dict[KeyPath, int] = {}
        self._nodes = 0

    def document(self) -> Tree:
        next(self._events)  # StreamStart
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            return Tree(None, {})
        root = next(self._events)
        self._lines[()] = _line(root)
        data = self._value(root, ())
        next(self._events)  # DocumentEnd
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            raise self._error(event, (), "a second document begins; a scenario is one document")
        return Tree(data, self._lines)

    def _error(self, event: yaml.Event, path: KeyPath, message: str) -> ScenarioError:
        if self._is_setting:
            return ScenarioError(f"{self._where}: {message}")
        return ScenarioError(f"{self._where}:{_line(event)}: {dotted(path)}: {message}")

    def _value(self, event: yaml.Event, path: KeyPath) -> Any:
        self._check(event, path)
        if isinstance(event, yaml.ScalarEvent):
            if not event.implicit[0]:
                return event.value  # Quoted: text.
            try:
                return plain_scalar(event.value)
            except ValueError as error:
                raise self._error(event, path, str(error)) from None
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        return self._mapping(path)

    def _check(self, event: yaml.Event, path: KeyPath) -> None:
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise self._error(event, path, f"more than {NODES_MAX} values in one file")
        if len(path) > DEPTH_MAX:
            raise self._error(event, path[:4], f"nested more than {DEPTH_MAX} levels deep")
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor is not None:
            raise self._error(
                event, path, f"anchors and aliases ({anchor}) are not read; write the value itself"
            )
        if tag is not None:
            raise self._error(event, path, f"the tag {tag} is not read; write a plain value")

    def _sequence(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            here = (*path, len(items))
            self._lines[here] = _line(event)
            items.append(self._value(event, here))
        return items

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            self._check(event, path)
            if not isinstance(event, yaml.ScalarEvent):
                raise self._error(event, path, "a key must be a word, not a list or a map")
            key = event.value
            here = (*path, key)
            if key in items:
                first = self._lines[here]
                raise self._error(event, here, f"this key stands already in line {first}")
            self._lines[here] = _line(event)
            items[key] = self._value(next(self._events), here)
        return items
