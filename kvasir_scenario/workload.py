"""The scenario's workload, ready to be offered: a table of requests, or users in a closed loop.

Everything that chance decides is decided here, from `run.seed` alone, so that simulator and runtime
offer the same requests at the same times. See `traces` for files, `arrivals` and `lengths` for what
is drawn, `streams` for why changing one does not move the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from kvasir_core.units import NANOS_PER_SECOND, nanos
from kvasir_scenario.arrivals import (
    RateCurve,
    arrivals,
    constant_sums,
    gamma_sums,
    poisson_sums,
)
from kvasir_scenario.data_paths import existing_file
from kvasir_scenario.lengths import draw_nanos, draw_tokens, sampler_of
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_workload import (
    Cancels,
    ClosedWorkload,
    ConstantWorkload,
    GammaWorkload,
    PoissonWorkload,
    TraceWorkload,
)
from kvasir_scenario.streams import Purpose, stream
from kvasir_scenario.trace_columns import SPAN_NS_MAX, TimeColumn
from kvasir_scenario.traces import PrefixHashes, Trace, read_trace

Ints = NDArray[np.int64]

NEVER_NS = np.iinfo(np.int64).max
"""A cancel at the end of time: after everything else that happens."""

DRAWN_AHEAD = 1024  # By a closed loop; a draw alone costs as much as many.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """Requests by arrival, as parallel int64 columns.

    Attributes:
        request_id: Data row in the trace, from 0, counted before slicing; else counted.
        arrival_ns: Ascending; requests that arrive together keep the trace's order.
        prompt_tokens: At least 1.
        output_tokens: At least 1; 0 only in `WorkloadFacts.failed_rows`.
        prefix_hashes: Where the trace carries them.
        cancel_ns: When the client goes away; `NEVER_NS` for those that stay.
        deadline_ns: From each arrival; unfinished requests are then given up.
    """

    request_id: Ints
    arrival_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    prefix_hashes: PrefixHashes | None = None
    cancel_ns: Ints | None = None
    deadline_ns: int | None = None

    def __len__(self) -> int:
        return len(self.request_id)

    def take(self, rows: Ints) -> "Requests":
        """These rows, in this order."""
        hashes, cancels = self.prefix_hashes, self.cancel_ns
        return Requests(
            request_id=self.request_id[rows],
            arrival_ns=self.arrival_ns[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            prefix_hashes=None if hashes is None else hashes.take(rows),
            cancel_ns=None if cancels is None else cancels[rows],
            deadline_ns=self.deadline_ns,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkloadFacts:
    """What was found and done while the workload was made.

    Attributes:
        trace_span_s: From the first to the last arrival as offered (sliced, scaled); None for users
            in a closed loop, whose arrivals are not known beforehand.
        out_of_order: Trace rows that arrive before a row that stands above them.
        ties: Requests that arrive in the same nanosecond as the one before.
        clipped: Prompts cut to `workload.max_total_tokens`; a `ClosedLoop` counts its own.
        failed_rows: Rows that already failed where the trace was taken (no output): offered, never
            run; their finish reason is `failed`. None where there is none.
        warnings: Sentences for the user.
    """

    trace_span_s: float | None = None
    out_of_order: int = 0
    ties: int = 0
    clipped: int = 0
    failed_rows: Requests | None = None
    warnings: tuple[str, ...] = ()

    @property
    def trace_failed(self) -> int:
        return 0 if self.failed_rows is None else len(self.failed_rows)


class ClosedLoop:
    """Users who each send, wait for the answer, think, and send again; all send first at 0.

    The k-th request gets the k-th lengths, whichever user sends it; thinking times likewise.

    Attributes:
        users: How many.
        requests: So many in all, then users stop; None: no end.
        duration_ns: Nobody sends at this time or later; None: no end.
        deadline_ns: From each arrival; unfinished requests are then given up.
        clipped: Prompts cut so far.
    """

    def __init__(self, workload: ClosedWorkload, seed: int) -> None:
        self.users = workload.users
        self.requests = workload.requests
        self.duration_ns = None if workload.duration_s is None else nanos(workload.duration_s)
        self.deadline_ns = None if workload.deadline_s is None else nanos(workload.deadline_s)
        self.clipped = 0
        self._total_max = workload.max_total_tokens
        prompt = sampler_of(workload.prompt_tokens, is_whole=True)
        output = sampler_of(workload.output_tokens, is_whole=True)
        think = sampler_of(workload.think_s, is_whole=False)
        prompts = stream(seed, Purpose.PROMPT_TOKENS)
        outputs = stream(seed, Purpose.OUTPUT_TOKENS)
        thinks = stream(seed, Purpose.THINK_TIME)
        self._prompts = _endless(lambda count: draw_tokens(prompt, prompts, count))
        self._outputs = _endless(lambda count: draw_tokens(output, outputs, count))
        self._thinks = _endless(lambda count: draw_nanos(think, thinks, count))
        self._cancels = None
        if workload.cancels is not None:
            self._cancels = _endless(_cancel_draws(workload.cancels, seed))

    def next_lengths(self) -> tuple[int, int]:
        """Prompt and output tokens of the next request."""
        prompt, output = next(self._prompts), next(self._outputs)
        if self._total_max is not None and prompt + output > self._total_max:
            self.clipped += 1
            prompt = max(self._total_max - output, 1)
        return prompt, output

    def next_think_ns(self) -> int:
        """How long the next user who got an answer thinks."""
        return next(self._thinks)

    def next_cancel_ns(self) -> int | None:
        """How long after its arrival the next request's client goes away; None: it stays."""
        if self._cancels is None:
            return None
        delay = next(self._cancels)
        return None if delay == NEVER_NS else delay


