"""Real stage processes in flight: tokens, the three times, credits, cancels, what crosses where."""

import random
import threading

import pytest

from kvasir_core.causes import Cause
from kvasir_core.microbatch import BindingLimit, FinishReason
from kvasir_rt.fixed_stage import fixed_tokens
from kvasir_rt.sampling import SamplingParams
from kvasir_rt.submission import EndEvent, Submission
from kvasir_rt.switchboard import Switchboard
from tests.rt.rings import VOCAB, Clients, engine_of, plan_of, running, until


@pytest.mark.parametrize(
    ("stages", "window", "packer"), [(2, 1, "drained"), (3, 4, "cohort"), (4, 8, "greedy")]
)
def test_any_split_window_and_packer_gives_the_same_tokens(
    stages: int, window: int, packer: str
) -> None:
    engine = engine_of(plan_of(stages, window=window, window_max=window, packer=packer))
    with running(engine):
        clients = Clients(engine)
        chance = random.Random(stages)
        for request in range(20):
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 150))]
            clients.submit(request, prompt, chance.randrange(1, 40))
        clients.wait_all()
        clients.check()
        snapshot = engine.snapshot()
        assert snapshot.tokens == clients.total
        assert snapshot.statistics.finished == 20
        until(lambda: engine.snapshot().statistics.kv_blocks_in_use == 0, "all KV is free")


def test_preempted_requests_are_recomputed_and_keep_their_tokens() -> None:
    engine = engine_of(plan_of(2, kv_tokens=(160, 160)))
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(6, 60, prompt=20)
        clients.wait_all()
        clients.check()
        assert engine.snapshot().statistics.preemptions > 0


def test_busy_blocked_and_starved_sum_to_the_elapsed_time_of_every_stage() -> None:
    engine = engine_of(plan_of(3, window=6, window_max=6), hold_s=(0.002, 0.012, 0.002))
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(48, 8)
        clients.wait(lambda: clients.total > 100, "progress")
        for stage in engine.snapshot().stages:  # Under load, with micro-batches in the ring.
            times = stage.times
            blocked_ns = times.blocked_by_credit_ns + times.blocked_by_experts_ns
            starved_ns = sum(times.starved_by_ns.values())
            assert times.busy_ns + blocked_ns + starved_ns == times.elapsed_ns
        clients.wait_all()
        until(lambda: engine.snapshot().statistics.kv_blocks_in_use == 0, "the ring is empty")
        snapshot = engine.snapshot()
        for stage in snapshot.stages:
            times = stage.times
            blocked_ns = times.blocked_by_credit_ns + times.blocked_by_experts_ns
            starved_ns = sum(times.starved_by_ns.values())
            assert times.elapsed_ns == snapshot.now_ns  # Up to now: nobody holds anything.
            assert times.busy_ns + blocked_ns + starved_ns == snapshot.now_ns
            assert times.micro_batches == snapshot.laps
        first, slow, last = (stage.times for stage in snapshot.stages)
        assert slow.busy_ns >= snapshot.laps * 12_000_000
        assert first.blocked_by_credit_ns > first.busy_ns  # It waits for the slow one's slots.
        assert last.blocked_by_credit_ns < last.busy_ns
        assert last.starved_by_ns[Cause.UPSTREAM] > last.busy_ns


def test_a_ring_fed_one_request_is_starved_by_dependency() -> None:
    engine = engine_of(plan_of(4), hold_s=0.01)
    with running(engine):
        clients = Clients(engine)
        clients.submit(0, [1], 30)
        clients.wait_all()
        stages = [stage.times for stage in engine.snapshot().stages]
        for times in stages:
            assert times.busy_ns < 0.4 * times.elapsed_ns
        head, tail = stages[0], stages[-1]
        assert head.starved_by_ns[Cause.DEPENDENCY] > 2 * head.busy_ns  # Its own token is due.
        assert tail.starved_by_ns[Cause.UPSTREAM] > 2 * tail.busy_ns  # That token is on its way.


def test_three_of_four_stages_hold_different_micro_batches_at_one_moment() -> None:
    """P1 (c): four requests, window four, width one."""
    engine = engine_of(plan_of(4, micro_batch_width=1), hold_s=0.4)
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(4, 3, prompt=1)
        most = 0
        held: set[int] = set()

        def is_overlapped() -> bool:
            nonlocal most, held
            holding = [stage.holding for stage in engine.snapshot().stages]
            distinct = {batch for batch in holding if batch is not None}
            if len(distinct) > most:
                most, held = len(distinct), distinct
            return most >= 3

        until(is_overlapped, "three stages hold different micro-batches", 20.0)
        assert len(held) >= 3
        clients.wait_all()
        clients.check()


def test_no_hidden_state_ever_passes_the_bridge() -> None:
    """Law R16: bytes are counted by kind at every end of every line."""
    engine = engine_of(plan_of(3, hidden=512), hold_s=0.001)
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(8, 30, prompt=100)
        clients.wait_all()
        until(lambda: engine.snapshot().statistics.kv_blocks_in_use == 0, "the ring is empty")
        snapshot = engine.snapshot()
        rows = 8 * (100 + 30 - 1)
        until(  # Each stage reports its counts in its own time.
            lambda: (
                [
                    stage.traffic.get(kind, 0)
                    for kind, stages in (("out_boundary", slice(2)), ("in_boundary", slice(1, 3)))
                    for stage in engine.snapshot().stages[stages]
                ]
                == [rows * 512 * 2] * 4
            ),
            "the stages' counts are here",
        )
        boundary = rows * 512 * 2
        head, middle, tail = (stage.traffic for stage in engine.snapshot().stages)
        assert "in_boundary" not in head
        assert head["out_boundary"] == middle["in_boundary"] == boundary
        assert middle["out_boundary"] == tail["in_boundary"] == boundary
        assert "out_boundary" not in tail
        assert not [kind for kind in snapshot.traffic if "boundary" in kind]
        assert sum(snapshot.traffic.values()) < boundary / 5
        assert snapshot.traffic["in_tokens"] == 8 * 30 * 12


