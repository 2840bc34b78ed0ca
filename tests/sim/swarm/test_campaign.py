"""The fault campaign: it finds nothing, it finds what is broken on purpose, and it reproduces."""

import json
from collections.abc import Iterable

import pytest
from click.testing import CliRunner

from kvasir_core.swarm.clock import AwakeClock
from kvasir_core.swarm.standing import Worker
from kvasir_core.units import Nanos
from kvasir_sim.commands.campaign import command
from kvasir_sim.swarm.campaign import draw_scenario, run_seed


def test_twenty_seeds_break_no_law() -> None:
    result = CliRunner().invoke(command, ["--seeds", "20", "--minutes", "6", "--json"])
    summary = json.loads(result.stdout)
    assert summary["violations"] == 0, result.stderr
    assert result.exit_code == 0
    assert summary["seeds"] == 20
    assert summary["simulated_hours"] > 2
    assert summary["decisions"] > 100_000
    for kind in ("hub_lost", "worker_lost", "stage_lost", "messages_lost", "clock_jump"):
        assert summary["faults"][kind] > 0
    assert any(kind.startswith("liar_") for kind in summary["faults"])


def test_a_seed_says_the_same_every_time() -> None:
    assert run_seed(3, 3) == run_seed(3, 3)
    assert draw_scenario(3, 3) == draw_scenario(3, 3)
    assert draw_scenario(3, 3) != draw_scenario(4, 3)


def has_clock_jump(seed: int) -> bool:
    return any(
        fault.kind == "clock_jump" and fault.where == "hub" and fault.rate_per_h == 60
        for fault in draw_scenario(seed, 6).faults
    )


def first_violation(seeds: Iterable[int]) -> str:
    for seed in seeds:
        violation = run_seed(seed, 6).violation
        if violation is not None:
            return violation
    raise AssertionError("the campaign saw nothing")


def test_a_core_that_trusts_everyone_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "is_trusted", lambda _self, _slice, _at: True)
    assert "D2" in first_violation(range(1, 9))


def test_a_core_that_believes_its_clock_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(self: AwakeClock, shell_now: Nanos) -> Nanos:
        step = 0 if self._shell is None else shell_now - self._shell
        self._shell = shell_now
        self.now = Nanos(self.now + max(0, step))
        return self.now

    monkeypatch.setattr(AwakeClock, "advance", advance)
    jumps = [seed for seed in range(1, 60) if has_clock_jump(seed)]
    assert "M10" in first_violation(jumps)


def test_a_worker_that_is_never_tried_again_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "open_window", lambda _self, _at: False)
    assert "liveness" in first_violation(range(1, 3))


def test_a_failing_seed_is_named_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Worker, "open_window", lambda _self, _at: False)
    arguments = ["--seeds", "1", "--first-seed", "5", "--minutes", "1"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1
    assert "kvasir-sim campaign --seeds 1 --first-seed 5 --minutes 1" in result.stderr
    assert "1 violations" in result.stdout


@pytest.mark.parametrize(
    "arguments", [["--seeds", "0"], ["--minutes", "0"], ["--first-seed", "-1"]]
)
def test_limits_of_the_command(arguments: list[str]) -> None:
    assert CliRunner().invoke(command, arguments).exit_code == 2
