"""Cases E1, E3 and E5 in simulation, and what else must hold of one run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvasir_core import ScenarioError
from kvasir_core.swarm.words import WorkerId
from tests.sim.swarm.swarms import LAN, Run, scenario_of

NEVER_S = 1e6
BUSY: dict[str, Any] = {
    "kind": "closed", "users": 4, "prompt_tokens": 16, "output_tokens": 8, "duration_s": 1e5,
}  # fmt: skip


# E1: constant load between one and two servers.


def test_e1_constant_load_moves_the_target_once_and_each_worker_comes_once() -> None:
    """Alone the ring gives about two thirds of what is asked for, for half an hour."""
    workload = {
        "kind": "constant", "rate_per_s": 0.475, "duration_s": 1800, "prompt_tokens": 16,
        "output_tokens": 8,
    }  # fmt: skip
    hub = {"base": 0, "boost": 2}
    run, alone = (
        Run(
            scenario_of(
                workload=workload, hub=hub, workers=workers, run={"horizon_s": 1800}, slow=4
            )
        )
        for workers in ([LAN], [])
    )
    assert run.part.peak.output_tokens_per_s is not None
    assert alone.part.peak.output_tokens_per_s is not None
    assert 1 < run.part.peak.output_tokens_per_s / alone.part.peak.output_tokens_per_s < 2
    assert run.swarm.hub is not None
    late = [at for at, _ in run.swarm.hub.target_changes if at > 120e9]
    assert len(late) <= 2
    assert run.part.target_changes == len(run.swarm.hub.target_changes)
    for worker in run.swarm.workers.values():
        assert worker.joins <= 1
        assert worker.exits <= 1
    assert sum(worker.joins for worker in run.swarm.workers.values()) >= 1


# E3: registered is not able.


def e3(*, has_proven: bool, stalled_s: float, horizon_s: float) -> Run:
    """W serves (layer 0, experts [0, 4)) and accepts work without answering; P serves all."""
    workers = [{**LAN, "name": "W", "count": 1, "experts_max": 4}]
    if has_proven:
        workers.append({**LAN, "name": "P", "count": 1, "experts_max": 8, "arrival_s": 10})
    return Run(
        scenario_of(
            layers=2,
            experts=8,
            workers=workers,
            workload=BUSY,
            hub={"slice_experts_max": 4},
            faults=[{"kind": "worker_stalled", "workers": "W", "at_s": 0.5, "for_s": stalled_s}],
            section={"model": {"layers": 1}},
            run={"horizon_s": horizon_s},
        )
    )


@pytest.mark.parametrize("has_proven", [True, False])
def test_e3_a_worker_that_never_answers_gets_its_trial_and_nothing_else(has_proven: bool) -> None:
    run = e3(has_proven=has_proven, stalled_s=NEVER_S, horizon_s=60)
    coordinator = run.swarm.coordinator.coordinator
    slices = {s.worker: s for s in coordinator.statistics().slices if s.layer == 0}
    w = slices[WorkerId("W-0")]
    assert w.last_serve_ms == 0
    assert w.standing == "suspect"
    of_w = run.swarm.workers[WorkerId("W-0")]
    assert run.part.trials - run.part.downloads + 1 <= 1 + has_proven, "one trial each"
    assert of_w.conscience.answers == 0
    served = [run for run in run.demand if run[1][0] == 0]
    assert served[0][2] == int(has_proven), "its slice still counts as uncovered"
    slowest = run.report.latency.e2e_s
    assert slowest.p99 is not None
    alone = Run(
        scenario_of(
            layers=2, experts=8, workers=[], workload=BUSY, section={"model": {"layers": 1}},
            run={"horizon_s": 60},
        )
    )  # fmt: skip
    assert alone.report.latency.e2e_s.p99 is not None
    deadline_s = run.swarm.policy.call_deadline_ns / 1e9
    assert slowest.p99 <= alone.report.latency.e2e_s.p99 + deadline_s
    if has_proven:
        p = slices[WorkerId("P-0")]
        assert p.standing == "proven"
        share = run.part.share_remote_pairs
        assert share is not None
        assert share > 0.3, "P keeps receiving work past the idle delay while load lasts"


def test_e3_one_that_answers_later_becomes_proven() -> None:
    run = e3(has_proven=True, stalled_s=30, horizon_s=150)
    slices = {s.worker: s for s in run.swarm.coordinator.coordinator.statistics().slices}
    assert slices[WorkerId("W-0")].standing == "proven"
    assert slices[WorkerId("W-0")].last_serve_ms > 0


# E5: ages are the hub's own.

E5_HUB = {"heartbeat_s": 5, "coverage_ttl_s": 15}


def e5(*faults: dict[str, Any], horizon_s: float = 200) -> Run:
    return Run(
        scenario_of(hub=E5_HUB, workload=BUSY, faults=list(faults), run={"horizon_s": horizon_s})
    )


def jump(where: str, at_s: float, by_s: float) -> dict[str, Any]:
    return {"kind": "clock_jump", "where": where, "at_s": at_s, "by_s": by_s}


def test_e5_nobody_is_lost_when_clocks_are_set() -> None:
    jumps = [
        jump("worker", 30, -600), jump("worker", 40, 600), jump("hub", 60, 3600),
        jump("hub", 100, -7200),
    ]  # fmt: skip
    run = e5(*jumps)
    assert run.swarm.hub is not None
    assert run.part.workers_lost == 0
    assert run.swarm.hub.hub.statistics().clock_jumps == 2
    assert all(node.age_s >= 0 for node in run.swarm.hub.hub.statistics().nodes)


@pytest.mark.parametrize("jumps", [(), (jump("hub", 68, -7200),), (jump("hub", 68, 3600),)])
def test_e5_a_silent_worker_is_lost_once_at_its_limit_and_its_slices_are_uncovered(
    jumps: tuple[dict[str, Any], ...],
) -> None:
    """15 to 20 s after its last heartbeat; a step of the hub's own clock gives one more limit."""
    silent = {"kind": "worker_lost", "workers": "lan", "at_s": 60, "for_s": NEVER_S}
    run = e5(silent, *jumps)
    assert run.swarm.hub is not None
    ((at, who),) = run.swarm.hub.losses
    heard = run.swarm.watch.heard_at(who)
    assert 55e9 <= heard <= 60e9
    counted_from = 68e9 if jumps else heard
    assert counted_from + 15e9 < at <= counted_from + 20e9
    assert all(replicas <= 2 or target == 3 for _, _, replicas, target in run.demand)


