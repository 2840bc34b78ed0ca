"""One stage of the ring as the bridge knows it, and what the crew was told to be."""

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kvasir_core.plan import Plan
from kvasir_rt import wire

HOLD_FACTOR = 20  # Times the median hold per row before a computation counts as stuck.
HOLD_FLOOR_NS = 1_500_000_000
HOLD_FIRST_NS = 60_000_000_000  # Until holds are known: a first pass may compile or page in.
HOLDS_KEPT = 256


class Step(IntEnum):
    """How far a stage is in the barrier of the current epoch."""

    ABSENT = 0
    LOADING = 1
    LOADED = 2
    IDLE = 3
    LISTENING = 4
    WIRED = 5


@dataclass(slots=True, eq=False)
class Member:
    """One stage of the ring, whichever process is it now."""

    stage: int
    is_local: bool
    step: Step = Step.ABSENT
    peer: bytes = b""
    join: wire.Join | None = None
    endpoint: str = ""
    resident_bytes: int = 0
    since_ns: int = 0  # When the current step began.
    heard_ns: int = 0
    beat: wire.Beat | None = None
    clock_offset_ns: int = 0  # Its clock minus ours.
    round_trip_ns: int = 1 << 62  # Of the pulse that gave the offset.
    restarts: int = 0
    slowdown: float = 1.0  # What a scenario's fault asks of it.
    holds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=HOLDS_KEPT))
    link_broken_ns: int | None = None  # When its upstream reported it.

    @property
    def pid(self) -> int | None:
        return self.join.pid if self.join is not None else None

    def hold_limit_ns(self, rows: int) -> int:
        """How long a micro-batch of so many rows may be computed."""
        if len(self.holds) < 8:
            return HOLD_FIRST_NS
        held, rows_seen = sorted(self.holds)[len(self.holds) // 2]
        return max(HOLD_FLOOR_NS, HOLD_FACTOR * held * max(1, -(-rows // rows_seen)))


@dataclass(slots=True)
class Spare:
    """A stage that has joined and waits for a place."""

    join: wire.Join
    heard_ns: int


class Loss(NamedTuple):
    """A stage is lost. If `is_dead` its process is gone or must go, else only frames are."""

    stage: int
    why: str
    is_dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewOptions:
    """What the crew is to become.

    Attributes:
        plan: The ring's plan.
        dtype: Of boundaries and computation, such as `float32`.
        compute: What stages do.
        remote: Stages that join from elsewhere; the others are spawned here.
        secret: What a joining stage must know.
        silence_s: A stage that is not heard of for so long is lost; beats come every 0.2 s.
        crowded_silence_s: The same for a process of this machine that is alive and not stopped.
        load_max_s: Longest time from joining to loaded.
        rejoin_max_s: How long a lost remote stage may stay away.
        restarts_max: More losses than this within `restart_window_s` end the ring.
        restart_window_s: See `restarts_max`.
    """

    plan: Plan
    dtype: str
    compute: wire.ComputeSpec
    remote: frozenset[int] = frozenset()
    secret: str
    silence_s: float = 1.4  # Seven beats; a stopped stage is found in under 2 s.
    crowded_silence_s: float = 10.0  # On a machine that has much else to do.
    load_max_s: float = 600.0
    rejoin_max_s: float = 120.0
    restarts_max: int = 10
    restart_window_s: float = 60.0

    @property
    def overlap(self) -> int:
        """Most micro-batches that a stage holds at once, so that these may overtake each other.

        0 for stages without experts elsewhere, which hold one.
        """
        experts = self.compute.experts if isinstance(self.compute, wire.ModelSpec) else None
        return 0 if experts is None else experts.overlap
