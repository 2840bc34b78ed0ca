"""What a run leaves behind, written while it goes on; both shells feed the same recorder.

The hot path (`lap`, `sample`) only collects. Every FLUSH_LAPS laps what was collected becomes
columns: stage meters are fed, tokens become latencies, rows go to disk, and collecting starts anew.
So memory does not grow with micro-batches, and one costs a microsecond before its share of a flush.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from kvasir_core.causes import CauseClock
from kvasir_core.meter import StageMeter
from kvasir_core.microbatch import BindingLimit, FinishReason, MicroBatch
from kvasir_core.plan import Plan
from kvasir_core.statistics import RingStatistics
from kvasir_core.units import Nanos, RequestId
from kvasir_scenario import tables
from kvasir_scenario.lap_rows import LIMITS, STAMPS, LapRows, Laps
from kvasir_scenario.ledger import FAILED, NOT_YET, REASON_CODES, RequestLedger
from kvasir_scenario.report import Labels, RunRecord, WorkloadCounts, report_of, request_columns
from kvasir_scenario.report_schema import Report
from kvasir_scenario.tables import Ints, TableWriter

PICTURE_LAPS = 512  # Of a flush, so many laps keep their members, for the picture of the ring.
FLUSH_LAPS = 8192  # The fixed cost of a flush is spread over so many laps,
FLUSH_STAMPS = 1 << 17  # or fewer: of a thousand stages they would be 256 MB.
SAMPLE_INTS = 4  # Time, waiting, running, KV blocks in use.
Interval = tuple[str, int, int, int]  # busy, credit or experts; start, stop, composed.


class RequestColumns(Protocol):
    """An open-loop workload's columns (int64), one entry per request."""

    @property
    def request_id(self) -> Ints: ...
    @property
    def arrival_ns(self) -> Ints: ...
    @property
    def prompt_tokens(self) -> Ints: ...
    @property
    def output_tokens(self) -> Ints:
        """0: the request failed where its trace was taken."""


