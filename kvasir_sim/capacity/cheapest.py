"""The cheapest ring, or the fewest workers, that carry a given load.

**Rings**: every multiset of the scenario's devices up to a number of stages, cheapest first (by
price, or by the number of stages without prices). The planner splits the layers and bounds the
tokens per second; what cannot carry the load by that bound is not simulated. The first that holds
is the answer. **Workers**: the smallest number of each class, by doubling and halving; where
doubling twice made requests hardly faster, more will not carry the load either.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvasir_core.errors import KvasirError
from kvasir_sim.capacity.search import LoadSearch
from kvasir_sim.plan_load import load_of
from kvasir_sim.planner import plan_scenario
from kvasir_sim.sweep.points import Changes, point_scenario

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario

CANDIDATES_MAX = 20_000  # Multisets; 5 devices and 16 stages make 20,349.
BOUND_SLACK = 1.1  # The planner's bound is of average micro-batches.
WORKERS_MAX = 4096
GAIN_MIN = 0.05  # Of the mean time to end, by doubling the workers twice.
BOUNDED = frozenset({"roofline", "profile"})
Answer = dict[str, Any]


def cheapest_ring(
    search: LoadSearch, load: float, prices: Mapping[str, float], stages_max: int
) -> Answer:
    """Try rings in ascending cost until one carries the load."""
    scenario = search.knob.scenario
    tried: list[Answer] = []
    skipped = 0
    needed = None if search.knob.is_whole else load * load_of(scenario).output_tokens
    for devices in rings(scenario, prices, stages_max):
        described = describe(devices, prices)
        try:
            changes, bound = _ring(scenario, devices)
        except KvasirError as error:
            tried.append({**described, "holds": False, "why": " ".join(str(error).split())[:200]})
            continue
        if bound is not None and needed is not None and bound * BOUND_SLACK < needed:
            skipped += 1
            continue
        outcomes = search.driver.drive(
            [search.fate_at(load, seed, changes) for seed in search.seeds]
        )
        holds = search.is_carried(outcomes)
        whys = sorted({reason for outcome in outcomes for reason in outcome.why})
        tried.append({**described, "holds": holds, "why": "; ".join(whys) or None})
        if holds:
            stages = dict(changes)["ring.stages"]
            layers = None if isinstance(stages, int) else [stage["layers"] for stage in stages]
            best = {**described, "layers": layers}
            return {"found": True, "best": best, "tried": tried, "ruled_out_by_planner": skipped}
    return {"found": False, "best": None, "tried": tried, "ruled_out_by_planner": skipped}


def rings(
    scenario: "Scenario", prices: Mapping[str, float], stages_max: int
) -> Iterator[tuple[str | None, ...]]:
    """Devices of every ring, cheapest first; without prices, fewest first.

    Raises:
        ScenarioError: There are too many, or the stages are not alike.
    """
    names: list[str | None] = [name for name in scenario.devices if not prices or name in prices]
    if scenario.costs.kind not in BOUNDED:
        stages = scenario.ring.stages
        own = () if isinstance(stages, int) else stages
        if any(stage.model_dump(exclude={"layers"}, exclude_none=True) for stage in own):
            raise scenario.error(
                "ring.stages",
                f"costs of kind {scenario.costs.kind} cannot tell what another stage would take; "
                "the cheapest ring needs stages that are alike (ring.stages: N), or roofline costs",
            )
        names = [scenario.ring.device]
    most = min(stages_max, scenario.model.layers)
    found = list(
        itertools.islice(
            itertools.chain.from_iterable(
                itertools.combinations_with_replacement(names, count)
                for count in range(2, most + 1)
            ),
            CANDIDATES_MAX + 1,
        )
    )
    if len(found) > CANDIDATES_MAX:
        raise scenario.error(
            "devices",
            f"{len(names)} devices in up to {most} stages make more than {CANDIDATES_MAX} rings; "
            "give --price for the devices to choose from, or a lower --stages-max",
        )
    yield from sorted(found, key=lambda ring: (cost_of(ring, prices), len(ring)))


def cost_of(devices: tuple[str | None, ...], prices: Mapping[str, float]) -> float:
    """US dollars per hour, or the number of stages where a price is not known."""
    if not _are_priced(devices, prices):
        return len(devices)
    return sum(prices[name] for name in devices if name is not None)


def _are_priced(devices: tuple[str | None, ...], prices: Mapping[str, float]) -> bool:
    return all(name in prices for name in devices)


def describe(devices: tuple[str | None, ...], prices: Mapping[str, float]) -> Answer:
    counts = {name: devices.count(name) for name in dict.fromkeys(devices) if name is not None}
    usd_per_h = cost_of(devices, prices) if _are_priced(devices, prices) else None
    return {"stages": len(devices), "devices": counts, "usd_per_h": usd_per_h}


def _ring(scenario: "Scenario", devices: tuple[str | None, ...]) -> tuple[Changes, float | None]:
    """The changes that make a ring of these devices, and the planner's bound of its tokens/s.

    Raises:
        ScenarioError: The model does not fit.
    """
    ring = scenario.ring
    shared: list[tuple[str, Any]] = [("ring.links", None)] if ring.links is not None else []
    if isinstance(ring.kv_tokens, tuple):
        shared.append(("ring.kv_tokens", min(ring.kv_tokens)))
    if scenario.costs.kind not in BOUNDED:
        return (("ring.stages", len(devices)), *shared), None
    stages: list[dict[str, Any]] = [{"device": name, "layers": "auto"} for name in devices]
    planned = plan_scenario(point_scenario(scenario, (("ring.stages", stages), *shared)))
    split = [
        {"device": stage.device, "layers": list(layers)}
        for stage, layers in zip(planned.stages, planned.layers, strict=True)
    ]
    return (("ring.stages", split), *shared), planned.tokens_per_s


def cheapest_workers(search: LoadSearch, load: float, prices: Mapping[str, float]) -> Answer:
    """The smallest number of each class of workers, the other classes as they are."""
    scenario = search.knob.scenario
    assert scenario.experts is not None, "the caller has looked"
    classes: list[Answer] = []
    for index, worker in enumerate(scenario.experts.workers):
        count, tried = _fewest(search, load, index)
        price = prices.get(worker.name)
        usd_per_h = None if price is None or count is None else price * count
        classes.append(
            {"worker": worker.name, "count": count, "usd_per_h": usd_per_h, "tried": tried}
        )
    able = [answer for answer in classes if answer["count"] is not None]
    best = min(
        able,
        key=lambda answer: (
            float("inf") if answer["usd_per_h"] is None else answer["usd_per_h"],
            answer["count"],
        ),
        default=None,
    )
    return {"found": best is not None, "best": best, "workers": classes}


def _fewest(search: LoadSearch, load: float, index: int) -> tuple[int | None, dict[str, bool]]:
    """The smallest number of one class that carries the load, and what was tried."""
    tried: dict[str, bool] = {}
    means_s: list[float] = []

    def holds(count: int) -> bool:
        changes = _workers(search.knob.scenario, index, count)
        outcomes = search.driver.drive(
            [search.fate_at(load, seed, changes) for seed in search.seeds]
        )
        ends_s = [outcome.row.get("e2e_mean_s") or float("inf") for outcome in outcomes]
        means_s.append(sum(ends_s) / len(ends_s))
        tried[str(count)] = search.is_carried(outcomes)
        return tried[str(count)]

    if holds(0):
        return 0, tried
    low, high = 0, 1
    while not holds(high):
        low, high = high, 2 * high
        is_vain = len(means_s) > 3 and means_s[-1] > (1 - GAIN_MIN) * means_s[-3]
        if is_vain or high > WORKERS_MAX:
            return None, tried
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high, tried


def _workers(scenario: "Scenario", index: int, count: int) -> Changes:
    if count:
        return ((f"experts.workers.{index}.count", count),)
    assert scenario.experts is not None, "the caller has looked"
    workers = scenario.experts.workers
    rest = [*workers[:index], *workers[index + 1 :]]
    return (("experts.workers", [worker.model_dump(exclude_none=True) for worker in rest]),)
