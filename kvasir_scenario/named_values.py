"""`NAME=VALUE` on the command line: `--set`, `--slo`, `--price`, `--grid`, `--range`, policies."""

from kvasir_core.errors import ScenarioError

PLACE_CHARACTERS_MAX = 80  # Enough to find the setting again in a command line.


def place_of(option: str, text: str) -> str:
    """The option as a place in messages."""
    return f"{option} {' '.join(text.split())[:PLACE_CHARACTERS_MAX]}"


def name_and_value(option: str, text: str, form: str, example: str) -> tuple[str, str]:
    """The two sides of `NAME=VALUE`, the name without spaces around it.

    Args:
        option: `--slo`.
        text: What was given with it.
        form: What it must look like: `NAME=SECONDS`.
        example: A value, for a message: `1.0`.

    Raises:
        ScenarioError: The name or the value is missing.
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    place = place_of(option, text)
    if not name:
        raise ScenarioError(f"{place}: the name is missing; it must be {form}")
    if not equals:
        raise ScenarioError(
            f"{place}: its value is missing; it must be {form}, for example "
            f"{option} {name[:PLACE_CHARACTERS_MAX]}={example}"
        )
    return name, value


def number_of(option: str, text: str, value: str, wanted: str, most: float) -> float:
    """A number from 0 to `most`.

    Raises:
        ScenarioError: It is none.
    """
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        given = f"found {value.strip()[:PLACE_CHARACTERS_MAX]!r}" if value.strip() else "found none"
        raise ScenarioError(f"{place_of(option, text)}: {given}; it must be {wanted}")
    return number
