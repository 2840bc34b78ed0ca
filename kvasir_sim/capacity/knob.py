"""How the load of a scenario is turned up and down, without touching what the requests are.

The same seed gives the same requests at every load, in the same order, only closer together
(`kvasir_scenario.arrivals`): loads are compared on common random numbers. Where the number of
requests is given, a rate is what the seed's arrivals really come to: 150 Poisson arrivals miss
their rate by 8 % as often as not, and a ring would seem to carry more than it can.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never

from kvasir_core.units import NANOS_PER_SECOND
from kvasir_scenario.schema_workload import (
    ClosedWorkload,
    ConstantWorkload,
    GammaWorkload,
    PoissonWorkload,
    RateProfile,
    TraceWorkload,
)
from kvasir_scenario.workload import Requests, build_workload
from kvasir_sim.sweep.points import Changes, point_scenario

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario

WARMUP_SHARE = 0.2  # Of the arrivals' span: the ring starts empty, which flatters latencies.
USER_REQUESTS = 8  # Of each user in a closed loop, or hardly any had to wait for another.
DIGITS = 6  # Of a rate: finer than any search looks.

Open = PoissonWorkload | GammaWorkload | ConstantWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """The load of one scenario.

    Attributes:
        scenario: The scenario.
        base: Its own load: requests per second (of a profile the highest phase), or users.
        unit: Of the load.
        is_whole: Loads are whole numbers.
        can_extend: Runs can be made longer; a trace is as long as it is.
        span_s: Of a trace's arrivals.
        drifts: By seed and length, the rate that arrivals come to over the rate they are drawn for.
    """

    scenario: "Scenario"
    base: float
    unit: str
    is_whole: bool = False
    can_extend: bool = True
    span_s: float | None = None
    drifts: dict[tuple[int, int], float] = field(default_factory=dict)

    def at(self, factor: float) -> float:
        """The load at a factor of the base."""
        if self.is_whole:
            return max(1, round(self.base * factor))
        return float(f"{self.base * factor:.{DIGITS}g}")

    def changes(self, load: float, length: int, seed: int) -> Changes:
        """What sets a load and a seed, in a run `length` times as long as the scenario's."""
        return (*self._load(load, length, seed), ("run.seed", seed))

    def _load(self, load: float, length: int, seed: int) -> Changes:
        workload = self.scenario.workload
        match workload:
            case PoissonWorkload() | GammaWorkload() | ConstantWorkload():
                return self._open(workload, load, length, seed)
            case TraceWorkload():
                scale = load / self.base * workload.rate_scale / workload.time_scale
                span_s = (self.span_s or 0.0) * self.base / load
                set_rate = (("workload.time_scale", 1.0), ("workload.rate_scale", scale))
                return (*set_rate, *self._warmup(span_s))
            case ClosedWorkload():
                return self._closed(workload, int(load), length)
            case _:
                assert_never(workload)

    def _open(self, workload: Open, load: float, length: int, seed: int) -> Changes:
        rate: Any = load
        if not isinstance(workload.rate_per_s, RateProfile):
            if workload.requests is not None:
                rate = load / self._drift(workload.requests * length, length, seed)
        else:
            rate = workload.rate_per_s.model_dump(exclude_none=True)
            for phase in rate["phases"]:
                phase["rate_per_s"] *= load / self.base
            rate["phases"] = list(rate["phases"])
        set_rate = ("workload.rate_per_s", rate)
        if workload.requests is not None:
            count = workload.requests * length
            return (set_rate, ("workload.requests", count), *self._warmup(count / load))
        assert workload.duration_s is not None, "the schema asks for one of the two"
        span_s = workload.duration_s * length
        return (set_rate, ("workload.duration_s", span_s), *self._warmup(span_s))

    def _drift(self, count: int, length: int, seed: int) -> float:
        """Realised over nominal rate: the same at every rate, as gaps only stretch."""
        key = (seed, length)
        if key not in self.drifts:
            changes = (("workload.requests", count), ("run.seed", seed))
            requests, _ = build_workload(point_scenario(self.scenario, changes))
            assert isinstance(requests, Requests), "an open loop knows its arrivals"
            span_ns = int(requests.arrival_ns[-1] - requests.arrival_ns[0])
            realised = (count - 1) / (span_ns / NANOS_PER_SECOND) if span_ns else self.base
            self.drifts[key] = realised / self.base
        return self.drifts[key]

    def _closed(self, workload: ClosedWorkload, users: int, length: int) -> Changes:
        changes: Changes = (("workload.users", users),)
        if workload.requests is not None:
            count = max(workload.requests, USER_REQUESTS * users) * length
            return (*changes, ("workload.requests", count))
        if workload.duration_s is not None:
            return (*changes, ("workload.duration_s", workload.duration_s * length))
        return changes

    def _warmup(self, span_s: float) -> Changes:
        """The scenario's own warm-up, or a share of the span."""
        run = self.scenario.run
        if run.warmup_s:
            return ()
        span_s = span_s if run.horizon_s is None else min(span_s, run.horizon_s)
        return (("run.warmup_s", WARMUP_SHARE * span_s),)


def knob_of(scenario: "Scenario") -> Knob:
    """The knob of a scenario's load.

    Raises:
        ScenarioError: Its trace cannot be read, or arrives all at once.
    """
    workload = scenario.workload
    match workload:
        case PoissonWorkload() | GammaWorkload() | ConstantWorkload():
            rate = workload.rate_per_s
            if isinstance(rate, RateProfile):
                peak = max(phase.rate_per_s for phase in rate.phases)
                return Knob(scenario=scenario, base=peak, unit="requests/s at the peak")
            return Knob(scenario=scenario, base=rate, unit="requests/s")
        case TraceWorkload():
            requests, facts = build_workload(scenario)
            assert isinstance(requests, Requests), "a trace is no closed loop"
            if not facts.trace_span_s:
                raise scenario.error(
                    "workload", "all requests arrive at once: there is no rate to change"
                )
            return Knob(
                scenario=scenario, base=len(requests) / facts.trace_span_s, unit="requests/s",
                can_extend=False, span_s=facts.trace_span_s,
            )  # fmt: skip
        case ClosedWorkload():
            return Knob(scenario=scenario, base=workload.users, unit="users", is_whole=True)
        case _:
            assert_never(workload)
