"""The laws of DESIGN.md over a ring's free choices: launches, preemptions, and what it counts.

`NaiveRing` judges each order that the core chose in the state that its earlier orders left, and
compares the core's statistics with what can be counted from outside.
"""

from dataclasses import dataclass, field

from kvasir_core import (
    BindingLimit,
    Cause,
    Launch,
    MicroBatch,
    Preempt,
    Ring,
    RingDecision,
)
from kvasir_core.plan import RESULT_ROW_BYTES
from tests.core.naive_state import NaiveRequest, NaiveState


@dataclass(eq=False)
class NaiveRing(NaiveState):
    decode_passed: int = 0  # Launches in a row that left every ready decode behind,
    prompt_passed: int = 0  # or every prompt that could have come along.
    wakeup: int | None = None
    stalls: dict[BindingLimit, int] = field(
        default_factory=lambda: {BindingLimit.WINDOW: 0, BindingLimit.DEPENDENCY: 0}
    )

    def judge(self, orders: list[RingDecision]) -> None:
        """Follow orders that the core chose, each legal in its turn."""
        while orders:
            match orders.pop(0):
                case Launch(batch):
                    self._launch(batch)
                case Preempt() as order:
                    victim = self.requests[order.request]
                    assert self.is_short(), "preempted without need"
                    assert not self.releasing, "preempted although blocks are on their way"
                    assert victim is max(self.running, key=lambda request: request.order)
                    assert victim is not min(self.running, key=lambda request: request.order)
                    assert not self.is_in_flight(victim.id)
                    for place in (self.prompts, self.decodes):
                        if victim in place:
                            place.remove(victim)
                    assert orders.pop(0) == self._release([victim])[0]
                    assert order == self._back_to_waiting(victim)
                    self.waiting.insert(0, victim)
                case order:
                    raise AssertionError(f"{order} was not due")

    def _launch(self, batch: MicroBatch) -> None:
        assert not self.lost
        assert batch.id == self.micro_batches
        assert batch.epoch == self.epoch
        assert len(self.open) < self.window <= self.plan.window_max
        self._check_policy(batch)
        self._check_shape(batch)
        queue = self.prompts + self.waiting
        for span in batch.spans:
            request = self.requests[span.request]
            assert request.ended_ns is None
            if span.is_decode:
                assert request is self.decodes.pop(0), "decodes go longest-ready first"
                assert span.rows == 1
                assert not self.is_in_flight(request.id), "R7: one decode at a time"
            else:
                assert request is queue.pop(0), "prompts go in order, then those who wait"
                self._chunk(request, span.rows, ends=span.has_output)
            # R3, in the ring's eyes and in a stage's.
            assert span.start == request.composed == self.stage_rows[request.id]
            request.composed += span.rows
            request.blocks = max(request.blocks, self.blocks_for(request.composed))
            self.stage_rows[request.id] += span.rows
        if self.plan.packer == "sarathi":
            self.prompts.sort(key=lambda request: request.order)
            self.decodes.sort(key=lambda request: request.order)
        self.prompts = [r for r in self.prompts if r.composed < r.target]
        self.micro_batches += 1
        self.open[batch.id] = batch
        held = sum(self.blocks_for(rows) for rows in self.stage_rows.values())
        assert held <= self.blocks_in_use <= self.plan.kv_blocks
        self.blocks_peak = max(self.blocks_peak, self.blocks_in_use)
        assert len(self.running) <= self.plan.running_max
        self._check_binding(batch)

    def _chunk(self, request: NaiveRequest, rows: int, *, ends: bool) -> None:
        if not request.is_running:
            assert request.id not in self.releasing, "its old KV may still be in a stage"
            self.waiting.remove(request)
            request.is_running = True
            request.target = request.prompt + request.given
            request.composed = request.back = request.cached
            request.blocks = self.blocks_for(request.target)
            self.stage_rows[request.id] = request.cached
            self.prompts.append(request)
        if self.plan.packer == "sarathi":
            self.prompts.remove(request)
            assert not self.is_in_flight(request.id), "sarathi flies one chunk at a time"
        assert ends == (request.composed + rows == request.target)
        assert request.composed + rows <= request.target
        assert self.plan.chunked_prefill or ends

    def _check_shape(self, batch: MicroBatch) -> None:
        """R2 and R5: the columns agree with each other and keep to the plan."""
        assert 1 <= batch.row_count <= self.plan.row_width
        assert 1 <= len(batch.requests) <= self.plan.micro_batch_width
        assert len(set(batch.requests)) == len(batch.requests) == len(batch.rows)
        assert min(batch.rows) >= 1
        assert sum(batch.rows) == batch.row_count == batch.prefill_rows + batch.decodes
        outputs = tuple(span.request for span in batch.spans if span.has_output)
        assert outputs == batch.outputs
        assert len(outputs) * RESULT_ROW_BYTES <= self.plan.result_bytes_max
        decodes = [span for span in batch.spans if span.is_decode]
        assert len(decodes) == batch.decodes
        assert batch.decode_context == sum(span.start + 1 for span in decodes)

    def _check_policy(self, batch: MicroBatch) -> None:
        """R8 and R10, which cohort alone promises."""
        if self.plan.packer != "cohort":
            return
        places = self.window - len(self.open)
        assert batch.decodes <= -(-self.live_decodes // self.window)
        assert batch.decodes <= -(-len(self.decodes) // places)
        if self.live_decodes and self.plan.chunked_prefill:
            cap = self.plan.prefill_rows_max or (self.plan.row_width + 1) // 2
            assert batch.prefill_rows <= cap
        has_prompt = bool(self.prompts) or self.could_be_admitted()
        passes_prompt = has_prompt and not batch.prefill_rows
        passes_prompt &= batch.binding is not BindingLimit.KV
        passes_prompt &= self.plan.chunked_prefill
        self.prompt_passed = self.prompt_passed + 1 if passes_prompt else 0
        self.decode_passed = self.decode_passed + 1 if self.decodes and not batch.decodes else 0
        assert self.prompt_passed <= 1, "a prompt that could join was passed over twice"
        assert self.decode_passed <= 1, "every ready decode was passed over twice"

    def _check_binding(self, batch: MicroBatch) -> None:
        """The limit that a micro-batch names did bind."""
        match batch.binding:
            case BindingLimit.NOTHING_WAITING:
                assert not self.has_ready
            case BindingLimit.ROW_WIDTH:
                is_full = batch.row_count == self.plan.row_width
                assert is_full or not self.plan.chunked_prefill
            case BindingLimit.MICRO_BATCH_WIDTH:
                assert len(batch.requests) == self.plan.micro_batch_width
            case BindingLimit.RUNNING_CAP:
                assert len(self.running) == self.plan.running_max
            case BindingLimit.COHORT:
                assert self.plan.packer == "cohort"
                assert self.has_ready
            case BindingLimit.KV:
                assert self.decodes or self.waiting
            case other:
                raise AssertionError(f"{other} is no limit of a micro-batch")

    # ------------------------------------------------------------------ after every event

    def settle(self, ring: Ring) -> None:
        """The core's figures are those counted here, and it left nothing undone."""
        self._check_statistics(ring)
        wakeup = ring.next_wakeup()
        has_ready = self.has_ready
        if wakeup is not None:
            assert self.plan.packer == "cohort"
            assert self.now < wakeup
            if wakeup != self.wakeup:
                assert wakeup <= self.now + self.wait_ns
            assert self.decodes
            assert self.open
            assert len(self.open) < self.window
        self.wakeup = wakeup
        if wakeup is None and len(self.open) < self.window and not self.lost:
            is_short = self.is_short()
            assert not self.decodes or is_short, "a ready decode was left behind"
            assert not self.prompts or is_short, "a prompt was left behind"
            assert not self.could_be_admitted() or is_short, "a request was not admitted"
            assert not is_short or self.open or self.releasing, "short for ever"
        if not has_ready:
            cause = Cause.DEPENDENCY if self.live else Cause.NO_DEMAND
        else:
            cause = Cause.CAPACITY if wakeup is None else Cause.DEPENDENCY
        assert ring.causes.cause is cause
        if not has_ready:
            self.stalls[BindingLimit.DEPENDENCY] += bool(self.live)
        elif wakeup is None:
            self.stalls[BindingLimit.WINDOW] += len(self.open) >= self.window
        assert ring.statistics().stalls == self.stalls

    def _check_statistics(self, ring: Ring) -> None:
        now = ring.statistics()
        running, waiting = len(self.running), len(self.waiting)
        assert (now.now, now.epoch, now.lost) == (self.now, self.epoch, tuple(sorted(self.lost)))
        assert (now.offered, now.running, now.waiting) == (self.offered, running, waiting)
        assert now.ended == self.ended
        ended = now.finished + now.refused + now.cancelled + now.failed
        assert now.offered == running + waiting + ended  # R12
        assert now.in_system_ns == sum(  # Little's law, the unfinished censored now.
            (self.now if r.ended_ns is None else r.ended_ns) - r.arrived_ns for r in self.past
        )
        assert (now.live_decodes, now.open) == (self.live_decodes, len(self.open))
        assert (now.window, now.micro_batches) == (self.window, self.micro_batches)
        assert now.kv_blocks_in_use == self.blocks_in_use <= now.kv_blocks_total
        assert now.kv_blocks_peak == self.blocks_peak
        assert (now.preemptions, now.rows_recomputed) == (self.preemptions, self.rows_lost)
        assert ring.open == list(self.open.values())
        assert ring.load == (waiting, running, self.blocks_in_use)
        assert ring.is_idle == (not self.live and not self.blocks_in_use)
