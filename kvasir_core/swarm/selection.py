"""Which of a layer's holders get parts of a call, and which a trial."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kvasir_core.swarm.defaults import SECOND, SwarmPolicy
from kvasir_core.swarm.dispatch import Replica, is_wanted
from kvasir_core.swarm.standing import Worker
from kvasir_core.swarm.words import Slice
from kvasir_core.units import Nanos

Holder = tuple[Slice, Worker]


def choose(
    holders: Iterable[Holder], pairs: Sequence[tuple[int, int]], at: Nanos, *, is_engaged: bool
) -> tuple[list[Holder], list[Holder]]:
    """Of those with a slice that the pairs touch: who is ready for parts, who is tried.

    The least busy, then the longest unused, comes first: it gets what cannot be split.
    """
    experts = [expert for expert, _ in pairs]
    ready: list[Holder] = []
    trials: list[Holder] = []
    for slice_, worker in holders:
        first = bisect_left(experts, slice_.begin)
        if first == len(experts) or experts[first] >= slice_.end:
            continue
        if is_ready(worker, slice_, at, is_engaged=is_engaged):
            ready.append((slice_, worker))
        elif worker.is_trusted(slice_, at) or any(tried is worker for _, tried in trials):
            continue
        elif _is_tried(worker, at, is_engaged=is_engaged):
            trials.append((slice_, worker))
    ready.sort(key=lambda holder: (holder[1].in_flight, holder[1].sent_at))
    return ready, trials


def is_ready(worker: Worker, slice_: Slice, at: Nanos, *, is_engaged: bool) -> bool:
    """Trusted, wanted by the truth table, with room, and not overdue with anything."""
    if worker.overdue or worker.in_flight >= worker.policy.in_flight_max:
        return False
    return worker.is_trusted(slice_, at) and is_wanted(
        is_alive=worker.is_attached,
        is_proven=True,
        is_engaged=is_engaged,
        engaged_dispatch_age_ns=None if worker.engaged_at is None else at - worker.engaged_at,
        is_trial=False,
        grace_age_ns=None,
        policy=worker.policy,
    )


def replicas_of(ready: Sequence[Holder], policy: SwarmPolicy) -> list[Replica]:
    """Their rates, none below an eighth of the best: who gets nothing is never measured again.

    None gets more than it computes in a quarter of the deadline; the rest stays local.
    """
    floor = max((worker.rate for _, worker in ready), default=0) // 8 + 1
    budget_ns = policy.call_deadline_ns // 4
    return [
        Replica(
            slice_.begin,
            slice_.end,
            max(worker.rate, floor),
            max(1, worker.rate * budget_ns // SECOND),
        )
        for slice_, worker in ready
    ]


def _is_tried(worker: Worker, at: Nanos, *, is_engaged: bool) -> bool:
    """One trial at a time, within a window of grace; engaged or not, or none would be proven."""
    if worker.is_on_trial or not worker.open_window(at):
        return False
    return is_wanted(
        is_alive=worker.is_attached,
        is_proven=False,
        is_engaged=is_engaged,
        engaged_dispatch_age_ns=None,
        is_trial=True,
        grace_age_ns=None if worker.grace_from is None else at - worker.grace_from,
        policy=worker.policy,
    )
