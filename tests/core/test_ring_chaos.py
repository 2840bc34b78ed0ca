"""The ring under chaos: an honest shell, any order of legal events, the laws after each.

Laws R2, R3, R5-R8, R12 and R14 are judged by `naive_ring.py` after every event; R9 by the rule
that tries illegal events; R13 and R15 by draining the ring at the end of every run.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvasir_core import (
    Epoch,
    FinishReason,
    IllegalEvent,
    LapEnded,
    MicroBatchId,
    Nanos,
    Plan,
    ReleaseEnded,
    RequestId,
)
from tests.core.honest_shell import REASONS, HonestShell, LinearCost
from tests.core.illegal import illegal_events, state_of
from tests.core.stories import plan_of

any_ = st.integers(0, 999)
dts = st.integers(0, 6)
costs = st.one_of(
    st.none(), st.builds(LinearCost, st.integers(0, 50), st.integers(0, 5), st.integers(0, 3))
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Small plans, so that limits bind; each now and then so wide that others can."""
    context = draw(st.sampled_from([6, 16, 40]))
    is_chunked = draw(st.integers(0, 3)) > 0
    window = draw(st.integers(1, 4))
    block = draw(st.sampled_from([1, 2, 5]))
    fit = context // block
    blocks = st.integers(max(1, fit // 2), 1 + 2 * fit) | st.just(99 * fit)
    scarcest = block * draw(blocks)
    stages = draw(st.integers(2, 4))
    return plan_of(
        draw(st.sampled_from(["cohort", "sarathi", "greedy", "drained", "cohort"])),
        stages=stages,
        row_width=draw(st.integers(1, 10) | st.just(64)) if is_chunked else context,
        micro_batch_width=draw(st.integers(1, 6) | st.just(64)),
        window=window,
        window_max=window + draw(st.integers(0, 3)),
        window_auto=draw(st.booleans()),
        running_max=draw(st.integers(1, 7) | st.just(64)),
        context=context,
        kv_tokens=[scarcest + draw(st.integers(0, 2 * block))] * (stages - 1) + [scarcest],
        kv_block=block,
        chunked_prefill=is_chunked,
        prefill_rows_max=draw(st.sampled_from([None, 1, 3])),
        cohort_wait_ns=draw(st.sampled_from([0, 4, 20])),
    )


class ChaoticShell(RuleBasedStateMachine):
    """Rules are what may happen; every one is legal but `the_impossible_is_reported`."""

    @initialize(plan=plans(), predict=costs, overlaps=st.booleans())
    def build(self, plan: Plan, predict: LinearCost | None, overlaps: bool) -> None:
        self.ring_shell = HonestShell(plan, predict=predict, overlaps=overlaps)

    @rule(prompt=st.integers(1, 26), output=st.integers(1, 16), cached=st.integers(0, 3), dt=dts)
    def a_request_arrives(self, prompt: int, output: int, cached: int, dt: int) -> None:
        """Whatever its size: some can never fit."""
        self.ring_shell.arrive(prompt, output, cached, dt)

    @rule(prompt=any_, output=any_, count=st.integers(1, 6))
    def some_that_fit_the_context_arrive(self, prompt: int, output: int, count: int) -> None:
        half = self.ring_shell.plan.context // 2
        for step in range(count):
            self.ring_shell.arrive(1 + (prompt + step) % half, 1 + (output - step) % half)

    @rule(count=st.integers(3, 9), output=any_)
    def a_crowd_comes_to_decode(self, count: int, output: int) -> None:
        """Short prompts, long outputs, and laps until most of them decode."""
        shell = self.ring_shell
        half = shell.plan.context // 2
        for step in range(count):
            shell.arrive(1, half - (output + step) % half % 3)
        for step in range(count + 2):
            if shell.laps():
                shell.lap(step)

    @precondition(lambda self: self.ring_shell.laps())
    @rule(dt=dts)
    def all_but_one_of_a_cohort_stop(self, dt: int) -> None:
        """What is left of it is ready alone, while the others fly in larger ones."""
        laps = self.ring_shell.laps()
        largest = max(range(len(laps)), key=lambda k: len(laps[k].outputs))
        self.ring_shell.lap(largest, ~1, dt)

    @precondition(lambda self: self.ring_shell.laps())
    @rule(choice=any_, count=st.integers(1, 9), dt=dts)
    def laps_end(self, choice: int, count: int, dt: int) -> None:
        for step in range(count):
            if self.ring_shell.laps():
                self.ring_shell.lap(choice * (step + 1), 0, dt)

    @precondition(lambda self: self.ring_shell.laps())
    @rule(choice=any_, stop=any_, dt=dts)
    def tokens_stop_their_requests(self, choice: int, stop: int, dt: int) -> None:
        self.ring_shell.lap(choice, stop, dt)

    @precondition(lambda self: self.ring_shell.releases())
    @rule(choice=any_, dt=dts)
    def a_release_is_back(self, choice: int, dt: int) -> None:
        self.ring_shell.release(choice, dt)

    @precondition(lambda self: self.ring_shell.releases())
    @rule()
    def all_releases_are_back(self) -> None:
        while self.ring_shell.releases():
            self.ring_shell.release(0)

    @precondition(lambda self: self.ring_shell.model.live)
    @rule(choice=any_, reason=st.sampled_from(REASONS), dt=dts)
    def a_client_goes(self, choice: int, reason: FinishReason, dt: int) -> None:
        live = self.ring_shell.model.live
        self.ring_shell.cancel(live[choice % len(live)].id, reason, dt)

    @precondition(lambda self: self.ring_shell.model.open or self.ring_shell.model.lost)
    @rule(stage=any_, dt=dts)
    def a_stage_dies(self, stage: int, dt: int) -> None:
        self.ring_shell.lose(stage, dt)

    @precondition(lambda self: self.ring_shell.model.decodes)
    @rule(stage=any_, dt=dts)
    def a_stage_dies_while_decodes_are_ready(self, stage: int, dt: int) -> None:
        self.ring_shell.lose(stage, dt)

    @precondition(lambda self: self.ring_shell.model.decodes)
    @rule(choice=any_, dt=dts)
    def the_client_of_a_ready_decode_goes(self, choice: int, dt: int) -> None:
        ready = self.ring_shell.model.decodes
        self.ring_shell.cancel(ready[choice % len(ready)].id, FinishReason.CANCELLED, dt)

    @precondition(lambda self: self.ring_shell.model.lost)
    @rule(choice=any_, dt=dts)
    def a_stage_is_ready(self, choice: int, dt: int) -> None:
        self.ring_shell.recover(choice, dt)

    @precondition(lambda self: self.ring_shell.model.epoch)
    @rule(choice=any_, dt=dts)
    def a_late_frame_of_an_older_epoch_comes(self, choice: int, dt: int) -> None:
        shell = self.ring_shell
        old = Epoch(choice % shell.model.epoch)
        shell.tell(LapEnded(MicroBatchId(choice), old, (RequestId(choice),)), dt)
        shell.tell(ReleaseEnded((RequestId(choice),), old))

    @rule(longest=st.integers(0, 9) | st.just(60), rest=st.integers(0, 9), link=st.integers(0, 9))
    def stages_are_measured(self, longest: int, rest: int, link: int) -> None:
        self.ring_shell.measure(longest, rest, link)

    @rule(dt=dts)
    def time_passes(self, dt: int) -> None:
        self.ring_shell.wait(dt)

    @precondition(lambda self: self.ring_shell.ring.next_wakeup() is not None)
    @rule()
    def the_ring_is_woken(self) -> None:
        self.ring_shell.wake()

    @rule(choice=any_)
    def the_impossible_is_reported(self, choice: int) -> None:
        """R9: it raises and changes nothing."""
        ring = self.ring_shell.ring
        found = illegal_events(self.ring_shell)
        before = state_of(ring)
        for why, event, after_ns in (found[choice % len(found)], found[choice * 7 % len(found)]):
            with pytest.raises(IllegalEvent):
                ring.handle(event, Nanos(ring.now + after_ns))
            assert state_of(ring) == before, why

    def teardown(self) -> None:
        if hasattr(self, "ring_shell") and self.ring_shell.is_sound:  # A failure is told once.
            self.ring_shell.drain()


TestRingUnderChaos = ChaoticShell.TestCase
TestRingUnderChaos.settings = settings(stateful_step_count=30)
