"""Who is lost and when, on a clock of the test's own: no process, no socket."""

from collections import deque

import pytest

from kvasir_core.units import Epoch
from kvasir_rt import wire
from kvasir_rt.crew import Crew
from kvasir_rt.link import Received, Traffic
from kvasir_rt.member import CrewOptions, Loss, Step
from kvasir_rt.ring_errors import RingDown
from tests.rt.rings import plan_of

SECOND = 1_000_000_000
SPEC = wire.FixedSpec((1, 1, 1), 10)


class FakeControl:
    """A control inbox whose peers are the test."""

    def __init__(self) -> None:
        self.arrived: deque[Received] = deque()
        self.sent: list[tuple[bytes, wire.ToStage]] = []

    def receive(self) -> Received | None:
        return self.arrived.popleft() if self.arrived else None

    def send(self, peer: bytes, message: wire.ToStage) -> int:
        self.sent.append((peer, message))
        return len(wire.encode(message))


class FakeChild:
    pid = 4711


class FakeSupervisor:
    """Processes that live until the test says otherwise."""

    def __init__(self) -> None:
        self.children: dict[int, FakeChild] = {}
        self.dead: list[int] = []
        self.slow: set[int] = set()

    def spawn(self, stage: int) -> FakeChild:
        self.children[stage] = FakeChild()
        return self.children[stage]

    def ended(self) -> list[int]:
        return [stage for stage in self.dead if stage in self.children]

    def may_be_slow(self, stage: int) -> bool:
        return stage in self.slow

    def end(self, stage: int) -> str:
        del self.children[stage]
        return "killed by signal 9 (SIGKILL)"


class Story:
    """A crew of three stages with everything around it faked."""

    def __init__(self, *, remote: frozenset[int] = frozenset(), restarts_max: int = 10) -> None:
        self.now = 1000 * SECOND
        self.control = FakeControl()
        self.supervisor = FakeSupervisor()
        options = CrewOptions(
            plan=plan_of(3),
            dtype="float16",
            compute=SPEC,
            remote=remote,
            secret="s",
            restarts_max=restarts_max,
        )
        self.crew = Crew(
            options,
            self.control,  # type: ignore[arg-type]
            self.supervisor,  # type: ignore[arg-type]
            Traffic(),
            wiring_of=lambda stage: wire.Wiring(self.crew.epoch, b"", f"to {stage + 1}", b""),
            clock=lambda: self.now,
        )
        self.crew.begin_epoch(Epoch(0))
        self.crew.spawn_absent()

    def say(self, peer: str, *messages: wire.ToBridge) -> None:
        for message in messages:
            self.control.arrived.append(Received(peer.encode(), wire.encode(message), None))
        self.crew.hear()

    def join(self, peer: str, stage: int | None, *, boot: str = "here") -> None:
        self.say(
            peer,
            wire.Join(wire.PROTOCOL, "s", stage, f"host of {peer}", 1, boot, b"", b"", ""),
        )

    def load(self, peer: str) -> None:
        self.say(peer, wire.Loaded(self.crew.options.plan.digest, f"at {peer}", 0))

    def bring_up(self) -> None:
        for stage in range(3):
            self.join(f"s{stage}", stage if stage not in self.crew.options.remote else None)
            self.load(f"s{stage}")
        self.pass_barrier()

    def pass_barrier(self) -> None:
        epoch = self.crew.epoch
        for step in (wire.Idle(epoch), wire.Listening(epoch), wire.Wired(epoch)):
            for stage in range(3):
                self.say(f"s{stage}", step)
        assert self.crew.is_wired

    def beat(self, stage: int, *, held_s: float = 0.0, rows: int = 1) -> None:
        beat = wire.Beat(self.crew.epoch, 5, round(held_s * SECOND), rows, {})
        self.say(f"s{stage}", beat)

    def run(self, seconds: float, *, beating: tuple[int, ...] = (0, 1, 2)) -> list[Loss]:
        """Time passes in steps of 100 ms; these stages beat."""
        losses: list[Loss] = []
        for _ in range(round(seconds * 10)):
            self.now += SECOND // 10
            for stage in beating:
                self.beat(stage)
            losses += self.crew.check()
        return losses

    def sent_to(self, peer: str) -> list[wire.ToStage]:
        return [message for to, message in self.control.sent if to == peer.encode()]


