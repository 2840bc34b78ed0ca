"""Files that a command writes at its end: looked at before the work, which may take minutes."""

import os
from pathlib import Path

from kvasir_core.errors import ScenarioError


def check_out_file(option: str, path: Path) -> None:
    """Whether a file can be written there; nothing is made or changed.

    Raises:
        ScenarioError: It cannot, with the reason.
    """
    folder = path.parent
    why = None
    if path.is_dir():
        why = "it is a directory"
    elif not folder.is_dir():
        why = f"there is no directory {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "that is not allowed"
    if why is not None:
        raise ScenarioError(f"{option} {path} cannot be written: {why}")
