"""The swarm's events in the log format of `kvasir_core.eventlog`.

`replay(core, lines, COORDINATOR_EVENTS)` or `HUB_EVENTS` needs a core of the same policy and seed.
"""

from math import isfinite
from typing import Any

from kvasir_core import eventlog
from kvasir_core.swarm.events import CoordinatorEvent, HubEvent
from kvasir_core.units import Nanos

COORDINATOR_EVENTS = eventlog.registry_of(CoordinatorEvent)
HUB_EVENTS = eventlog.registry_of(HubEvent)


def encode(event: Any, now: Nanos) -> str:
    """One line. JSON has no NaN: a measure that is not finite is written as None."""
    values = [None if isinstance(v, float) and not isfinite(v) else v for v in event]
    return eventlog.encode(type(event)(*values), now)