def test_e5_a_hub_that_was_stopped_gives_everyone_a_full_limit() -> None:
    run = e5({"kind": "hub_paused", "at_s": 50, "for_s": 40})
    assert run.part.workers_lost == 0


# Outages and faults.


def test_an_outage_shorter_than_the_maps_life_goes_unnoticed_and_a_longer_one_means_local() -> None:
    faults = [{"kind": "hub_lost", "at_s": 200, "for_s": 400}]
    run = Run(scenario_of(workload=BUSY, faults=faults, run={"horizon_s": 900}))
    rows = run.simulation.swarm.timeline.rows  # type: ignore[union-attr]
    share = {round(row[0] / 1e9): row[17] for row in rows}
    assert share[310] > 0.8, "D6: 110 s into the outage the last map still holds"
    assert share[400] == 0, "its life of 120 s is over"
    assert share[800] > 0.8, "wired in again"


def test_workers_that_crash_keep_their_slices_on_disk_and_download_nothing_again() -> None:
    faults = [{"kind": "worker_lost", "share": 1.0, "at_s": 60, "for_s": 30}]
    run = Run(scenario_of(workload=BUSY, faults=faults, run={"horizon_s": 400}))
    assert run.part.warm_loads > 0
    cold_workers = [{**LAN, "keeps_slices": False}]
    cold = Run(
        scenario_of(workload=BUSY, workers=cold_workers, faults=faults, run={"horizon_s": 400})
    )
    assert cold.part.warm_loads == 0
    assert cold.part.downloads > run.part.downloads


def test_polls_that_hang_turn_to_local_after_half_a_minute_without_delay_of_requests() -> None:
    faults = [{"kind": "poll_hangs", "at_s": 60, "for_s": 120}]
    run = Run(scenario_of(workload=BUSY, faults=faults, run={"horizon_s": 240}))
    whys = [(round(at / 1e9), why) for at, why in run.swarm.coordinator.switches]
    assert any(85 <= at <= 95 and why == "blind" for at, why in whys)
    assert whys[-1][1] == "engaged"
    calm = Run(scenario_of(workload=BUSY, run={"horizon_s": 240}))
    hung_s, calm_s = run.report.latency.itl_s.p99, calm.report.latency.itl_s.p99
    assert hung_s is not None
    assert calm_s is not None
    assert hung_s <= 1.1 * calm_s, "D5: a hung poll delays nothing"


# What holds of every run.


def test_work_of_remote_experts_shows_as_blocked_by_experts_in_the_time_split() -> None:
    far = [{**LAN, "link": {"latency_s": 0.05}}]
    run = Run(scenario_of(workload=BUSY, workers=far, run={"horizon_s": 120}))
    for stage in run.report.stages:
        assert stage.blocked_by.experts > 0
        total = stage.busy_s + stage.blocked_s + stage.starved_s
        assert total == pytest.approx(run.report.elapsed_s, abs=1e-6)