class Recorder:
    """Collects a run and writes its tables; `close` returns the report."""

    def __init__(
        self,
        out: Path | None,
        plan: Plan,
        causes: CauseClock,
        *,
        warmup_ns: int = 0,
        csv: bool = False,
        is_overlapping: bool = False,
    ) -> None:
        """Open the tables.

        Args:
            out: A prepared run directory (`prepare_run_dir`); None writes no tables.
            plan: The ring's plan.
            causes: The ring's cause clock (`ring.causes`); the recorder drains it.
            warmup_ns: Throughput and latency are measured after it.
            csv: Whether to write each table as CSV too.
            is_overlapping: Stages hold several micro-batches at once: their time is what they say
                with `spent`, and stamps are for the tables only.
        """
        self._is_overlapping = is_overlapping
        self._spent: list[list[Interval]] = [[] for _ in range(plan.stages)]
        self._plan = plan
        self._causes = causes
        self._warmup_ns = warmup_ns
        self._ledger = RequestLedger(warmup_ns)
        self._meters = [StageMeter() for _ in range(plan.stages)]
        self._binding: Counter[BindingLimit] = Counter()
        self._spans = 0
        self._rows = 0
        self._trace_failed_at: list[Ints] = []
        self._has_cut = False
        laps_max = min(FLUSH_LAPS, FLUSH_STAMPS // plan.stages // STAMPS)
        self._laps = LapRows(plan.stages, laps_max)
        self._pictured_max = (laps_max + PICTURE_LAPS) // 2  # To the middle of a flush.
        self._laps.kept_max = self._pictured_max if out is not None else 0
        self._samples: list[int] = []
        self._offers: list[int] = []
        self._ends: list[int] = []
        self._preempted: list[int] = []
        self._flushes = 0
        self._writers: dict[str, TableWriter] = {}
        if out is not None:
            self._writers = {
                "micro_batches": TableWriter(out / "micro_batches", tables.MICRO_BATCHES, csv=csv),
                "spans": TableWriter(out / "spans", tables.SPANS, csv=csv),
                "stages": TableWriter(out / "stages", tables.STAGES, csv=csv),
                "samples": TableWriter(out / "samples", tables.SAMPLES, csv=csv),
                "requests": TableWriter(out / "requests", tables.REQUESTS, csv=csv),
            }

    # ------------------------------------------------------------------ what happened

    def offered(self, request: RequestId, arrival_ns: int, prompt_tokens: int) -> None:
        """A request arrived."""
        self._offers += (request, arrival_ns, prompt_tokens)

    def offered_many(self, requests: RequestColumns) -> None:
        """All requests of an open-loop workload, ahead of time; those after the end do not count.

        A request without output failed where its trace was taken: it ends here, and must not enter
        the ring.
        """
        ids, arrivals = requests.request_id, requests.arrival_ns
        self._ledger.offer(ids, arrivals, requests.prompt_tokens)
        failed = np.flatnonzero(requests.output_tokens == 0)
        self._trace_failed_at.append(arrivals[failed])
        codes = np.full(failed.size, FAILED, np.int8)
        self._ledger.end(ids[failed], arrivals[failed], codes)

    def withdraw(self, after_ns: int) -> None:
        """Requests that were offered ahead of time for later than this will not come."""
        self._ledger.censor(after_ns)

    def lap(
        self,
        micro_batch: MicroBatch,
        composed_ns: int,
        returned_ns: int,
        delivered: tuple[RequestId, ...],
        stamps: list[int],
    ) -> None:
        """A micro-batch came back.

        Args:
            micro_batch: As composed.
            composed_ns: When.
            returned_ns: When its lap ended.
            delivered: Requests that got a token (the `Deliver` order's).
            stamps: Per stage in order: received, start, end, sent (ns).
        """
        if self._laps.add(micro_batch, composed_ns, returned_ns, delivered, stamps):
            self._flush()

    def lost(
        self, micro_batch: MicroBatch, composed_ns: int, cut_ns: int, stamps: Sequence[int]
    ) -> None:
        """A micro-batch will not come back: its epoch ended, or the run ended with it in the ring.

        Report those of one moment in the head's order, and after them only later ones. `stamps` may
        end early or name times after `cut_ns`: what had not happened by then is left out.
        """
        absent = -1 - cut_ns  # Negative: not by then; and remembers when.
        known = [stamp if stamp <= cut_ns else absent for stamp in stamps]
        self._has_cut = True
        known += [absent] * (STAMPS * self._plan.stages - len(known))
        if self._laps.add(micro_batch, composed_ns, NOT_YET, (), known):
            self._flush()

    def spent(self, stage: int, state: str, start_ns: int, stop_ns: int, composed_ns: int) -> None:
        """An overlapping stage spent this time; see `StageMeter.spend`. In order of time."""
        self._spent[stage].append((state, start_ns, stop_ns, composed_ns))

    def finished(self, request: RequestId, at_ns: int, reason: FinishReason) -> None:
        """A request ended, with all its tokens or without."""
        self._ends += (request, at_ns, REASON_CODES[reason])

    def refused(self, request: RequestId, at_ns: int) -> None:
        """A request was refused at its arrival."""
        self._ends += (request, at_ns, REASON_CODES[FinishReason.REFUSED])

    def preempted(self, request: RequestId) -> None:
        """A request lost its KV and will be recomputed."""
        self._preempted.append(request)

    def sample(self, at_ns: int, waiting: int, running: int, kv_blocks_in_use: int) -> None:
        """The head's state, for the plot of queue and KV."""
        self._samples += (at_ns, waiting, running, kv_blocks_in_use)
        if len(self._samples) >= SAMPLE_INTS * FLUSH_LAPS:
            self._flush_samples()

    # ------------------------------------------------------------------ flushing

    def _flush(self) -> None:
        self._flush_requests_offered()
        if len(self._laps):
            self._flush_laps(self._laps.take())
        self._flush_requests_ended()

    def _flush_requests_offered(self) -> None:
        if self._offers:
            columns = np.array(self._offers, np.int64).reshape(-1, 3)
            self._offers.clear()
            self._ledger.offer(columns[:, 0], columns[:, 1], columns[:, 2])

    def _flush_requests_ended(self) -> None:
        if self._ends:
            columns = np.array(self._ends, np.int64).reshape(-1, 3)
            self._ends.clear()
            self._ledger.end(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.int8))
        if self._preempted:
            self._ledger.preempt(self._preempted)
            self._preempted.clear()

    def _flush_samples(self) -> None:
        columns = np.array(self._samples, np.int64).reshape(-1, SAMPLE_INTS)
        self._samples.clear()
        if "samples" in self._writers:
            counts = [column.astype(np.int32) for column in columns[:, 1:].T]
            self._writers["samples"].write([tables.seconds(columns[:, 0]), *counts])

    def _flush_laps(self, laps: Laps) -> None:
        self._feed_meters(laps)
        self._ledger.deliver(laps.tokens, np.repeat(laps.returned, laps.token_counts))
        if laps.prompts.size:
            times = np.repeat(laps.composed, laps.spans - laps.decodes)
            self._ledger.compose(laps.prompts, times)
        limits = [LIMITS[code] for code in laps.limits.tolist()]
        self._binding.update(limits)
        self._spans += int(laps.spans.sum())
        self._rows += int(laps.rows.sum())
        if self._writers:
            counts = (laps.rows, laps.rows - laps.decodes, laps.decodes, laps.spans)
            self._writers["micro_batches"].write([
                laps.ids,
                tables.seconds(laps.composed),
                tables.seconds(laps.returned),
                *(column.astype(np.int32) for column in counts),
                tables.texts(limits),
            ])  # fmt: skip
            self._write_stages(laps)
            if laps.batches:
                self._write_spans(laps)
            self._flushes += 1
            is_pictured = not self._flushes & (self._flushes - 1)  # Flush 0, 1, 2, 4, 8, and so on.
            self._laps.kept_max = self._pictured_max if is_pictured else 0
        self._has_cut = False

    def _feed_meters(self, laps: Laps) -> None:
        for stage, meter in enumerate(self._meters):
            started, ended, sent = np.ascontiguousarray(laps.stamps[:, stage, 1:].T)
            is_reached = started >= 0
            meter.micro_batches += int(is_reached.sum())
            meter.rows += int(laps.rows[is_reached].sum())
            if self._is_overlapping:
                self._spend(stage, meter)
                continue
            if self._has_cut:
                # What a stage never got is nothing done at the cut: until then it was on its way.
                started, ended, sent = (
                    np.where(times >= 0, times, -1 - times) for times in (started, ended, sent)
                )
            free = np.append(meter.accounted_until, sent[:-1])
            known = np.minimum(np.maximum(laps.composed, free), started)
            waited = known > free
            meter.add_summed(
                busy_ns=int((ended - started).sum()),
                blocked_ns=int((sent - ended).sum()),
                upstream_ns=int((started - known).sum()),
                waits=list(zip(free[waited].tolist(), known[waited].tolist(), strict=True)),
                until=Nanos(int(sent[-1])),
                clock=self._causes,
            )
        self._causes.drain_before(min(meter.accounted_until for meter in self._meters))

    def _spend(self, stage: int, meter: StageMeter) -> None:
        for state, start, stop, composed in self._spent[stage]:
            meter.spend(state, Nanos(start), Nanos(stop), Nanos(composed), self._causes)
        self._spent[stage].clear()

    def _write_spans(self, laps: Laps) -> None:
        """Members of the laps in the middle of this flush: enough for a picture, never all."""
        first = max(0, (laps.ids.size - PICTURE_LAPS) // 2)
        batches = laps.batches[first : first + PICTURE_LAPS]
        counts = [len(batch.requests) for batch in batches]
        ids, decodes = (
            np.repeat(np.array(column, np.int64), counts)
            for column in ([batch.id for batch in batches], [batch.decodes for batch in batches])
        )
        requests, starts, rows = (
            np.fromiter(chain.from_iterable(column), np.int64, ids.size)
            for column in (
                [batch.requests for batch in batches],
                [batch.starts for batch in batches],
                [batch.rows for batch in batches],
            )
        )
        place = np.arange(ids.size) - np.repeat(np.cumsum(counts) - counts, counts)
        self._writers["spans"].write([
            ids, requests, starts.astype(np.int32), rows.astype(np.int32), place < decodes,
        ])  # fmt: skip

    def _write_stages(self, laps: Laps) -> None:
        stages = self._plan.stages
        stamps = laps.stamps.reshape(-1, STAMPS)
        stage_column = np.tile(np.arange(stages, dtype=np.int32), laps.ids.size)
        batch_column = np.repeat(laps.ids, stages)
        if self._has_cut:  # A stage that a lost micro-batch never reached has no row.
            reached = stamps[:, 0] >= 0
            stamps, stage_column, batch_column = (
                stamps[reached], stage_column[reached], batch_column[reached],
            )  # fmt: skip
        times = [tables.seconds(column) for column in np.ascontiguousarray(stamps.T)]
        self._writers["stages"].write([stage_column, batch_column, *times])

    # ------------------------------------------------------------------ the end

    def close(
        self,
        end_ns: int,
        statistics: RingStatistics,
        workload: WorkloadCounts,
        labels: Labels,
        *,
        link_busy_ns: Sequence[int] = (),
    ) -> Report:
        """Write what is left, give the tables their names, and judge the run.

        Args:
            end_ns: The end of the run; the ring must have been told of it (its `in_system_ns`).
            statistics: The ring's, at the end.
            workload: What the input was like.
            labels: Names, limits and provenance that the report repeats.
            link_busy_ns: Per hop, how long bytes were on it.

        Returns:
            The report, without variants; writing `report.json` is up to the caller.
        """
        self._flush()
        if self._samples:
            self._flush_samples()
        for stage, meter in enumerate(self._meters):
            self._spend(stage, meter)  # What was spent after the last lap.
            meter.close(Nanos(end_ns), self._causes)
        self._ledger.censor(end_ns)
        record = RunRecord(
            plan=self._plan,
            end_ns=end_ns,
            warmup_ns=self._warmup_ns,
            statistics=statistics,
            ledger=self._ledger,
            meters=tuple(self._meters),
            binding=self._binding,
            spans=self._spans,
            rows=self._rows,
            trace_failed=sum(int((at <= end_ns).sum()) for at in self._trace_failed_at),
            workload=workload,
            labels=labels,
            link_busy_ns=tuple(link_busy_ns),
        )
        report = report_of(record)
        if self._writers:
            for columns in request_columns(self._ledger):
                self._writers["requests"].write(columns)
        for writer in self._writers.values():
            writer.close()
        return report