def test_the_barrier_takes_every_step_only_when_all_have_taken_the_one_before() -> None:
    story = Story()
    for stage in range(3):
        story.join(f"s{stage}", stage)
        story.load(f"s{stage}")
    assert isinstance(story.sent_to("s0")[-1], wire.NewEpoch)
    epoch = Epoch(0)
    for step, answer in ((wire.Idle(epoch), wire.Wiring), (wire.Listening(epoch), wire.Connect)):
        for stage in range(3):
            assert not isinstance(story.sent_to("s0")[-1], answer)
            story.say(f"s{stage}", step)
        assert all(isinstance(story.sent_to(f"s{stage}")[-1], answer) for stage in range(3))
    assert not story.crew.is_wired
    for stage in range(3):
        story.say(f"s{stage}", wire.Wired(epoch))
    assert story.crew.is_wired


def test_what_a_stage_says_of_an_older_epoch_moves_nothing() -> None:
    story = Story()
    story.bring_up()
    story.crew.begin_epoch(Epoch(1))
    for stage in range(3):
        story.say(f"s{stage}", wire.Idle(Epoch(0)), wire.Wired(Epoch(0)))
    assert [member.step for member in story.crew.members] == [Step.LOADED] * 3
    story.pass_barrier()


def test_a_silent_stage_is_lost_in_under_two_seconds_and_the_others_are_not() -> None:
    story = Story()
    story.bring_up()
    assert story.run(1.3, beating=(0, 2)) == []
    (loss,) = story.run(0.6, beating=(0, 2))[:1]
    assert loss.stage == 1
    assert loss.is_dead
    assert "silent for 1.5 s" in loss.why


def test_a_stage_that_others_keep_from_its_core_gets_ten_seconds() -> None:
    story = Story()
    story.bring_up()
    story.supervisor.slow.add(1)
    assert story.run(9.5, beating=(0, 2)) == []
    (loss,) = story.run(1.0, beating=(0, 2))[:1]
    assert loss.stage == 1
    assert "silent for 10.1 s" in loss.why


def test_a_bridge_that_stood_still_itself_blames_nobody() -> None:
    story = Story()
    story.bring_up()
    story.run(1)
    story.now += 40 * SECOND  # Stopped and continued.
    assert story.crew.check() == []
    assert story.run(1.0, beating=()) == []
    assert {loss.stage for loss in story.run(1.0, beating=())} == {0, 1, 2}


def test_a_stage_that_computes_one_micro_batch_far_too_long_is_lost() -> None:
    story = Story()
    story.bring_up()
    member = story.crew.members[1]
    story.beat(1, held_s=59, rows=8)  # Nothing is known of its speed yet.
    assert story.crew.check() == []
    member.holds.extend([(100_000_000, 8)] * 9)
    assert member.hold_limit_ns(8) == 2 * SECOND  # 20 times the median.
    assert member.hold_limit_ns(80) == 20 * SECOND  # Ten times the rows may take ten times as long.
    assert member.hold_limit_ns(1) == 2 * SECOND
    story.beat(1, held_s=2.1, rows=8)
    (loss,) = story.crew.check()
    assert (loss.stage, loss.is_dead) == (1, True)
    assert "computed for 2.1 s; 2.0 s were allowed" in loss.why


def test_a_broken_link_is_a_loss_only_if_nobody_dies_of_it_soon() -> None:
    story = Story()
    story.bring_up()
    story.say("s0", wire.LinkLost(Epoch(0)))
    assert story.crew.check() == []
    (loss,) = story.run(0.4)
    assert loss == Loss(1, "the connection to its upstream broke", is_dead=False)
    story.say("s0", wire.LinkLost(Epoch(0)))
    story.supervisor.dead.append(1)
    (loss,) = story.crew.check()
    assert loss.is_dead
    why = story.crew.lose(loss)
    assert "process 4711: killed by signal 9" in why
    assert story.crew.members[1].step is Step.ABSENT
    assert story.crew.members[1].restarts == 1


