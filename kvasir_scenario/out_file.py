"""Files that a command writes at its end: looked at before the work; only our own are replaced.

The work may take minutes. Each kind of file that Kvasir writes has a mark near its beginning.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from kvasir_core.errors import ScenarioError

PLAN = re.compile(rb"\A# Planned by kvasir-sim plan")
PLOT = re.compile(rb"\A\x89PNG.*tEXtSoftware\x00Kvasir", re.DOTALL)
PROFILE = re.compile(rb'\A\s*\{\s*"format":\s*"kvasir-profile"')
EVENT_LOG = re.compile(rb'\A\[(-?\d+,)?"[A-Za-z]')
STATUS = re.compile(rb'\A\{"state": ')
MARK_BYTES = 4096  # From the start: every mark is in there.


def check_out_file(
    option: str, path: Path, ours: re.Pattern[bytes], suffixes: Collection[str] = ()
) -> None:
    """Whether a file can be written there, and what it replaces is ours; nothing is changed.

    Raises:
        ScenarioError: It cannot, or must not, with the reason.
    """
    why = _why_not(path, ours, suffixes)
    if why is not None:
        raise ScenarioError(f"{option} {path} cannot be written: {why}")


def _why_not(path: Path, ours: re.Pattern[bytes], suffixes: Collection[str]) -> str | None:
    folder = path.parent
    try:
        mode = path.stat().st_mode if os.path.lexists(path) else None
        if mode is not None and S_ISDIR(mode):
            return "it is a directory"
        if suffixes and path.suffix.lower() not in suffixes:
            return f"its name must end in {' or '.join(suffixes)}"
        if not folder.is_dir():
            return f"there is no directory {folder}"
        if not os.access(folder, os.W_OK):
            return f"directory {folder} may not be written to"
        if mode is None:
            return None
        if not S_ISREG(mode):
            return "it is there and is no regular file"
        if not os.access(path, os.W_OK):
            return "that is not allowed"
        with path.open("rb") as file:
            start = file.read(MARK_BYTES)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    if start and not ours.search(start):
        return "it is there, and this command did not write it; name another, or delete it"
    return None
