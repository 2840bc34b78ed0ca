"""Paths in scenarios: `${KVASIR_DATA}` and paths relative to the scenario file."""

import os
import re
from pathlib import Path

from kvasir_core.errors import ScenarioError
from kvasir_scenario.schema import Scenario

DATA_VARIABLE = "KVASIR_DATA"
_VARIABLE = re.compile(r"\$\{([^}]*)\}|\$(\w+)")


def data_directory(base: Path) -> Path:
    """Where `${KVASIR_DATA}` points: the environment's word, or `../shared` beside the checkout."""
    given = os.environ.get(DATA_VARIABLE)
    if given:
        return Path(given).expanduser()
    for start in (base.absolute(), Path(__file__).absolute().parent):
        for folder in (start, *start.parents):
            if (folder / "pyproject.toml").is_file() and (folder / "kvasir_core").is_dir():
                return folder.parent / "shared"
    raise ScenarioError(
        f"${{{DATA_VARIABLE}}} is used, but the environment does not set it and there is no "
        "checkout to look beside; set it to the folder that holds the data"
    )


def expand_path(text: str, base: Path) -> Path:
    """The path that `text` means in a scenario whose file lies in `base`.

    Raises:
        ScenarioError: Another variable than KVASIR_DATA.
    """
    for match in _VARIABLE.finditer(text):
        name = match[1] if match[1] is not None else match[2]
        if match[1] != DATA_VARIABLE:
            raise ScenarioError(
                f"found the variable {name!r} in {text!r}; only ${{{DATA_VARIABLE}}} is expanded"
            )
    if _VARIABLE.search(text):
        folder = str(data_directory(base))
        text = text.replace(f"${{{DATA_VARIABLE}}}", folder)
    return base / Path(text).expanduser()


def existing_file(scenario: Scenario, key: str, text: str, *, obtain: str | None = None) -> Path:
    """The file that `key` names.

    Args:
        scenario: For the base directory and the message.
        key: The key that holds `text`, dotted.
        text: The path as the user wrote it.
        obtain: How to get the file; stands in the message.

    Raises:
        ScenarioError: It is not there, or is no file; names file, line and key.
    """
    try:
        path = expand_path(text, scenario.base)
    except (ScenarioError, RuntimeError) as error:
        raise scenario.error(key, str(error)) from None
    hint = f"; {obtain}" if obtain else ""
    if path.is_dir():
        raise scenario.error(key, f"found {text}, which is a folder; it must be a file{hint}")
    if not path.is_file():
        raise scenario.error(key, f"found {text}, but there is no file {path}{hint}")
    return path
