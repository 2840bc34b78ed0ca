"""One more of everything: for each resource of a scenario, the changes that add one step of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvasir_core.errors import ScenarioError
from kvasir_core.plan import WIDTH_MAX
from kvasir_scenario.planning import plan_of
from kvasir_scenario.schema_ring import WINDOW_MAX, Link
from kvasir_sim.capacity.driver import Row
from kvasir_sim.costs.shape import shape_from
from kvasir_sim.planner import auto_layers
from kvasir_sim.sweep.points import Changes

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario

GIB = 1 << 30
GB = 1e9
ROWS_STEP = 16  # A tile of most kernels.
REQUESTS_STEP = 16
SPLITTING = frozenset({"roofline", "profile"})  # Costs that know enough to split by.


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One step of one resource.

    Attributes:
        name: Of the resource.
        step: What is added, in words.
        changes: That add it; None where it cannot be added.
        why_not: Why it cannot.
        priced: Name of the device or worker that it takes, if it takes one.
    """

    name: str
    step: str
    changes: Changes | None = None
    why_not: str | None = None
    priced: str | None = None


def one_more(scenario: "Scenario", row: Row) -> list[Resource]:
    """Every resource; `row` has the figures of a run at the capacity."""
    return [
        *_stages(scenario, row),
        _kv(scenario),
        _links(scenario),
        *_workers(scenario),
        _window(scenario, row["window"]),
        *_widths(scenario),
    ]


def _stages(scenario: "Scenario", row: Row) -> list[Resource]:
    ring, count = scenario.ring, scenario.ring.stage_count
    found: list[Resource] = []
    if count + 1 > scenario.model.layers:
        why = f"{count} stages hold all {scenario.model.layers} layers"
        return [Resource(name="stage", step="+1 stage", why_not=why)]
    rest = _one_place_more(scenario)
    if isinstance(ring.stages, int):
        changes = (("ring.stages", count + 1), *rest)
        return [Resource(name="stage", step="+1 stage", changes=changes, priced=ring.device)]
    layers = "auto" if scenario.costs.kind in SPLITTING else None
    stages = [
        {**stage.model_dump(exclude_none=True, exclude={"layers"}), "layers": layers}
        for stage in ring.stages
    ]
    if layers is not None and any(stage.layers not in (None, "auto") for stage in ring.stages):
        split = (("ring.stages", stages),)
        found.append(Resource(name="split", step="layers split by the planner", changes=split))
    busiest = row["verdict_stage"]
    twin = stages[count - 1 if busiest is None else busiest]
    at = count - 1 if busiest is None else busiest
    more = [*stages[: at + 1], twin, *stages[at + 1 :]]
    step = f"+1 stage like stage {at}, layers split anew"
    found.append(
        Resource(
            name="stage",
            step=step,
            changes=(("ring.stages", more), *rest),
            priced=twin.get("device") or ring.device,
        )
    )
    return found


def _one_place_more(scenario: "Scenario") -> Changes:
    """What is given per stage or per hop, for one stage more; a fixed window grows with it."""
    ring = scenario.ring
    changes: list[tuple[str, Any]] = []
    if isinstance(ring.kv_tokens, tuple):
        changes.append(("ring.kv_tokens", [*ring.kv_tokens, min(ring.kv_tokens)]))
    if ring.links is not None:
        links = [link.model_dump(exclude_none=True) for link in ring.links]
        changes.append(("ring.links", [*links, links[-1]]))
    if ring.window != "auto" and (ring.window_max or WINDOW_MAX) > ring.window:
        changes.append(("ring.window", ring.window + 1))
    return tuple(changes)


def _kv(scenario: "Scenario") -> Resource:
    ring = scenario.ring
    step = "+1 GiB of KV per stage"
    if isinstance(ring.kv_tokens, str):
        return Resource(name="KV", step=step, why_not="KV is unbounded")
    layers = [stop - start for start, stop in plan_of(scenario, auto_layers).layers]
    given = ring.kv_tokens if isinstance(ring.kv_tokens, tuple) else (ring.kv_tokens,) * len(layers)
    try:
        token_bytes = shape_from(scenario).kv_bytes
    except ScenarioError:
        more = [tokens + max(ring.kv_block, tokens // 10) for tokens in given]
        step = "+10 % of KV (bytes are unknown without the model's shape)"
    else:
        more = [
            tokens + GIB // (token_bytes * count)
            for tokens, count in zip(given, layers, strict=True)
        ]
    value = more if isinstance(ring.kv_tokens, tuple) else min(more)
    return Resource(name="KV", step=step, changes=(("ring.kv_tokens", value),))


def _links(scenario: "Scenario") -> Resource:
    ring, step = scenario.ring, "+1 GB/s on every link"
    if all(hop.bandwidth_bytes_per_s is None for hop in ring.hops):
        return Resource(name="link", step=step, why_not="bytes take no time on the links")
    changes: list[tuple[str, Any]] = [("ring.link", _faster(ring.link))]
    if ring.links is not None:
        changes.append(("ring.links", [_faster(link) for link in ring.links]))
    if ring.return_link is not None:
        changes.append(("ring.return_link", _faster(ring.return_link)))
    return Resource(name="link", step=step, changes=tuple(changes))


def _faster(link: Link) -> dict[str, Any]:
    described = link.model_dump(exclude_none=True)
    if link.bandwidth_bytes_per_s is not None:
        described["bandwidth_bytes_per_s"] = link.bandwidth_bytes_per_s + GB
    return described


def _workers(scenario: "Scenario") -> list[Resource]:
    if scenario.experts is None:
        return []
    return [
        Resource(
            name="worker",
            step=f"+1 worker {worker.name}",
            changes=((f"experts.workers.{index}.count", worker.count + 1),),
            priced=worker.name,
        )
        for index, worker in enumerate(scenario.experts.workers)
    ]


def _window(scenario: "Scenario", window: int) -> Resource:
    step = f"+1 place (to {window + 1})"
    if window >= WINDOW_MAX:
        return Resource(name="window", step=step, why_not=f"at most {WINDOW_MAX}")
    changes: list[tuple[str, Any]] = [("ring.window", window + 1)]
    bound = scenario.ring.window_max
    if bound is not None and bound <= window:
        changes.insert(0, ("ring.window_max", window + 1))
    return Resource(name="window", step=step, changes=tuple(changes))


def _widths(scenario: "Scenario") -> list[Resource]:
    ring = scenario.ring
    steps = (
        ("micro-batch width", "micro_batch_width", ring.micro_batch_width, 1, "request"),
        ("row width", "row_width", ring.row_width, ROWS_STEP, "rows"),
        ("running", "running_max", ring.running_max, REQUESTS_STEP, "running requests"),
    )
    return [
        Resource(
            name=name, step=f"+{step} {what} (to {value + step})",
            changes=((f"ring.{key}", value + step),),
        )
        if value + step <= WIDTH_MAX
        else Resource(name=name, step=f"+{step} {what}", why_not=f"at most {WIDTH_MAX}")
        for name, key, value, step, what in steps
    ]  # fmt: skip
