"""Input to the hub that is refused, before anything changes (law M8)."""

from kvasir_core.errors import IllegalEvent
from kvasir_core.events import TimePassed
from kvasir_core.swarm.events import (
    CoordinatorAttached,
    CoordinatorGone,
    CoverageReported,
    Held,
    HubEvent,
    ModelRegistered,
    RelayClosed,
    RelayOpened,
    ServedRow,
    ServingReported,
    SlotsPolled,
    SlotsPollFailed,
    StateRestored,
    VolunteerAsked,
)
from kvasir_core.swarm.hub_state import HubState
from kvasir_core.swarm.market import Market
from kvasir_core.swarm.refusal import (
    Refused,
    check_flag,
    check_label,
    check_slices,
    check_whole,
)
from kvasir_core.swarm.words import ModelName, Slice, Standing

SEGMENTS_MAX = 4096  # Of one worker: 64 layers in 64 pieces.
HELD_MAX = 1024  # Slices on one disk; each is looked at when its node volunteers.
ROWS_MAX = 1 << 16  # Of one coordinator's report.
EXPERTS_OFFERED_MAX = 1 << 20
LAYERS_MAX = 4096
CELLS_MAX = 1 << 20  # Layers x experts of a model: the counters they take.


def check_input(event: HubEvent, state: HubState) -> None:
    """Raises Refused or IllegalEvent; changes nothing."""
    match event:
        case TimePassed():
            pass
        case CoverageReported():
            _check_coverage(event, state)
        case VolunteerAsked():
            _check_volunteer(event, state)
        case SlotsPolled():
            state.load.ids.check(event.poll)
            check_whole("slots", event.slots)
            check_whole("busy", event.busy, high=event.slots)
        case SlotsPollFailed():
            state.load.ids.check(event.poll)
        case ServingReported():
            _check_report(event, state)
        case RelayOpened() | RelayClosed():
            check_label("worker", event.worker)
            check_whole("session", event.session)
        case ModelRegistered():
            _check_model(event, state)
        case CoordinatorAttached():
            check_label("coordinator", event.coordinator)
            if event.slots_of:
                check_label("slots_of", event.slots_of)
            _check_known(event.model, state)
            polled = state.load.polled.get(event.coordinator)
            if polled is not None and polled.model != event.model:
                raise Refused(
                    "foreign",
                    f"coordinator {event.coordinator!r} serves {polled.model!r}; "
                    f"it must leave before it serves {event.model!r}",
                )
        case CoordinatorGone():
            _check_coordinator(event.coordinator, state)
        case StateRestored():
            _check_restored(event, state)
        case _:
            raise IllegalEvent(f"{event!r:.200} is no event of the hub")


def _check_known(model: object, state: HubState) -> None:
    check_label("model", model)
    if model not in state.markets:
        raise Refused("unknown", f"model {model!r} is not registered")


def _check_coordinator(coordinator: object, state: HubState) -> None:
    check_label("coordinator", coordinator)
    if coordinator not in state.load.polled:
        raise Refused("unknown", f"coordinator {coordinator!r} is not attached")


