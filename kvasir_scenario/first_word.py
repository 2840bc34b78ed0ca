"""The first word of a command line: a command, or a scenario file."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import click


def check_first_word(context: click.Context, word: str, commands: Sequence[str]) -> None:
    """A word that is no command must look like a file, or be one.

    Raises:
        click.UsageError: It does neither; with the command that was probably meant.
    """
    if word.startswith("-") or "." in word or "/" in word or Path(word).exists():
        return
    near = get_close_matches(word, commands, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = ", ".join(commands)
    raise click.UsageError(
        f"{word[:80]!r} is neither a command ({known}) nor a scenario file{hint}", context
    )
