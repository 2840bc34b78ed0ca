"""The scenario's section `experts` as numbers: the model's experts, and the swarm's policy."""

from dataclasses import dataclass, replace

from kvasir_core import Plan, nanos
from kvasir_core.swarm import SwarmPolicy
from kvasir_core.swarm.words import ModelName
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_experts import Experts, Hub, WorkerClass
from kvasir_scenario.swarm_policy import coordinator_numbers

COORDINATOR_HUB_LATENCY_S = 0.001
ELEMENTS_PER_EXPERT = 3  # Gate, up and down, each hidden x expert_ffn.


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNumbers:
    """What is routed.

    Attributes:
        name: The model's, in the market.
        layers: Those that hold routed experts.
        layers_of: Those of them in each stage.
        experts: Per layer.
        top_k: Experts per row.
        expert_bytes: Weights of one expert; None if the scenario does not say.
        row_bytes: One row of hidden states on the wire; 0 if the model's width is not given.
    """

    name: ModelName
    layers: tuple[int, ...]
    layers_of: tuple[tuple[int, ...], ...]
    experts: int
    top_k: int
    expert_bytes: int | None
    row_bytes: int


def expert_numbers(scenario: Scenario, experts: Experts, plan: Plan) -> ExpertNumbers:
    """What is routed, from `experts.model` and, where it says nothing, from `model`.

    Raises:
        ScenarioError: Something is missing or contradicts the model.
    """
    own, model = experts.model, scenario.model
    count = own.experts or model.experts
    top_k = own.top_k or model.experts_used
    if count is None or top_k is None:
        missing = "experts" if count is None else "top_k"
        raise scenario.error(
            "experts.model", f"{missing} is missing; give it here, or name a mixture in `model`"
        )
    if top_k > count:
        raise scenario.error(
            "experts.model.top_k", f"found {top_k}; it must be at most experts ({count})"
        )
    depth = own.layers or model.layers - own.first_layer
    stop = own.first_layer + depth
    if depth < 1 or stop > model.layers:
        raise scenario.error(
            "experts.model.layers",
            f"layers [{own.first_layer}, {stop}) are not layers of a model of {model.layers}",
        )
    layers = tuple(range(own.first_layer, stop))
    size = own.bytes_per_expert
    if size is None and model.hidden and model.expert_ffn:
        size = ELEMENTS_PER_EXPERT * model.hidden * model.expert_ffn * model.element_bytes
    if size is None and experts.workers:
        raise scenario.error(
            "experts.model.bytes_per_expert",
            "missing; workers download experts, and `model` gives no hidden and expert_ffn",
        )
    return ExpertNumbers(
        name=ModelName(scenario.name),
        layers=layers,
        layers_of=tuple(tuple(k for k in layers if a <= k < b) for a, b in plan.layers),
        experts=count,
        top_k=top_k,
        expert_bytes=size,
        row_bytes=(model.hidden or 0) * model.element_bytes,
    )


def experts_max_of(
    scenario: Scenario, index: int, kind: WorkerClass, numbers: ExpertNumbers
) -> int:
    """How many experts, over all layers, a worker of this class gives room to.

    Raises:
        ScenarioError: Its memory does not hold one.
    """
    limits = [numbers.experts * len(numbers.layers)]
    if kind.experts_max is not None:
        limits.append(kind.experts_max)
    if kind.memory_bytes is not None:
        assert numbers.expert_bytes is not None
        limits.append(kind.memory_bytes // numbers.expert_bytes)
        if not limits[-1]:
            raise scenario.error(
                f"experts.workers.{index}.memory_bytes",
                f"found {kind.memory_bytes}; one expert has {numbers.expert_bytes} bytes",
            )
    return min(limits)


def swarm_policy(scenario: Scenario, experts: Experts) -> SwarmPolicy:
    """The core's numbers for both layers.

    Raises:
        ScenarioError: They contradict each other.
    """
    hub = experts.hub or Hub()
    try:
        return _hub_numbers(coordinator_numbers(experts.coordinator), hub)
    except ValueError as error:
        raise scenario.error("experts", str(error)) from None


def coordinator_policy(policy: SwarmPolicy, experts: Experts) -> SwarmPolicy:
    """The coordinator's own rule; all else is common."""
    return replace(policy, rule=experts.coordinator.policy)


def _hub_numbers(policy: SwarmPolicy, own: Hub) -> SwarmPolicy:
    """A naive market is naive in all that was measured to matter."""
    is_naive = own.policy == "naive"
    tick = policy.tick_ns
    return replace(
        policy,
        rule=own.policy,
        poll_period_ns=nanos(own.poll_s),
        poll_max_ns=nanos(own.poll_timeout_s),
        reading_valid_ns=nanos(own.reading_valid_s),
        hub_up_ns=max(nanos(own.up_s), nanos(1e-9)),
        hub_down_ns=max(nanos(own.down_s), nanos(1e-9)),
        base=own.base,
        boost=own.boost,
        coverage_ttl_ns=nanos(own.coverage_ttl_s),
        heartbeat_ns=nanos(own.heartbeat_s),
        claim_ttl_ns=nanos(own.claim_ttl_s),
        volunteer_period_ns=nanos(own.volunteer_poll_s),
        idle_exit_ns=tick if is_naive else max(nanos(own.idle_exit_s), tick),
        release_period_ns=tick if is_naive else nanos(own.release_period_s),
        slice_experts_max=own.slice_experts_max,
        counts_claims=not is_naive,
        prefers_held=own.warm_rejoin and not is_naive,
    )
