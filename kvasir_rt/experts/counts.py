"""What a stage's coordinator says of itself to the bridge: `wire.ExpertCounts`, from the core."""

from collections import Counter

from kvasir_core.swarm.statistics import CoordinatorStatistics
from kvasir_core.swarm.words import RANK, Failure, Standing, WorkerId
from kvasir_core.units import Nanos
from kvasir_rt import wire

STATE = (
    "is_engaged", "engagements", "busy", "slots", "threshold", "reading", "polls_missed",
    "maps_missed", "clock_jumps", "workers_known", "workers_attached",
)  # fmt: skip
COUNTS = (
    "calls", "dispatches", "trials", "hedges", "checks", "mismatches", "late", "dropped",
)  # fmt: skip


def counts_of(
    now: CoordinatorStatistics,
    failed: Counter[Failure],
    *,
    is_connected: bool,
    decided: str,
    engaged_ns: Nanos,
    pairs_computed: int,
    quarantined: int,
    decisions: int,
    law_checks: int,
    turn: int,
) -> wire.ExpertCounts:
    """One value of everything.

    Args:
        now: The core's own counts.
        failed: Flights that came back unanswered.
        is_connected: Whether the relay connection stands.
        decided: The last decision for or against remote experts, and its reason.
        engaged_ns: Time of the former, all together.
        pairs_computed: Routed pairs that the stage computed, for whatever reason.
        quarantined: Workers that ever were.
        decisions: Of the core.
        law_checks: Full ones.
        turn: How often this was asked.
    """
    standings: dict[WorkerId, Standing] = {}
    for slice_ in now.slices:  # A worker is what its most telling slice is.
        known = standings.get(slice_.worker)
        if known is None or RANK[slice_.standing] < RANK[known]:
            standings[slice_.worker] = slice_.standing
    calls, found = now.calls, Counter(standings.values())
    return wire.ExpertCounts(
        is_connected=is_connected,
        decided=decided,
        engaged_ns=engaged_ns,
        standings={str(standing): count for standing, count in found.items()},
        pairs_computed=pairs_computed,
        pairs_remote=calls.pairs_accepted,
        pairs_verified=calls.pairs_verified,
        pairs_fallback=calls.pairs_fallback,
        refused={str(why): failed[why] for why in Failure},
        quarantined=quarantined,
        decisions=decisions,
        law_checks=law_checks,
        turn=turn,
        **{name: getattr(now, name) for name in STATE},
        **{name: getattr(calls, name) for name in COUNTS},
    )