def _endless(draw: Callable[[int], Ints]) -> Iterator[int]:
    while True:
        yield from draw(DRAWN_AHEAD).tolist()


def _cancel_draws(cancels: Cancels, seed: int) -> Callable[[int], Ints]:
    """Draws delays from arrival to cancel, `NEVER_NS` for clients that stay."""
    chance = stream(seed, Purpose.CANCELS)
    delays = stream(seed, Purpose.CANCEL_DELAYS)
    delay = sampler_of(cancels.after_s, is_whole=False)

    def draw(count: int) -> Ints:
        leaves = chance.random(count) < cancels.share
        return np.where(leaves, draw_nanos(delay, delays, count), NEVER_NS)

    return draw


def build_workload(scenario: Scenario) -> tuple[Requests | ClosedLoop, WorkloadFacts]:
    """The workload that a scenario describes, drawn from its `run.seed`.

    Raises:
        ScenarioError: The trace is missing or wrong, the slice is empty, or there are too many
            requests; names file and line.
    """
    workload = scenario.workload
    if isinstance(workload, ClosedWorkload):
        return ClosedLoop(workload, scenario.run.seed), WorkloadFacts()
    if isinstance(workload, TraceWorkload):
        requests, out_of_order, warnings = _of_trace(scenario, workload)
    else:
        requests, out_of_order, warnings = _drawn(scenario, workload), 0, ()
    arrival = requests.arrival_ns
    ties = int(np.count_nonzero(np.diff(arrival) == 0))
    span_s = (int(arrival[-1]) - int(arrival[0])) / NANOS_PER_SECOND if len(arrival) else None
    failed = requests.output_tokens == 0
    failed_rows = requests.take(np.flatnonzero(failed)) if failed.any() else None
    requests, clipped = _cut(requests.take(np.flatnonzero(~failed)), workload.max_total_tokens)
    return requests, WorkloadFacts(
        trace_span_s=span_s,
        out_of_order=out_of_order,
        ties=ties,
        clipped=clipped,
        failed_rows=failed_rows,
        warnings=warnings,
    )


