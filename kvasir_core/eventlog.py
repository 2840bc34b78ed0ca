"""Events as text, one JSON array a line, and the replay that must give the identical decisions.

A log is the form of a bug report and the parity test between simulator and runtime: `replay` feeds
it to a fresh core of either shell. Format: `[nanoseconds, "EventName", field, ...]`. Events are
`NamedTuple`s of integers, floats, strings, `StrEnum`s, booleans, None and tuples of those.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from math import isfinite
from typing import Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

from kvasir_core.errors import IllegalEvent
from kvasir_core.events import RingEvent
from kvasir_core.units import Nanos

LINE_MAX = 1 << 20  # Characters; the largest event lists one micro-batch's requests.

D_co = TypeVar("D_co", covariant=True)


class Core(Protocol[D_co]):
    """Anything that takes events and answers with decisions."""

    def handle(self, event: Any, now: Nanos, /) -> Sequence[D_co]: ...


def registry_of(union: Any) -> dict[str, type[Any]]:
    """Event classes by name, from a union of `NamedTuple` classes."""
    return {kind.__name__: kind for kind in get_args(union)}


RING_EVENTS = registry_of(RingEvent)


def encode(event: Any, now: Nanos) -> str:
    """One line, without its end; floats are written so that they read back equal."""
    return json.dumps([now, type(event).__name__, *event], allow_nan=False, separators=(",", ":"))


def decode(line: str, registry: dict[str, type[Any]] = RING_EVENTS) -> tuple[Any, Nanos]:
    """Read one line back.

    Raises:
        IllegalEvent: The line is not an event of this registry; it says which rule broke.
    """
    if len(line) > LINE_MAX:
        raise IllegalEvent(f"an event line has {len(line)} characters; at most {LINE_MAX}")
    try:
        now, name, *values = json.loads(line)
        kind = registry[name]
        hints = get_type_hints(kind)
        if len(values) > len(hints):
            raise ValueError(f"{name} has {len(values)} fields, not {len(hints)}")
        fields = [_typed(v, hint) for v, hint in zip(values, hints.values(), strict=False)]
        return kind(*fields), Nanos(_typed(now, int))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise IllegalEvent(f"not an event: {line[:200]!r} ({error})") from error


def replay(
    core: Core[D_co], lines: Iterable[str], registry: dict[str, type[Any]] = RING_EVENTS
) -> Iterator[tuple[Any, Nanos, Sequence[D_co]]]:
    """Feed a log to a fresh core; yields `(event, now, decisions)` in order."""
    for line in lines:
        event, now = decode(line, registry)
        yield event, now, core.handle(event, now)


def _typed(value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it, or ValueError."""
    hint = getattr(hint, "__supertype__", hint)
    if get_origin(hint) is tuple:
        item, *rest = get_args(hint)
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not a list")
        if rest and rest[0] is not Ellipsis:
            return tuple(_typed(v, h) for v, h in zip(value, (item, *rest), strict=True))
        return tuple(_typed(v, item) for v in value)
    if isinstance(hint, type) and issubclass(hint, tuple) and isinstance(value, list):
        hints = get_type_hints(hint)
        return hint(*[_typed(v, h) for v, h in zip(value, hints.values(), strict=True)])
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    options = get_args(hint)
    if options:
        return _one_of(value, options)
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise ValueError(f"{value!r} is not of type {getattr(hint, '__name__', hint)}")
    if hint is float and not isfinite(value):
        raise ValueError(f"{value!r} is not finite")
    return value


def _one_of(value: Any, options: tuple[Any, ...]) -> Any:
    """The first option of a union or literal that takes the value."""
    for option in options:
        if option == value:
            return value
        if option is type(None):
            if value is None:
                return None
            continue
        try:
            return _typed(value, option)
        except (ValueError, TypeError):
            continue
    raise ValueError(f"{value!r} is none of {options}")