def test_remote_help_that_is_no_gain_is_given_up() -> None:
    """Over 300 ms a layer blocks the stage longer than its experts would take here."""
    far = [{**LAN, "link": {"latency_s": 0.15}}]
    run = Run(scenario_of(workload=BUSY, workers=far, run={"horizon_s": 300}))
    assert "no_gain" in [why for _, why in run.swarm.coordinator.switches]


def test_r_equal_replicas_serve_a_pair_r_times_as_fast_where_compute_bound() -> None:
    """D8, with slow workers and every slice on each of them."""
    rates = []
    for count in (1, 2, 4):
        slow = [{**LAN, "count": count, "per_expert_s": 0.05, "experts_max": 64}]
        section = {"local": {"per_expert_s": 0.2}, "overlap": 8}
        run = Run(
            scenario_of(
                workload={**BUSY, "users": 16}, workers=slow, has_hub=False, section=section,
                coordinator={"answers_checked_first": 1, "hedge_s": 5, "call_timeout_s": 20},
                window=8, run={"horizon_s": 400, "warmup_s": 100},
            )
        )  # fmt: skip
        assert run.report.throughput.output_tokens_per_s is not None
        rates.append(run.report.throughput.output_tokens_per_s)
    assert rates[1] / rates[0] == pytest.approx(2, rel=0.25)
    assert rates[2] / rates[1] == pytest.approx(2, rel=0.25)


def test_without_a_market_slices_are_dealt_evenly() -> None:
    run = Run(scenario_of(has_hub=False, workers=[{**LAN, "count": 3}], workload=BUSY))
    held: dict[tuple[int, int], int] = {}
    for worker in run.swarm.workers.values():
        assert worker.room == 0
        for slice_ in worker.slices:
            held[slice_.layer, slice_.begin] = held.get((slice_.layer, slice_.begin), 0) + 1
    assert sorted(held.values()) == [1, 1, 2, 2]
    assert len(held) == 4
    assert run.part.target_base is None


def test_requests_that_end_the_run_need_no_horizon() -> None:
    workload = {**BUSY, "duration_s": 30}
    run = Run(scenario_of(workload=workload, run={"seed": 3}))
    assert run.report.counts.finished == run.report.counts.offered
    assert 30 <= run.report.elapsed_s < 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"layers": 9}}, r"experts\.model\.layers: .* not layers of a model of 4"),
        ({"model": {"top_k": 99}}, r"experts\.model\.top_k: found 99; .*experts \(16\)"),
        ({"workers": [{**LAN, "memory_bytes": 10}]}, r"memory_bytes: found 10; one expert has"),
        ({"workers": [{**LAN, "count": 10_001}]}, r"experts\.workers: .* at most 10000"),
        ({"hub": {"heartbeat_s": 200}}, r"heartbeat_s: found 200; .*coverage_ttl_s"),
        ({"hub": {"poll_timeout_s": 20}}, r"hub\.poll_timeout_s: found 20; .*poll_s \(10\)"),
        ({"hub": {"reading_valid_s": 1}}, r"hub\.reading_valid_s: found 1; .*poll_s \(10\)"),
        ({"coordinator": {"poll_timeout_s": 9}}, r"poll_timeout_s: found 9; .*period_s \(3\)"),
        ({"workers": [{**LAN, "per_expert_s": -1}]}, r"per_expert_s: found -1; .*more than 0"),
        ({"workers": [{**LAN, "count": 0}]}, r"workers\.0\.count: found 0; .*at least 1"),
        ({"workers": [{**LAN, "honesty": "evil"}]}, r"honesty: found \"evil\"; .*honest, nan"),
        ({"overlap": 0}, r"experts\.overlap: found 0; .*at least 1"),
        ({"workers": [LAN, LAN]}, r"workers\.1\.name: found lan a second time"),
        ({"routing": {"kind": "measured"}}, r"routing\.file: kind measured needs a file"),
    ],
)
def test_wrong_numbers_are_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        Run(scenario_of(section=change))


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    program = (
        "import sys; from tests.sim.swarm.swarms import Run, scenario_of;"
        "faults = [{'kind': 'worker_lost', 'rate_per_h': 60, 'for_s': 20},"
        " {'kind': 'messages_lost', 'rate_per_h': 60, 'lost_share': 0.3, 'doubled_share': 0.3,"
        " 'delay_s': 1, 'for_s': 30}];"
        "sys.stdout.write(Run(scenario_of(faults=faults)).report.to_json())"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "4711")
    ]
    assert outputs[0] == outputs[1]
    assert '"hedges"' in outputs[0]