def _of_trace(scenario: Scenario, workload: TraceWorkload) -> tuple[Requests, int, tuple[str, ...]]:
    """The slice of the trace by arrival, how many rows were out of order, and warnings."""
    trace = _inline(workload) if workload.path is None else _read(scenario, workload)
    offsets, span_s = trace.times.offsets, trace.times.span_s
    rows = np.flatnonzero(trace.times.within(workload.start_s, workload.stop_s))
    if not len(rows):
        raise scenario.error(
            "workload.start_s" if workload.start_s > span_s else "workload.stop_s",
            f"no request arrives in the slice; the trace has {len(trace)} in {span_s:.9g} s",
        )
    order = rows[np.argsort(offsets[rows], kind="stable")][: workload.limit]
    in_file = offsets[np.sort(order)]
    out_of_order = int(np.count_nonzero(in_file < np.maximum.accumulate(in_file)))
    scale = workload.time_scale / workload.rate_scale
    if span_s * scale * NANOS_PER_SECOND > SPAN_NS_MAX:
        key = "workload.rate_scale" if workload.time_scale == 1 else "workload.time_scale"
        most = SPAN_NS_MAX / NANOS_PER_SECOND
        raise scenario.error(key, f"stretches {span_s:.6g} s by {scale:g}; at most {most:.3g} s")
    requests = Requests(
        request_id=order.astype(np.int64),
        arrival_ns=trace.times.arrival_ns(scale, workload.start_s)[order],
        prompt_tokens=trace.prompt_tokens[order],
        output_tokens=trace.output_tokens[order],
        prefix_hashes=None if trace.prefix_hashes is None else trace.prefix_hashes.take(order),
    )
    return _with_leavers(scenario, requests), out_of_order, trace.warnings


def _inline(workload: TraceWorkload) -> Trace:
    """The scenario's own rows; their times count from the run's start, not from the first."""
    assert workload.requests is not None, "the schema has checked that there is a source"
    columns = list(zip(*workload.requests, strict=True))
    return Trace(
        TimeColumn(np.array(columns[0], dtype=np.float64), NANOS_PER_SECOND),
        np.array(columns[1], dtype=np.int64),
        np.array(columns[2], dtype=np.int64),
    )


def _read(scenario: Scenario, workload: TraceWorkload) -> Trace:
    assert workload.path is not None, "the caller has looked"
    assert workload.format is not None, "the schema has checked that a path has a format"
    path = existing_file(scenario, "workload.path", workload.path, obtain=workload.obtain)
    renamed = {} if workload.columns is None else workload.columns.model_dump(exclude_unset=True)
    return read_trace(path, workload.format, time_unit=workload.time_unit, columns=renamed)


def _drawn(
    scenario: Scenario, workload: PoissonWorkload | GammaWorkload | ConstantWorkload
) -> Requests:
    seed = scenario.run.seed
    chance = stream(seed, Purpose.ARRIVALS)
    match workload:
        case PoissonWorkload():
            sums = poisson_sums(chance)
        case GammaWorkload():
            sums = gamma_sums(chance, workload.burstiness)
        case ConstantWorkload():
            sums = constant_sums
        case _:
            assert_never(workload)
    rate = RateCurve(workload.rate_per_s, stream(seed, Purpose.RATE_PHASES), scenario.error)
    arrival_ns = arrivals(sums, rate, workload.requests, workload.duration_s)
    prompt = sampler_of(workload.prompt_tokens, is_whole=True)
    output = sampler_of(workload.output_tokens, is_whole=True)
    count = len(arrival_ns)
    requests = Requests(
        request_id=np.arange(count, dtype=np.int64),
        arrival_ns=arrival_ns,
        prompt_tokens=draw_tokens(prompt, stream(seed, Purpose.PROMPT_TOKENS), count),
        output_tokens=draw_tokens(output, stream(seed, Purpose.OUTPUT_TOKENS), count),
    )
    return _with_leavers(scenario, requests)


def _with_leavers(scenario: Scenario, requests: Requests) -> Requests:
    """The requests with the workload's deadline, and cancels drawn for them."""
    workload = scenario.workload
    cancel_ns = None
    if workload.cancels is not None:
        delays = _cancel_draws(workload.cancels, scenario.run.seed)(len(requests))
        stays = delays == NEVER_NS
        cancel_ns = np.where(stays, NEVER_NS, requests.arrival_ns + np.where(stays, 0, delays))
    deadline_ns = None if workload.deadline_s is None else nanos(workload.deadline_s)
    return replace(requests, cancel_ns=cancel_ns, deadline_ns=deadline_ns)


def _cut(requests: Requests, total_max: int | None) -> tuple[Requests, int]:
    """Prompts cut by what prompt + output exceed the most; one prompt token always stays."""
    if total_max is None:
        return requests, 0
    room = np.maximum(total_max - requests.output_tokens, 1)
    prompts = np.minimum(requests.prompt_tokens, room)
    clipped = int(np.count_nonzero(prompts != requests.prompt_tokens))
    return replace(requests, prompt_tokens=prompts), clipped
