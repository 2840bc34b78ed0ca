"""Capacity: limits, the test of one load, the search, and what it finds on rings one can reckon."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvasir_scenario.workload import Requests, build_workload
from kvasir_sim.capacity.cheapest import rings
from kvasir_sim.capacity.driver import Driver
from kvasir_sim.capacity.knob import knob_of
from kvasir_sim.capacity.limits import Limit, read_limits
from kvasir_sim.capacity.probe import GROWS, UNSETTLED, judge, probe
from kvasir_sim.capacity.search import LoadSearch
from kvasir_sim.capacity.study import Study
from kvasir_sim.cli import main
from kvasir_sim.sweep.evaluate import Reply, Task
from kvasir_sim.sweep.points import Source, point_scenario
from tests.sim.sweeps import HerePool, refusal

# One row, one token: a request is one micro-batch, and a stage takes 10 ms for it.
PLAIN = """\
model: {layers: 8, context: 256}
ring: {stages: 2, row_width: 32, micro_batch_width: 1, window: 4, running_max: 16}
costs: {kind: fixed, pass_s: 0.01}
workload: {kind: poisson, rate_per_s: 20, requests: 150, prompt_tokens: 1, output_tokens: 1}
run: {seed: 7}
"""
TWO_CARDS = """\
model: {preset: smollm2-135m, context: 1024}
devices:
  slow: {flops: 1.0e+12, bandwidth_bytes_per_s: 2.0e+10, memory_bytes: 8000000000}
  fast: {flops: 4.0e+12, bandwidth_bytes_per_s: 8.0e+10, memory_bytes: 8000000000}
