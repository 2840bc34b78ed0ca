"""Input that is refused, and the checks that refuse it before anything changes."""

from itertools import pairwise
from typing import Literal

from kvasir_core.errors import IllegalEvent

Code = Literal["malformed", "unknown", "foreign", "stale", "full"]

LABEL_MAX = 128  # Characters of a node's or model's name: a fingerprint fits twice.
COUNT_MAX = 1 << 31  # Of anything that is counted; more is no count.


class Refused(IllegalEvent):
    """A peer asked for what cannot be; nothing has changed. `code` picks the HTTP status.

    malformed: a value breaks its rule (422). unknown: no such model, coordinator (404). foreign:
    it belongs to another node (403). stale: of a generation that is over (409). full: a limit
    is reached (503).
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_whole(name: str, value: object, low: int = 0, high: int = COUNT_MAX) -> None:
    """An integer within limits: no float, NaN, bool or string."""
    if type(value) is not int or not low <= value <= high:
        raise Refused(
            "malformed", f"{name} is {_shown(value)}; it must be a whole number, {low} to {high}"
        )


def check_label(name: str, value: object) -> None:
    """A printable, not empty, short name."""
    is_label = type(value) is str and 0 < len(value) <= LABEL_MAX and value.isprintable()
    if not is_label:
        raise Refused(
            "malformed",
            f"{name} is {_shown(value)}; it must be 1 to {LABEL_MAX} printable characters",
        )


def check_flag(name: str, value: object) -> None:
    if type(value) is not bool:
        raise Refused("malformed", f"{name} is {_shown(value)}; it must be true or false")


def check_slices(name: str, slices: object, entries_max: int) -> None:
    """Tuples `(layer, begin, end)` of whole numbers, not inverted, none overlapping another."""
    if type(slices) is not tuple or len(slices) > entries_max:
        raise Refused("malformed", f"{name} must be a list of at most {entries_max} ranges")
    for entry in slices:
        if not isinstance(entry, tuple) or len(entry) != 3:
            raise Refused("malformed", f"{name} has {_shown(entry)}, not [layer, begin, end]")
        for value in entry:
            check_whole(f"a number in {name}", value)
        if entry[1] >= entry[2]:
            raise Refused("malformed", f"{name} has {_shown(entry)}: begin is not before end")
    ordered = sorted(slices)
    for before, after in pairwise(ordered):
        if before[0] == after[0] and after[1] < before[2]:
            raise Refused("malformed", f"{name} has {before!r} and {after!r}, which overlap")


def check_measure(name: str, value: object) -> None:
    """A float of any value, not-a-number too (the rules judge it), or None for "not finite"."""
    if value is not None and type(value) not in (float, int):
        raise Refused("malformed", f"{name} is {_shown(value)}; it must be a number or None")


def _shown(value: object) -> str:
    """A hostile value, short."""
    try:
        text = repr(value)
    except ValueError:  # An integer too long to print.
        text = "a very long number"
    return text if len(text) <= 60 else text[:57] + "..."
