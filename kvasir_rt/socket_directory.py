"""The private directory of a ring's sockets, and the removal of those whose bridge was killed.

A bridge holds a lock on its directory as long as it lives; the kernel lets go of it whatever kills
the process. So a directory that can be locked belongs to nobody, in whatever container it was.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "kvasir-ring-"
STALE_AFTER_S = 60.0  # Younger ones may be about to be locked.


class SocketDirectory:
    """A directory that only this user can enter, removed by `close`."""

    def __init__(self) -> None:
        place = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        remove_stale(Path(place))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale(place: Path) -> None:
    """Remove our user's directories whose bridge is dead."""
    for path in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # Locked, not ours, or gone meanwhile.
            state = path.lstat()
            if state.st_uid != os.getuid() or time.time() - state.st_mtime < STALE_AFTER_S:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