def test_neighbours_that_do_not_find_each_other_are_lost_after_five_seconds() -> None:
    story = Story()
    for stage in range(3):
        story.join(f"s{stage}", stage)
        story.load(f"s{stage}")
        story.say(f"s{stage}", wire.Idle(Epoch(0)))
    assert story.run(4.9) == []
    assert {loss.stage for loss in story.run(0.5)} == {0, 1, 2}


def test_the_five_seconds_begin_when_the_slowest_stage_has_come_as_far() -> None:
    story = Story()
    for stage in range(3):
        story.join(f"s{stage}", stage)
    for stage in range(2):
        story.load(f"s{stage}")
        story.say(f"s{stage}", wire.Idle(Epoch(0)))
    assert story.run(20.0) == []
    story.load("s2")
    story.say("s2", wire.Idle(Epoch(0)))
    assert story.run(4.9) == []
    assert {loss.stage for loss in story.run(0.5)} == {0, 1, 2}


def test_a_stage_that_never_loads_is_lost() -> None:
    story = Story()
    story.join("s0", 0)
    losses = story.run(599, beating=(0,))
    assert losses == []
    assert [loss.why for loss in story.run(2, beating=(0,))][:1] == ["not loaded after 600 s"]


def test_too_many_losses_end_the_ring_but_old_ones_are_forgotten() -> None:
    story = Story(restarts_max=2)
    story.bring_up()
    loss = Loss(1, "it broke", is_dead=False)
    for _ in range(4):  # One every 30 s: never three in 60.
        story.crew.lose(loss)
        story.run(31)
    story.run(30)
    story.crew.lose(loss)
    story.crew.lose(loss)
    with pytest.raises(RingDown, match=r"3 stages were lost within 60 s .*stage 1: it broke"):
        story.crew.lose(loss)


def test_a_loss_before_the_ring_was_ever_up_ends_the_start() -> None:
    story = Story()
    story.join("s0", 0)
    story.say("s0", wire.Failed("no such tensor"))
    (loss,) = story.crew.check()
    with pytest.raises(RingDown, match="stage 0 did not start: no such tensor"):
        story.crew.lose(loss)


def test_a_spare_takes_the_next_place_and_a_dead_spare_does_not() -> None:
    story = Story(remote=frozenset({1, 2}))
    story.bring_up()
    story.join("dead spare", None)
    story.run(2)
    story.join("spare", None)
    assert story.sent_to("spare") == []
    story.crew.lose(Loss(2, "it broke", is_dead=True))
    assert isinstance(story.sent_to("s2")[-1], wire.Stop)
    story.crew.check()
    (assign,) = [m for m in story.sent_to("spare") if isinstance(m, wire.Assign)]
    assert assign.stage == 2
    assert not any(isinstance(m, wire.Assign) for m in story.sent_to("dead spare"))


def test_a_remote_stage_that_does_not_come_back_ends_the_ring() -> None:
    story = Story(remote=frozenset({2}))
    story.bring_up()
    story.crew.lose(Loss(2, "it broke", is_dead=True))
    assert story.run(119, beating=(0, 1)) == []
    with pytest.raises(RingDown, match="stage 2 did not come back within 120 s"):
        story.run(2, beating=(0, 1))


def test_a_stage_that_was_cut_off_is_told_to_join_again() -> None:
    story = Story()
    story.bring_up()
    story.say("stranger", wire.Idle(Epoch(0)))
    (stop,) = story.sent_to("stranger")
    assert isinstance(stop, wire.Stop)
    assert stop.may_rejoin


def test_clocks_of_other_hosts_are_told_apart_by_the_quickest_pulse() -> None:
    story = Story(remote=frozenset({1}))
    for stage in range(3):
        story.join(f"s{stage}", stage if stage != 1 else None, boot="elsewhere")
    ahead = 7 * SECOND
    sent = story.now
    story.now += 40_000_000
    story.say("s1", wire.Echo(sent, sent + ahead + 30_000_000))  # Slow: 40 ms, unevenly.
    sent = story.now
    story.now += 2_000_000
    story.say("s1", wire.Echo(sent, sent + ahead + 1_000_000))
    sent = story.now
    story.now += 90_000_000
    story.say("s1", wire.Echo(sent, sent + ahead + 80_000_000))
    assert story.crew.members[1].clock_offset_ns == ahead