ring: {stages: 2, device: slow, row_width: 128, micro_batch_width: 8, window: auto, kv_tokens: 20000}
costs: {kind: roofline}
workload: {kind: poisson, rate_per_s: 1, requests: 60, prompt_tokens: 40, output_tokens: 8}
"""
ROW: dict[str, Any] = {
    "error": None, "verdict": "balanced", "few_samples": "", "ttft_p99_s": 0.5, "trace_span_s": 100.0,
    "elapsed_s": 101.0, "residence_mean_s": 2.0, "nothing_waiting_share": 0.9, "offered": 150,
}  # fmt: skip


def source_of(folder: Path, text: str = PLAIN, *settings: str) -> Source:
    path = folder / "plain.yaml"
    path.write_text(text)
    return Source.of_file(path, settings)


def study_of(
    folder: Path, *slos: str, text: str = PLAIN, settings: tuple[str, ...] = (), seeds: int = 3,
    precision: float = 0.02, prices: tuple[str, ...] = (),
) -> tuple[Study, Driver]:  # fmt: skip
    study = Study(source_of(folder, text, *settings), slos, prices, seeds, precision)
    return study, Driver(HerePool(study.source))


class OraclePool:
    """Answers at once, by a rule of (load, seed); counts what is asked."""

    jobs = 2

    def __init__(self, holds: Callable[[float, int], bool]) -> None:
        self._holds = holds
        self.drifts: dict[tuple[int, int], float] = {}
        self._tasks: list[Task] = []
        self.asked: list[tuple[float, int]] = []

    @property
    def open(self) -> int:
        return len(self._tasks)

    def has_room(self, ahead: int) -> bool:
        return len(self._tasks) < self.jobs * ahead

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def receive(self) -> Reply:
        task = self._tasks.pop()  # The last comes first: order must not matter.
        changes = dict(task.changes)
        seed = changes["run.seed"]
        load = changes["workload.rate_per_s"] * self.drifts[seed, 1]
        self.asked.append((load, seed))
        verdict = "balanced" if self._holds(load, seed) else "overloaded"
        row = {**ROW, "verdict": verdict, "micro_batches": 1}
        return Reply(number=task.number, figures={key: row[key] for key in row if key != "error"})


def oracle_search(
    folder: Path, holds: Callable[[float, int], bool], seeds: int = 5
) -> tuple[LoadSearch, OraclePool]:
    knob = knob_of(source_of(folder).load())
    pool = OraclePool(holds)
    pool.drifts = knob.drifts
    return LoadSearch(Driver(pool), knob, (), range(7, 7 + seeds), 0.01), pool


def test_progress_tells_what_is_tried_before_the_first_run_ends(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    knob = knob_of(source_of(tmp_path).load())
    pool = OraclePool(lambda load, _seed: load < 1)
    pool.drifts = knob.drifts
    driver = Driver(pool, lambda *what: told.append(what))
    LoadSearch(driver, knob, (), range(7, 8), 0.1).capacity()
    at_start = [doing for runs, _, doing in told if runs == 0]
    assert at_start[0] == "seed 1: roughly how much"
    assert re.fullmatch(
        r"seed 1: roughly how much \(rate per s [0-9.]+, requests \d+, seed 7\)", at_start[1]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slo", "ttft_p95=1"], "did you mean ttft_p99?"),
        (["--slo", "ttft_p99"], "its value is missing; it must be NAME=SECONDS, for example --slo ttft_p99=1.0"),
        (["--slo", "=1"], "the name is missing; it must be NAME=SECONDS"),
        (["--slo", "ttft_p99="], "found none; it must be seconds above 0"),
        (["--slo", "ttft_p99=fast"], "it must be seconds above 0"),
        (["--slo", "ttft_p99=0"], "it must be seconds above 0"),
        (["--slo", "ttft_p99=nan"], "it must be seconds above 0"),
        (["--slo", "ttft_p99=1", "--slo", "ttft_p99=2"], "limited twice"),
        (["--price", "gpu"], "its value is missing; it must be NAME=USD_PER_HOUR, for example --price gpu=1.8"),
        (["--price", "gpu=1"], "gpu is no device or worker of the scenario"),
        (["--set", "ring.windw=1"], "unknown key"),
        (["--set", "workload={kind: closed, users: 3, requests: 9, prompt_tokens: 1, output_tokens: 1}"],
         "users who wait never overload a ring"),
    ],
)  # fmt: skip
def test_bad_questions_are_refused_with_what_would_be_right(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source_of(tmp_path)
    assert said in refusal(capsys, "capacity", tmp_path / "plain.yaml", *words)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ()),
        ({"verdict": "overloaded"}, (GROWS,)),
        ({"ttft_p99_s": 1.5}, ("ttft_p99 > 1 s",)),
        ({"ttft_p99_s": None}, ("ttft_p99 > 1 s",)),
        ({"residence_mean_s": 30.0}, (UNSETTLED,)),
        ({"residence_mean_s": 30.0, "ttft_p99_s": 1.5}, ("ttft_p99 > 1 s",)),
        ({"few_samples": "e2e_p99 ttft_p99", "ttft_p99_s": 1.5}, (UNSETTLED,)),
        ({"few_samples": "e2e_p99"}, ()),
        ({"error": "no"}, ("no",)),
    ],
)
def test_one_run_is_judged_by_queue_limits_and_whether_it_settled(
    changes: dict[str, Any], why: tuple[str, ...]
) -> None:
    outcome = judge({**ROW, **changes}, [Limit("ttft_p99", 1.0)])
    assert (outcome.why, outcome.holds) == (why, not why)


def test_a_run_too_short_to_tell_is_made_longer_until_it_tells(tmp_path: Path) -> None:
    knob = knob_of(source_of(tmp_path).load())

    def lengths(settles_at: int, **changed: float) -> tuple[list[int], bool]:
        rows = probe(knob, (), (), 50.0, 7)
        asked: list[int] = []
        changes = next(rows)
        while True:
            count = dict(changes)["workload.requests"]
            asked.append(count // 150)
            stay_s = 2.0 if asked[-1] >= settles_at else 60.0
            row = {**ROW, "residence_mean_s": stay_s, "offered": count, **changed}
            try:
                changes = rows.send(row)
            except StopIteration as stop:
                return asked, stop.value.holds

    assert lengths(settles_at=4) == ([1, 2, 4], True)
    assert lengths(settles_at=10**9) == ([1, 2, 4, 8, 16], False)
    assert lengths(settles_at=1, nothing_waiting_share=0.2) == ([1, 8], True)


@pytest.mark.parametrize("edge", [0.03, 1.0, 19.7, 20.0, 137.0, 9000.0])
def test_the_search_finds_the_last_load_of_the_grid_that_holds(edge: float, tmp_path: Path) -> None:
    search, pool = oracle_search(tmp_path, lambda load, _: load <= edge)
    found = search.capacity()
    assert found.load is not None
    assert found.next_load is not None
    assert found.load <= edge < found.next_load
    assert (found.holding, found.holding_next) == (5, 0)
    assert len(pool.asked) == len(set(pool.asked)) <= 60, "no run is done twice"


def test_seeds_vote_and_each_has_its_own_edge(tmp_path: Path) -> None:
    edges = {7: 30.0, 8: 10.0, 9: 50.0, 10: 20.0, 11: 40.0}
    search, _ = oracle_search(tmp_path, lambda load, seed: load <= edges[seed])
    found = search.capacity()
    assert found.load is not None
    assert found.load <= 30 < found.load * 1.01
    assert (found.holding, found.holding_next) == (3, 2)
    assert [round(load or 0, -1) for load in found.seeds] == [30, 10, 50, 20, 40]
    four, _ = oracle_search(tmp_path, lambda load, seed: load <= edges[seed], seeds=4)
    assert 19 < (four.capacity().load or 0) <= 20, "more than half of four is three"


def test_a_ragged_edge_ends_where_the_vote_changes(tmp_path: Path) -> None:
    def ragged(load: float, seed: int) -> bool:
        return load < 40 and (load < 30 or (int(load * 10) + seed) % 3 > 0)

    search, _ = oracle_search(tmp_path, ragged)
    found = search.capacity()
    assert found.index is not None
    assert search.is_carried(search.votes(found.index))
    assert not search.is_carried(search.votes(found.index + 1))


def test_no_load_may_hold_and_every_load_may_hold(tmp_path: Path) -> None:
    never, _ = oracle_search(tmp_path, lambda load, seed: False)
    found = never.capacity()
    assert (found.load, found.index, found.seeds) == (None, None, (None,) * 5)
    assert found.breaks == {GROWS: 5}
    always, _ = oracle_search(tmp_path, lambda load, seed: True)
    found = always.capacity()
    assert (found.next_load, found.holding) == (None, 5)


def test_the_knob_turns_every_kind_of_load_and_leaves_the_requests_alone(tmp_path: Path) -> None:
    def at(workload: str, factor: float) -> tuple[float, Any]:
        source = source_of(tmp_path, PLAIN, f"workload={workload}")
        base = source.load()
        knob = knob_of(base)
        load = knob.at(factor)
        return load, point_scenario(base, json.loads(json.dumps(knob.changes(load, 2, 7))))

    lengths = "prompt_tokens: 3, output_tokens: 2"
    load, scenario = at(
        f"{{kind: gamma, burstiness: 2, rate_per_s: 8, requests: 10, {lengths}}}", 0.5
    )
    assert (load, scenario.workload.requests, scenario.run.seed) == (4, 20, 7)
    requests, _ = build_workload(scenario)
    assert isinstance(requests, Requests)
    span_s = (requests.arrival_ns[-1] - requests.arrival_ns[0]) / 1e9
    assert 19 / span_s == pytest.approx(4), "this seed's arrivals come to the load that was asked"
    assert scenario.run.warmup_s == pytest.approx(1.0)
    phases = "{phases: [{rate_per_s: 1, for_s: {uniform: [2, 3]}}, {rate_per_s: 4, for_s: 5}]}"
    load, scenario = at(f"{{kind: constant, rate_per_s: {phases}, duration_s: 30, {lengths}}}", 2)
    assert load == 8
    assert [phase.rate_per_s for phase in scenario.workload.rate_per_s.phases] == [2, 8]
    assert scenario.workload.duration_s == 60
    rows = "[[0, 1, 1], [2, 1, 1], [4, 1, 1]]"
    load, scenario = at(f"{{kind: trace, requests: {rows}, time_scale: 0.5}}", 3)
    assert (load, scenario.workload.rate_scale, scenario.workload.time_scale) == (4.5, 6, 1)
    load, scenario = at(f"{{kind: closed, users: 10, requests: 100, {lengths}}}", 2.04)
    assert (load, scenario.workload.users, scenario.workload.requests) == (20, 20, 320)


def test_a_ring_of_known_speed_has_the_capacity_that_one_can_reckon(tmp_path: Path) -> None:
    """A stage takes 10 ms for each request: 100 a second, and the test of growth sees 3 %."""
    study, driver = study_of(tmp_path)
    document = study.capacity(driver, has_gains=False)
    assert 92 < document["capacity"] < 104
    assert document["breaks"].keys() == {GROWS}
    assert document["beyond"]["verdict"] == "overloaded"
    bounded, driver = study_of(tmp_path, "ttft_p90=0.04")
    document = bounded.capacity(driver, has_gains=False)
    assert 20 < document["capacity"] < 80, "queueing passes 40 ms long before the ring is full"
    assert document["breaks"].keys() == {"ttft_p90 > 0.04 s"}


def test_the_search_agrees_with_brute_force_for_a_tenth_of_the_runs(tmp_path: Path) -> None:
    study, driver = study_of(tmp_path, "e2e_p90=0.05", precision=0.05)
    seeds = study.seeds
    search = LoadSearch(driver, study.knob, study.limits, seeds, 0.05)
    found = search.capacity()
    assert found.index is not None
    brute_driver = Driver(HerePool(study.source))
    brute = LoadSearch(brute_driver, study.knob, study.limits, seeds, 0.05)
    indexes = range(-40, 41)
    carried = {index: brute.is_carried(brute.votes(index)) for index in indexes}
    first_broken = min(index for index, holds in carried.items() if not holds)
    last_carried = max(index for index, holds in carried.items() if holds)
    assert first_broken - 1 <= found.index <= last_carried
    assert driver.runs <= 0.15 * brute_driver.runs, "81 loads; of 200 it is a tenth"


def test_one_more_of_what_binds_brings_most_and_of_the_rest_nothing(tmp_path: Path) -> None:
    study, driver = study_of(tmp_path, seeds=1, settings=("workload.requests=100",))
    gains = study.capacity(driver, has_gains=True)["gains"]
    by_name = {gain["resource"]: gain for gain in gains}
    assert gains[0]["resource"] == "micro-batch width"
    assert 0.7 < gains[0]["gain_share"] < 1.3, "two requests for the price of one"
    for name in ("stage", "window", "running"):
        assert abs(by_name[name]["gain_share"]) < 0.05
    assert by_name["link"]["why_not"] == "bytes take no time on the links"
    assert by_name["KV"]["why_not"] == "KV is unbounded"


def test_the_cheapest_ring_is_the_first_in_price_that_carries_the_load(tmp_path: Path) -> None:
    study, driver = study_of(tmp_path, text=TWO_CARDS, seeds=1, prices=("slow=1", "fast=2.5"))
    scenario = study.scenario
    order = list(rings(scenario, study.prices, 4))
    costs = [{"slow": 1, "fast": 2.5}[name or ""] for ring in order for name in ring]
    assert len(order) == 12
    assert costs[:4] == [1, 1, 1, 1]
    own = study.capacity(driver, has_gains=False)["capacity"]
    document = study.cheapest(driver, own * 0.9, 4)
    assert document["best"]["devices"] == {"slow": 2}, "the ring that carries it by itself"
    more = study.cheapest(driver, own * 1.9, 4)
    assert more["best"]["usd_per_h"] > 2
    held = [answer for answer in more["tried"] if answer["holds"]]
    assert len(held) == 1
    assert all(answer["usd_per_h"] <= held[0]["usd_per_h"] for answer in more["tried"])
    assert not study.cheapest(driver, own * 1000, 4)["found"]


def test_the_command_prints_a_document_and_says_when_nothing_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source_of(tmp_path)
    words = ["capacity", str(tmp_path / "plain.yaml"), "--seeds", "1", "--jobs", "1"]
    main([*words, "--precision", "0.1", "--no-gains", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert 90 < document["capacity"] < 110
    assert document["gains"] == []
    with pytest.raises(SystemExit) as stop:
        main([*words, "--slo", "ttft_p50=0.001", "--precision", "0.5", "--no-gains"])
    assert stop.value.code == 1
    assert "no load holds" in capsys.readouterr().out
    assert read_limits(["itl_mean=2e-3"]) == (Limit("itl_mean", 0.002),)


SWARM = """\
model: {layers: 4, context: 256, hidden: 512, experts: 16, experts_used: 2, expert_ffn: 512}
ring: {stages: 2, row_width: 32, micro_batch_width: 8, window: 4, running_max: 16}
costs: {kind: fixed, pass_s: 0.0, pass_s_per_layer: 0.002, per_token_s: 0.0001}
workload: {kind: poisson, rate_per_s: 10, duration_s: 12, prompt_tokens: 16, output_tokens: 10}
experts:
  overlap: 4
  local: {per_expert_s: 0.003}
  hub: null
  workers:
    - {name: lan, count: 4, per_expert_s: 0.0005, link: {latency_s: 0.0002}, download_bytes_per_s: 1.0e+9}
run: {warmup_s: 4}
"""


def test_the_fewest_workers_that_carry_the_load_hold_and_one_less_does_not(tmp_path: Path) -> None:
    study, driver = study_of(tmp_path, "ttft_p50=2.0", text=SWARM, seeds=1, prices=("lan=0.1",))
    document = study.cheapest(driver, 15.0, 4)
    best = document["best"]
    assert best["worker"] == "lan"
    assert best["usd_per_h"] == pytest.approx(0.1 * best["count"])
    assert best["count"] == 2
    assert best["tried"][str(best["count"])]
    assert not best["tried"][str(best["count"] - 1)]


def test_where_more_workers_bring_nothing_the_search_gives_up(tmp_path: Path) -> None:
    study, driver = study_of(tmp_path, "ttft_p50=0.001", text=SWARM, seeds=1)
    document = study.cheapest(driver, 5.0, 4)
    assert not document["found"]
    assert driver.runs < 8
