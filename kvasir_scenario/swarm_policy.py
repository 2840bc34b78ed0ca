"""From section `experts.coordinator` to the core's policy, for both shells."""

from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.units import nanos
from kvasir_scenario.schema_experts import Coordinator


def coordinator_numbers(own: Coordinator) -> SwarmPolicy:
    """The section's numbers; those of the hub are the defaults.

    Raises:
        ValueError: They contradict each other.
    """
    return SwarmPolicy(
        threshold=own.saturation_threshold,
        decision_period_ns=nanos(own.period_s),
        self_poll_max_ns=nanos(own.poll_timeout_s),
        up_readings=own.up_readings,
        down_readings=own.down_readings,
        engaged_min_ns=max(nanos(own.engaged_min_s), nanos(1e-9)),
        idle_timeout_ns=max(nanos(own.idle_timeout_s), nanos(1e-9)),
        grace_ns=nanos(own.grace_s),
        blind_local_ns=nanos(own.unknown_limit_s),
        map_period_ns=nanos(own.map_period_s),
        call_deadline_ns=nanos(own.call_timeout_s),
        hedge_min_ns=nanos(own.hedge_s),
        answers_checked_first=own.answers_checked_first,
        check_share=own.check_share,
        tolerance=own.tolerance,
        quarantine_ns=nanos(own.quarantine_s),
        no_gain_ns=nanos(own.no_gain_s),
    )
