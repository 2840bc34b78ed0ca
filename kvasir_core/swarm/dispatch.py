"""Whether a worker is wanted, and which pairs it gets. Pure functions."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.words import Share

WHOLE_PAIRS_MAX = 16  # An expert with so few pairs goes whole: its weights are read once.
_ONE = 1 << 20  # Fixed point of a pair owed.


def is_wanted(
    *,
    is_alive: bool,
    is_proven: bool,
    is_engaged: bool,
    engaged_dispatch_age_ns: int | None,
    is_trial: bool,
    grace_age_ns: int | None,
    policy: SwarmPolicy,
) -> bool:
    """The truth table of layer 1 (law D1).

    A live worker is dispatched to if it is proven, and the coordinator is engaged or its last
    *engaged* dispatch to this worker is within the idle timeout (serving at rest must not refresh
    its own reason); or on its one trial within its grace window. Limits are inclusive.
    """
    if not is_alive:
        return False
    if is_proven:
        return is_engaged or (
            engaged_dispatch_age_ns is not None
            and engaged_dispatch_age_ns <= policy.idle_timeout_ns
        )
    return is_trial and grace_age_ns is not None and grace_age_ns <= policy.grace_ns


class Replica(NamedTuple):
    """Who may compute experts `[begin, end)`: at this measured rate, at most so many pairs."""

    begin: int
    end: int
    rate: int  # Pairs a second, at least 1.
    pairs_max: int


def split_pairs(pairs: Sequence[tuple[int, int]], replicas: Sequence[Replica]) -> list[list[Share]]:
    """Every pair to exactly one place: entry i for replica i, the last entry stays local.

    Each replica is owed its rate's share of the experts that it holds, and what is owed carries
    over from expert to expert, so that many experts of one pair are spread like one of many. An
    expert of few pairs goes whole to whom most is owed: splitting it would read its weights twice.
    """
    places: list[list[Share]] = [[] for _ in range(len(replicas) + 1)]
    room = [replica.pairs_max for replica in replicas]
    owed = [0] * len(replicas)
    edges = sorted({edge for replica in replicas for edge in (replica.begin, replica.end)})
    holders: list[int] = []
    weights: list[int] = []
    holders_until = 0  # Between two edges, and while all have room, the holders are the same.
    for expert, count in pairs:
        if expert >= holders_until:
            holders = [i for i, r in enumerate(replicas) if r.begin <= expert < r.end and room[i]]
            rates = sum([replicas[i].rate for i in holders])
            weights = [replicas[i].rate * _ONE // rates for i in holders]
            edge = bisect_right(edges, expert)
            holders_until = edges[edge] if edge < len(edges) else expert + 1
        if not holders:
            places[-1].append(Share(expert, 0, count))
            continue
        for i, weight in zip(holders, weights, strict=True):
            owed[i] += count * weight
        i = max(holders, key=owed.__getitem__)  # The first of those to whom most is owed.
        if room[i] > count and (count <= WHOLE_PAIRS_MAX or len(holders) == 1):
            places[i].append(Share(expert, 0, count))
            room[i] -= count
            owed[i] -= count * _ONE
        elif not _deal(expert, count, holders, owed, room, places):
            holders_until = 0
    return places


def _deal(
    expert: int, count: int, holders: Sequence[int], owed: list[int], room: list[int],
    places: Sequence[list[Share]],
) -> bool:  # fmt: skip
    """Cut one expert's pairs, by what is owed and while there is room; False if one is full."""
    first = 0
    if count > WHOLE_PAIRS_MAX and len(holders) > 1:
        for i in holders:
            take = min(count - first, room[i], max(0, owed[i] // _ONE))
            first = _give(places[i], expert, first, take)
            room[i] -= take
            owed[i] -= take * _ONE
    while first < count:
        i = max(holders, key=lambda k: (room[k] > 0, owed[k], -k))
        take = min(count - first, room[i])
        if not take:
            _give(places[-1], expert, first, count - first)
            break
        first = _give(places[i], expert, first, take)
        room[i] -= take
        owed[i] -= take * _ONE
    return min(room[i] for i in holders) > 0


def _give(place: list[Share], expert: int, first: int, count: int) -> int:
    """Append a share, joined to the one before if it continues it; returns the next pair."""
    if count and place and place[-1][0] == expert and place[-1][1] + place[-1][2] == first:
        place[-1] = Share(expert, place[-1].first, place[-1].pairs + count)
    elif count:
        place.append(Share(expert, first, count))
    return first + count
