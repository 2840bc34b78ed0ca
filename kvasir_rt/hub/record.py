"""The record of recruitment: what the hub decided that people ask about later."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvasir_core.swarm.decisions import (
    Assign,
    HubDecision,
    LapseClaim,
    LoseWorker,
    RefuseRelay,
    SetTarget,
)

ENTRIES_UNWRITTEN_MAX = 10_000  # While the database does not answer; then the oldest are lost.


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the record. `at_s` is wall-clock time, for people; nothing is decided by it."""

    kind: str
    model: str | None
    node: str | None
    detail: dict[str, Any]
    at_s: float = field(default_factory=time.time)


class Record:
    """The newest entries in memory, and those that are not in the database yet."""

    def __init__(self, recent_max: int) -> None:
        self.recent: deque[Entry] = deque(maxlen=recent_max)
        self._claim_newest = 0
        self._unwritten: deque[Entry] = deque(maxlen=ENTRIES_UNWRITTEN_MAX)

    def add(self, kind: str, *, model: str | None = None, node: str | None = None,
            **detail: Any) -> None:  # fmt: skip
        entry = Entry(kind, model, node, detail)
        self.recent.append(entry)
        self._unwritten.append(entry)

    def note(self, decision: HubDecision) -> None:
        """Keep what of a decision people ask about."""
        match decision:
            case SetTarget(model, target, is_recruiting):
                self.add("target", model=model, target=target, recruiting=is_recruiting)
            case Assign(node, claim, _, model, slice_, scarcity) if claim > self._claim_newest:
                self._claim_newest = claim  # Asked for again, it is no news.
                self.add("assigned", model=model, node=node, claim=claim, layer=slice_.layer,
                         experts=[slice_.begin, slice_.end], scarcity=scarcity)  # fmt: skip
            case LoseWorker(worker):
                self.add("lost", node=worker)
            case LapseClaim(claim, node):
                self.add("lapsed", node=node, claim=claim)
            case RefuseRelay(worker, session, why):
                self.add("relay_refused", node=worker, session=session, why=why)
            case _:
                pass

    def take_unwritten(self) -> list[Entry]:
        taken = list(self._unwritten)
        self._unwritten.clear()
        return taken

    def put_back(self, entries: list[Entry]) -> None:
        """They could not be written."""
        self._unwritten.extendleft(reversed(entries))
