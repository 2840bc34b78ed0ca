"""Addresses and names in command lines of the swarm: checked at once, refused by option."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from kvasir_rt.hub.dials import Origin

ValueT = TypeVar("ValueT")


def _parsed(option: str, parse: Callable[[str], ValueT], text: str) -> ValueT:
    try:
        return parse(text)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None


def origin_of(option: str, text: str) -> "Origin":
    """`http(s)://HOST:PORT`.

    Raises:
        UsageError: It is none; the message says what is wrong.
    """
    from kvasir_rt.hub.dials import parse_origin

    return _parsed(option, parse_origin, text)


def relay_of(text: str | None) -> str | None:
    """The address that `--relay` gives, if any.

    Raises:
        UsageError: It is none; the message says what is wrong.
    """
    from kvasir_rt.hub.dials import parse_relay

    return None if text is None else _parsed("--relay", parse_relay, text)


def name_of(option: str, text: str | None) -> str | None:
    """A model's name on the hub, if one is given.

    Raises:
        UsageError: No model can be called so.
    """
    from kvasir_rt.swarm.protocol import NAME_RULE, is_name

    if text is not None and not is_name(text):
        raise click.UsageError(f"{option} is {text[:80]!r}; a name has {NAME_RULE}")
    return text
