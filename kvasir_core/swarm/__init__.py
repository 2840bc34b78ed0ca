"""The swarm that grows under load: layer 1 in `coordinator.py`, layer 2 in `hub.py`.

Both take facts and return orders, as the ring does:

    decisions = coordinator.handle(event, now)     # or hub.handle
    due = coordinator.next_wakeup()                # send TimePassed then, at the latest

A *coordinator* sits beside a stage's router. It decides for each expert call which pairs go to
which worker (`selection`, `dispatch`), follows each call until every pair is accepted or local
(`calls`), and keeps a record of what each worker has shown (`standing`). A *hub* raises a saturated
model's target (`load`, `saturation`), and gives volunteers slices (`market`, `claims`) that count
while they are covered (`nodes`).

All numbers stand in `defaults`. Time is awake time (`clock`): call at least once a tick, for a
longer silence is taken for the shell's own sleep, in which nobody ages.
"""

from kvasir_core.swarm.coordinator import Coordinator
from kvasir_core.swarm.defaults import TOLERANCES, SwarmPolicy
from kvasir_core.swarm.eventlog import COORDINATOR_EVENTS, HUB_EVENTS, encode
from kvasir_core.swarm.hub import Hub
from kvasir_core.swarm.refusal import Refused

__all__ = [
    "COORDINATOR_EVENTS",
    "HUB_EVENTS",
    "TOLERANCES",
    "Coordinator",
    "Hub",
    "Refused",
    "SwarmPolicy",
    "encode",
]
