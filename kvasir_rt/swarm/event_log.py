"""A core's event log, and beside it what a replay needs and must give: `FILE.core.json`.

That holds policy and seed from the start; at the end also how many events there were and the digest
of all decisions, in order. A replay of the log through a fresh core gives the same digest.

A log that cannot be written any more ends there, with an error in the process's own log: what it
tells of goes on.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.eventlog import encode
from kvasir_core.units import Nanos
from kvasir_rt.logs import log_event

logger = logging.getLogger("kvasir.swarm")


class DecisionDigest:
    """A digest over decisions, event by event."""

    def __init__(self) -> None:
        self.events = 0
        self._hash = hashlib.sha256()

    def add(self, decisions: Sequence[Any]) -> None:
        """What one event led to."""
        self.events += 1
        for decision in decisions:
            self._hash.update(repr(decision).encode())
        self._hash.update(b"\n")

    @property
    def hex(self) -> str:
        return self._hash.hexdigest()


def digest_of(decisions: Iterable[Sequence[Any]]) -> str:
    """Of a whole replay."""
    digest = DecisionDigest()
    for each in decisions:
        digest.add(each)
    return digest.hex


class EventLog:
    """Written event by event. Not thread-safe.

    Args:
        path: An earlier log is replaced.
        policy: The core's.
        seed: Of its chance.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: Path, policy: SwarmPolicy, seed: int) -> None:
        self._beside = path.with_name(path.name + ".core.json")
        self._core: dict[str, Any] = {"seed": seed, "policy": asdict(policy)}
        self._digest = DecisionDigest()
        self._path = path
        try:
            self._beside.write_text(json.dumps(self._core) + "\n")
            self._file: TextIO | None = path.open("w", encoding="utf-8")
        except OSError:
            self._beside.unlink(missing_ok=True)
            raise

    def write(self, event: Any, now: Nanos, decisions: Sequence[Any] = ()) -> None:
        """One event and what it led to."""
        if self._file is None:
            return
        try:
            self._file.write(encode(event, now) + "\n")
        except OSError as error:
            self._end(error)
        self._digest.add(decisions)

    def flush(self) -> None:
        """A log that ends in the middle of a crash is of little use."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        """The end: what the decisions were is written down."""
        if self._file is None:
            return
        end = {"events": self._digest.events, "decisions_sha256": self._digest.hex}
        try:
            self._file.close()
            self._beside.write_text(json.dumps(self._core | end) + "\n")
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        """What was written stays; its last line may be half a one."""
        file, self._file = self._file, None
        log_event(logger, "the event log ends here: it cannot be written", level=logging.ERROR,
                  file=str(self._path), why=error.strerror or str(error))  # fmt: skip
        if file is not None:
            with suppress(OSError):  # It tries to write what is left.
                file.close()
