"""What a run with a swarm leaves: timeline, plot, logs that replay, and a section on the screen."""

from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from rich.console import Console

from kvasir_core.eventlog import replay
from kvasir_core.swarm import COORDINATOR_EVENTS, HUB_EVENTS
from kvasir_core.swarm.statistics import CoordinatorStatistics, HubStatistics
from kvasir_scenario.dump import to_yaml
from kvasir_scenario.load import load_text
from kvasir_scenario.report_schema import parse_report
from kvasir_scenario.schema import Scenario
from kvasir_scenario.tables import SWARM
from kvasir_scenario.terminal import print_report
from kvasir_sim.commands.report import command as report_command
from kvasir_sim.run import Result, run
from kvasir_sim.simulate import Simulation
from kvasir_sim.swarm.swarm import Swarm
from tests.sim.swarm.swarms import LAN, scenario_of

FAULTS = [
    {"kind": "worker_lost", "rate_per_h": 60, "for_s": 20},
    {"kind": "poll_hangs", "at_s": 40, "for_s": 20},
    {"kind": "hub_paused", "at_s": 70, "for_s": 10},
]


def scenario() -> Scenario:
    liar = {**LAN, "name": "liar", "count": 1, "honesty": "scaled"}
    data = scenario_of(workers=[LAN, liar], faults=FAULTS)
    text = to_yaml(data) + "\n"
    return load_text(text.replace("what_if: {}", "what_if: {alone: {experts.workers: []}}"))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("swarm") / "run"
    return run(scenario(), out, plots=True, csv=True, events=True, processes=0)


def test_the_timeline_is_a_table_of_the_run(result: Result) -> None:
    timeline: pd.DataFrame = result.swarm
    assert list(timeline.columns) == SWARM.names
    assert timeline.at_s.is_monotonic_increasing
    assert timeline.at_s.iloc[-1] == pytest.approx(result.report.elapsed_s)
    part = result.report.swarm
    assert part is not None
    assert timeline.downloads.max() == part.downloads
    standing = timeline[["new", "trial", "proven", "suspect", "quarantined"]].sum(axis=1)
    assert (standing <= part.workers).all()
    assert timeline.quarantined.max() == 1
    assert result.directory is not None
    rows = pd.read_csv(result.directory / "swarm.csv")
    assert len(rows) == len(timeline)


def test_the_report_reads_back_and_the_plot_is_drawn_again_alike(result: Result) -> None:
    assert result.directory is not None
    text = (result.directory / "report.json").read_text()
    assert parse_report(text) == result.report
    assert parse_report(text).variants[0].report.swarm is not None
    picture = result.directory / "elastic_curve.png"
    before = picture.read_bytes()
    assert before.startswith(b"\x89PNG")
    shown = CliRunner().invoke(report_command, [str(result.directory)])
    assert shown.exit_code == 0, shown.output
    assert picture.read_bytes() == before


def test_the_screen_says_what_came_what_it_gave_and_what_it_cost(result: Result) -> None:
    console = Console(width=120, record=True, file=None, highlight=False)
    with console.capture() as capture:
        print_report(result.report, console)
    text = capture.get()
    for word in ("Bound", "Workers", "Elasticity", "Market", "1 of 1 scaled", "What if: the swarm"):
        assert word in text
    assert "alone" in text


def test_logs_of_coordinator_and_hub_replay_to_the_same_state(tmp_path: Path) -> None:
    one = scenario()
    logs = (tmp_path / "coordinator").open("w"), (tmp_path / "hub").open("w")
    simulation = Simulation(one, None, swarm_logs=logs)
    simulation.run()
    for log in logs:
        log.close()
    assert simulation.swarm is not None
    lived = simulation.swarm.swarm
    born: Swarm = Simulation(one, None).swarm.swarm  # type: ignore[union-attr]
    assert lived.hub is not None
    assert born.hub is not None
    coordinator, hub = born.coordinator.coordinator, born.hub.hub
    lines = (tmp_path / "coordinator").read_text().splitlines()
    assert sum(1 for _ in replay(coordinator, lines, COORDINATOR_EVENTS)) > 1000
    state: CoordinatorStatistics = coordinator.statistics()
    assert state == lived.coordinator.coordinator.statistics()
    lines = (tmp_path / "hub").read_text().splitlines()[2:]  # A hub shell is born with the first.
    assert sum(1 for _ in replay(hub, lines, HUB_EVENTS)) > 200
    hub_state: HubStatistics = hub.statistics()
    assert hub_state == lived.hub.hub.statistics()


def test_the_naive_rule_is_chosen_by_name() -> None:
    naive = scenario_of(hub={"policy": "naive"}, coordinator={"policy": "naive"})
    simulation = Simulation(naive, None)
    assert simulation.swarm is not None
    policy = simulation.swarm.swarm.policy
    assert policy.rule == "naive"
    assert not policy.counts_claims
    assert not policy.prefers_held