def _check_model(event: ModelRegistered, state: HubState) -> None:
    check_label("model", event.model)
    if type(event.layers) is not tuple or len(event.layers) > LAYERS_MAX:
        raise Refused("malformed", f"layers must be a list of at most {LAYERS_MAX}")
    for layer in event.layers:
        check_whole("a layer", layer)
    if sorted(set(event.layers)) != list(event.layers):
        raise Refused("malformed", f"layers must ascend: {event.layers!r:.60}")
    low = 1 if event.layers else 0
    check_whole("experts", event.experts, low, CELLS_MAX // max(1, len(event.layers)) * low)
    check_whole("hidden_size", event.hidden_size, 1)
    known = state.markets.get(event.model)
    if known is not None and known.model != event:
        raise Refused("foreign", f"model {event.model!r} is registered with other numbers")


def _check_volunteer(event: VolunteerAsked, state: HubState) -> None:
    check_label("node", event.node)
    check_whole("max_experts", event.experts_max, 1, EXPERTS_OFFERED_MAX)
    if event.model is not None:
        _check_known(event.model, state)
    if type(event.holds) is not tuple or len(event.holds) > HELD_MAX:
        raise Refused("malformed", f"holds must be a list of at most {HELD_MAX}")
    by_model: dict[ModelName, list[Slice]] = {}
    for held in event.holds:
        if not isinstance(held, Held):
            raise Refused("malformed", "holds must have [model, layer, begin, end] entries")
        check_label("a held model", held.model)
        by_model.setdefault(held.model, []).append(Slice(*held[1:]))
    for model, slices in by_model.items():
        check_slices("holds", tuple(slices), HELD_MAX)
        if model in state.markets:
            state.markets[model].check_slices(slices)


def _check_coverage(event: CoverageReported, state: HubState) -> None:
    check_label("worker", event.worker)
    check_flag("draining", event.is_draining)
    _check_known(event.model, state)
    node = state.nodes.get(event.worker)
    if node is None or event.segments != node.segments or event.model != node.market.model.model:
        check_slices("segments", event.segments, SEGMENTS_MAX)
        state.markets[event.model].check_slices(event.segments)
    if event.claim is not None:
        check_whole("claim", event.claim, high=1 << 62)
        state.claims.check(event.claim, event.worker)
    if node is None and event.segments and len(state.nodes) >= state.policy.nodes_max:
        raise Refused("full", f"{len(state.nodes)} workers have coverage, the most")


def _check_report(event: ServingReported, state: HubState) -> None:
    _check_coordinator(event.coordinator, state)
    if type(event.rows) is not tuple or len(event.rows) > ROWS_MAX:
        raise Refused("malformed", f"rows must be a list of at most {ROWS_MAX}")
    for row in event.rows:
        if not isinstance(row, ServedRow):
            raise Refused("malformed", "a report's rows are ServedRow")
        check_label("worker", row.worker)
        check_slices("a row's slice", ((row.layer, row.begin, row.end),), 1)
        check_whole("last_serve_ms", row.last_serve_ms)
        check_whole("pairs", row.pairs, high=1 << 62)
        if type(row.standing) is not Standing:
            raise Refused("malformed", f"standing is {row.standing!r:.60}")


def _check_restored(event: StateRestored, state: HubState) -> None:
    """What a store kept is checked as any input is: it may be another's, or half a file."""
    if not state.is_fresh:
        raise IllegalEvent("StateRestored is legal only as the hub's first event")
    check_whole("claim_next", event.claim_next, 1, 1 << 62)
    check_whole("session_next", event.session_next, 1, 1 << 62)
    restored = HubState(state.policy)
    for model in event.models:
        _check_model(model, restored)
        restored.markets[model.model] = Market(model, state.policy)
    for name in event.recruiting:
        _check_known(name, restored)
    for row in event.claims:
        check_label("node", row.node)
        check_whole("claim", row.claim, 1, event.claim_next - 1)
        check_whole("remaining_ns", row.remaining_ns, high=state.policy.claim_ttl_ns)
    for names in ([row.node for row in event.claims], [row.claim for row in event.claims]):
        if len(set(names)) != len(names):
            raise Refused("malformed", "two restored claims share a node or a number")
    for ban in event.bans:
        check_label("node", ban.node)
        check_whole("remaining_ns", ban.remaining_ns, high=1 << 62)
    for proven in event.proven:
        check_label("worker", proven.worker)
        check_whole("last_serve_ms", proven.last_serve_ms, 1)
    kept = [(row.model, Slice(row.layer, row.begin, row.end)) for row in event.claims]
    kept += [(row.model, Slice(row.layer, row.begin, row.end)) for row in event.proven]
    for model_name, slice_ in kept:
        _check_known(model_name, restored)
        check_slices("a restored slice", (slice_,), 1)
        restored.markets[model_name].check_slices((slice_,))