def test_a_cancel_at_any_hop_frees_everything_and_changes_nobody_elses_tokens() -> None:
    """Law R14: cancels at random moments, so that the rows are anywhere in the ring."""
    engine = engine_of(plan_of(3, window=4, window_max=4), hold_s=0.002)
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(16, 120, prompt=80)
        chance = random.Random(3)
        victims = chance.sample(range(16), 8)
        for victim in victims:
            target = clients.total + chance.randrange(1, 60)
            clients.wait(lambda target=target: clients.total >= target, "progress")  # type: ignore[misc]
            engine.cancel(victim)
        clients.wait_all()
        survivors = [request for request in range(16) if request not in victims]
        clients.check(requests=survivors)
        for victim in victims:
            assert clients.ends[victim].reason is FinishReason.CANCELLED
            clients.check_prefix(victim)
        until(lambda: engine.snapshot().statistics.kv_blocks_in_use == 0, "all KV is free")
        clients.submit(100, [3, 1], 5)  # And the ring goes on.
        clients.wait_all()
        clients.check(requests=[100])


def test_a_cancel_of_an_ended_or_unknown_request_does_nothing() -> None:
    engine = engine_of(plan_of(2))
    with running(engine):
        clients = Clients(engine)
        clients.submit(0, [1], 2)
        clients.wait_all()
        engine.cancel(0)
        engine.cancel(12345)
        clients.submit(1, [1], 2)
        clients.wait_all()
        clients.check()


def test_a_stop_token_is_delivered_and_ends_the_request() -> None:
    right = fixed_tokens([5, 6], 20, stages=2, vocab=VOCAB)
    engine = engine_of(plan_of(2))
    with running(engine):
        clients = Clients(engine)
        clients.submit(0, [5, 6], 20, stop_ids=frozenset({right[6]}))
        clients.wait_all()
        assert clients.tokens[0] == right[:7]
        assert clients.ends[0].reason is FinishReason.STOP


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    engine = engine_of(plan_of(2, context=64))
    with running(engine):
        clients = Clients(engine)
        clients.submit(0, [1] * 60, 5)
        clients.wait_all()
        assert clients.ends[0].reason is FinishReason.REFUSED
        assert "65" in clients.ends[0].detail
        assert "64" in clients.ends[0].detail


def test_nonsense_is_refused_before_it_reaches_the_engine() -> None:
    engine = engine_of(plan_of(2))
    ends: list[object] = []

    def submission(prompt: list[int], tokens: int) -> Submission:
        return Submission(
            request_id=0,
            prompt_ids=prompt,
            output_tokens_max=tokens,
            sampling=SamplingParams(),
            stop_ids=frozenset(),
            on_event=ends.append,
        )

    for prompt, tokens in (([], 1), ([1], 0), ([-1], 1), ([1 << 31], 1)):
        with pytest.raises(ValueError, match="token"):
            engine.submit(submission(prompt, tokens))
    engine.close()
    engine.submit(submission([1], 1))  # Too late, but answered.
    assert isinstance(ends[0], EndEvent)
    assert ends[0].reason is FinishReason.FAILED


def test_draining_lets_live_requests_end_and_takes_no_new_ones() -> None:
    engine = engine_of(plan_of(2), hold_s=0.005)
    engine.start()
    clients = Clients(engine)
    clients.submit_many(3, 60)
    clients.wait(lambda: clients.total > 3, "progress")
    closing = threading.Thread(target=engine.close, args=(30.0,))
    closing.start()
    until(lambda: engine._closing_ns is not None, "closing")
    clients.submit(50, [1], 5)
    closing.join()
    clients.wait_all(1.0)
    clients.check(requests=[0, 1, 2])
    assert clients.ends[50].reason is FinishReason.FAILED
    assert "shutting down" in clients.ends[50].detail


def test_ten_rings_start_at_the_same_moment() -> None:
    """O1: nothing is probed before it is bound, so rings cannot steal each other's addresses."""
    engines = [engine_of(plan_of(2)) for _ in range(10)]
    threads = [threading.Thread(target=engine.start) for engine in engines]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, engine in enumerate(engines):
            clients = Clients(engine)
            clients.submit(0, [index], 3)
            clients.wait_all()
            clients.check()
    finally:
        for engine in engines:
            engine.close()


def test_an_automatic_window_follows_the_measured_times() -> None:
    plan = plan_of(4, window=1, window_max=12, window_auto=True)
    engine = engine_of(plan, hold_s=0.004)
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(60, 40)
        until(lambda: engine.snapshot().statistics.window >= 4, "the window opens")
        clients.wait_all()
        clients.check()
        assert engine.snapshot().binding_limits[BindingLimit.NOTHING_WAITING] > 0


def test_a_result_for_what_the_head_never_got_costs_the_tail_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    take = Switchboard.take_submitted

    def forgetful(lines: Switchboard, micro_batch: int) -> int:
        asked.append(micro_batch)
        if len(asked) == 5:  # As if the tail had made the result up.
            take(lines, micro_batch)
        return take(lines, micro_batch)

    monkeypatch.setattr(Switchboard, "take_submitted", forgetful)
    engine = engine_of(plan_of(2))
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(4, 12)
        clients.wait_all()
        clients.check()
        assert engine.snapshot().statistics.epoch == 1
