"""Workloads from scenarios: traces sliced and scaled, open-loop load, what chance decides."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvasir_core.errors import ScenarioError
from kvasir_scenario import arrivals
from kvasir_scenario.load import load_text
from kvasir_scenario.schema import Scenario
from kvasir_scenario.workload import NEVER_NS, Requests, WorkloadFacts, build_workload

RING = """
model: {layers: 8, context: 8192}
ring: {stages: 2, row_width: 64, micro_batch_width: 8, window: 2, kv_tokens: 100000}
costs: {kind: fixed, pass_s: 1.0}
"""
LENGTHS = "prompt_tokens: {uniform: [1, 9]}, output_tokens: {lognormal: {median: 129, p90: 424}}"


def scenario_of(workload: str, base: Path = Path(), seed: int = 1) -> Scenario:
    return load_text(f"{RING}workload: {{{workload}}}\n", base=base, seed=seed)


def requests_of(
    workload: str, base: Path = Path(), seed: int = 1
) -> tuple[Requests, WorkloadFacts]:
    requests, facts = build_workload(scenario_of(workload, base, seed))
    assert isinstance(requests, Requests)
    return requests, facts


def columns(requests: Requests) -> list[list[int]]:
    return [
        column.tolist()
        for column in (
            requests.request_id,
            requests.arrival_ns,
            requests.prompt_tokens,
            requests.output_tokens,
        )
    ]


def test_three_clocks_give_the_same_requests(tmp_path: Path) -> None:
    """S1: seconds, Mooncake's milliseconds from 41 s, microseconds since 1970."""
    (tmp_path / "a.csv").write_text(
        "arrival,prompt_tokens,output_tokens\n0,64,4\n0.5,64,4\n1.0,64,4\n"
    )
    (tmp_path / "b.jsonl").write_text(
        "".join(
            f'{{"timestamp":{t},"input_length":64,"output_length":4,"hash_ids":[]}}\n'
            for t in (41000, 41500, 42000)
        )
    )
    (tmp_path / "c.csv").write_text(
        "arrival,prompt_tokens,output_tokens\n1787000000000000,64,4\n1787000000500000,64,4\n"
        "1787000001000000,64,4\n"
    )
    for source in (
        "path: a.csv, format: csv, time_unit: s",
        "path: b.jsonl, format: mooncake",
        "path: c.csv, format: csv, time_unit: us",
    ):
        requests, facts = requests_of(f"kind: trace, {source}, deadline_s: 60", tmp_path)
        assert columns(requests) == [[0, 1, 2], [0, 500_000_000, 10**9], [64] * 3, [4] * 3]
        assert requests.deadline_ns == 60 * 10**9
        assert facts.trace_span_s == 1.0
        assert facts.warnings == ()
    with pytest.raises(ScenarioError, match=r"c\.csv:2: column 'arrival'.*time_unit"):
        requests_of("kind: trace, path: c.csv, format: csv", tmp_path)


def test_failed_rows_are_set_apart(tmp_path: Path) -> None:
    """S3: a row without output is offered and failed; it is not a very fast request."""
    (tmp_path / "b.csv").write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "0,ChatGPT,100,10,110,Conversation log\n30,ChatGPT,100,0,100,Conversation log\n"
        "60,GPT-4,100,1,101,API log\n"
    )
    requests, facts = requests_of("kind: trace, path: b.csv, format: burstgpt", tmp_path)
    assert columns(requests) == [[0, 2], [0, 60 * 10**9], [100, 100], [10, 1]]
    assert facts.trace_failed == 1
    assert facts.failed_rows is not None
    assert columns(facts.failed_rows) == [[1], [30 * 10**9], [100], [0]]
    assert facts.trace_span_s == 60.0
    (tmp_path / "b.csv").write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n0,GPT-4,0,1,1,API log\n"
    )
    with pytest.raises(ScenarioError, match=r"b\.csv:2: column 'Request tokens', value '0'"):
        requests_of("kind: trace, path: b.csv, format: burstgpt", tmp_path)


def test_inline_requests_keep_their_own_clock() -> None:
    requests, facts = requests_of("kind: trace, requests: [[2.5, 1, 10], [4, 7, 0], [4.0, 3, 2]]")
    assert columns(requests) == [[0, 2], [2_500_000_000, 4 * 10**9], [1, 3], [10, 2]]
    assert facts.trace_failed == 1
    assert facts.trace_span_s == 1.5
    assert facts.ties == 1


def test_rows_out_of_order_are_sorted_stably_and_counted() -> None:
    """Rows 2 and 3 stand below a later one; 1 and 4 tie, and so do 3 and 5."""
    rows = [[0, 1, 1], [5, 2, 1], [1, 3, 1], [2, 4, 1], [5, 5, 1], [2, 6, 1]]
    requests, facts = requests_of(f"kind: trace, requests: {rows}")
    assert requests.request_id.tolist() == [0, 2, 3, 5, 1, 4]
    assert requests.prompt_tokens.tolist() == [1, 3, 4, 6, 2, 5]
    assert facts.out_of_order == 3
    assert facts.ties == 2


def test_many_ties_keep_the_rows_order() -> None:
    rows = [[k % 7, k + 1, 1] for k in range(2000)]
    requests, facts = requests_of(f"kind: trace, requests: {rows}")
    assert requests.request_id.tolist() == sorted(range(2000), key=lambda k: k % 7)
    assert facts.ties == 2000 - 7


def test_a_nanosecond_apart_is_no_tie() -> None:
    _, facts = requests_of("kind: trace, requests: [[0, 1, 1], [1e-9, 1, 1], [1.2e-9, 1, 1]]")
    assert facts.ties == 1


def test_a_slice_starts_the_clock_at_its_start_and_keeps_the_ids() -> None:
    rows = [[i, i + 1, 1] for i in range(10)]
    requests, facts = requests_of(
        f"kind: trace, requests: {rows}, start_s: 2.5, stop_s: 8, limit: 4, time_scale: 0.5"
    )
    assert requests.request_id.tolist() == [3, 4, 5, 6]
    assert (requests.arrival_ns / 1e9).tolist() == [0.25, 0.75, 1.25, 1.75]
    assert facts.trace_span_s == 1.5
    doubled, _ = requests_of(
        f"kind: trace, requests: {rows}, start_s: 2.5, limit: 4, rate_scale: 2"
    )
    assert columns(doubled) == columns(requests)


@pytest.mark.parametrize("edge", ["start_s: 99", "start_s: 1.5, stop_s: 1.6"])
def test_an_empty_slice_says_how_long_the_trace_is(edge: str) -> None:
    with pytest.raises(ScenarioError, match=r"2 in 3 s"):
        requests_of(f"kind: trace, requests: [[0, 1, 1], [3, 1, 1]], {edge}")


def test_no_request_at_all_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"workload\.requests"):
        requests_of("kind: trace, requests: []")


def test_a_stretch_beyond_the_clock_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"workload\.time_scale: stretches 1e\+06 s"):
        requests_of("kind: trace, requests: [[0, 1, 1], [1e6, 1, 1]], time_scale: 1e5")


def test_prompts_are_cut_by_the_excess_and_counted() -> None:
    """Golden rule: prompt + output fit the most, and one prompt token stays."""
    rows = [[0, 8000, 192], [0, 8000, 193], [1, 5, 8191], [2, 5, 9000], [3, 9000, 0]]
    requests, facts = requests_of(f"kind: trace, requests: {rows}, max_total_tokens: 8192")
    assert requests.prompt_tokens.tolist() == [8000, 7999, 1, 1]
    assert requests.output_tokens.tolist() == [192, 193, 8191, 9000]
    assert facts.clipped == 3


def test_a_missing_trace_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"scenario:5: workload\.path: .*none\.csv.*ask Ann"):
        requests_of("kind: trace, path: none.csv, format: azure, obtain: ask Ann", tmp_path)


def test_renamed_columns_keep_the_other_names(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_ms,in,output_tokens\n0,5,6\n10,7,8\n")
    requests, _ = requests_of(
        "kind: trace, path: t.csv, format: csv, columns: {prompt: in}", tmp_path
    )
    assert columns(requests) == [[0, 1], [0, 10_000_000], [5, 7], [6, 8]]


def test_hashes_follow_the_sorted_and_sliced_requests(tmp_path: Path) -> None:
    rows = [(30, 0, [9]), (10, 1, [1, 2]), (20, 0, [3]), (15, 2, [1, 2, 4])]
    (tmp_path / "m.jsonl").write_text(
        "".join(
            f'{{"timestamp": {t}, "input_length": 5, "output_length": {o}, "hash_ids": {h}}}\n'
            for t, o, h in rows
        )
    )
    requests, facts = requests_of("kind: trace, path: m.jsonl, format: mooncake", tmp_path)
    assert requests.request_id.tolist() == [1, 3]
    assert requests.prefix_hashes is not None
    assert [requests.prefix_hashes.of(row) for row in range(2)] == [(1, 2), (1, 2, 4)]
    assert facts.failed_rows is not None
    assert facts.failed_rows.request_id.tolist() == [2, 0]


def test_constant_arrivals_start_at_0_with_equal_gaps() -> None:
    requests, facts = requests_of(f"kind: constant, rate_per_s: 3, requests: 70000, {LENGTHS}")
    expected = [round(k / 3 * 1e9) for k in range(70_000)]
    assert requests.arrival_ns.tolist() == expected
    assert requests.request_id.tolist() == list(range(70_000))
    assert facts.ties == 0


def test_a_duration_is_half_open() -> None:
    requests, _ = requests_of(f"kind: constant, rate_per_s: 4, duration_s: 2, {LENGTHS}")
    assert (requests.arrival_ns / 1e9).tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]


@pytest.mark.parametrize(
    ("kind", "variation"),
    [("poisson", 1.0), ("gamma, burstiness: 3", 3.0), ("gamma, burstiness: 0.2", 0.2)],
)
def test_gaps_have_the_mean_and_the_variation_asked_for(kind: str, variation: float) -> None:
    requests, _ = requests_of(f"kind: {kind}, rate_per_s: 50, requests: 200000, {LENGTHS}")
    gaps = np.diff(requests.arrival_ns, prepend=0) / 1e9
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.02, rel=4 * variation / 200_000**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03)
    if variation == 1:  # Exponential, not only with its mean and variation.
        assert np.mean(gaps > 0.02) == pytest.approx(np.exp(-1), abs=0.005)
        assert np.mean(gaps > 0.06) == pytest.approx(np.exp(-3), abs=0.005)


@pytest.mark.parametrize("kind", ["poisson", "gamma, burstiness: 2", "constant"])
def test_a_longer_run_begins_with_the_shorter_one(kind: str) -> None:
    short, _ = requests_of(f"kind: {kind}, rate_per_s: 7, requests: 1000, {LENGTHS}")
    long, _ = requests_of(f"kind: {kind}, rate_per_s: 7, duration_s: 20000, {LENGTHS}")
    assert len(long) > 100_000
    assert columns(short) == columns(long.take(np.arange(1000)))


def test_twice_the_rate_is_the_same_pattern_in_half_the_time() -> None:
    slow, _ = requests_of(f"kind: poisson, rate_per_s: 2, requests: 1000, {LENGTHS}")
    fast, _ = requests_of(f"kind: poisson, rate_per_s: 4, requests: 1000, {LENGTHS}")
    assert np.abs(fast.arrival_ns * 2 - slow.arrival_ns).max() <= 2


def test_prompts_and_outputs_are_independent() -> None:
    requests, _ = requests_of(
        "kind: poisson, rate_per_s: 5, requests: 5000, prompt_tokens: {uniform: [1, 9]}, "
        "output_tokens: {uniform: [1, 9]}"
    )
    same = requests.prompt_tokens == requests.output_tokens
    assert same.mean() == pytest.approx(1 / 9, abs=0.02)


def test_arrivals_do_not_move_when_lengths_do() -> None:
    """Common random numbers: each purpose has a stream of its own."""
    first, _ = requests_of(f"kind: poisson, rate_per_s: 5, requests: 500, {LENGTHS}")
    second, _ = requests_of(
        "kind: poisson, rate_per_s: 5, requests: 500, prompt_tokens: {empirical: [3, 4]}, "
        "output_tokens: {lognormal: {median: 129, p90: 424}}, cancels: {share: 0.5, after_s: 3}"
    )
    assert first.arrival_ns.tolist() == second.arrival_ns.tolist()
    assert first.output_tokens.tolist() == second.output_tokens.tolist()
    assert first.prompt_tokens.tolist() != second.prompt_tokens.tolist()
    reseeded, _ = requests_of(f"kind: poisson, rate_per_s: 5, requests: 500, {LENGTHS}", seed=2)
    assert reseeded.arrival_ns.tolist() != first.arrival_ns.tolist()
    assert reseeded.output_tokens.tolist() != first.output_tokens.tolist()


DIGEST = """
import hashlib
from kvasir_scenario.load import load_text
from kvasir_scenario.workload import build_workload
requests, _ = build_workload(load_text({text!r}))
data = b"".join(
    column.tobytes()
    for column in (requests.arrival_ns, requests.prompt_tokens, requests.output_tokens, requests.cancel_ns)
)
print(hashlib.sha256(data).hexdigest())
"""


def test_every_process_draws_the_same_bytes() -> None:
    text = (
        f"{RING}workload: {{kind: gamma, burstiness: 2, rate_per_s: 5, requests: 5000, {LENGTHS}, "
        "cancels: {share: 0.5, after_s: {uniform: [1, 2]}}}\n"
    )
    requests, _ = build_workload(load_text(text))
    assert isinstance(requests, Requests)
    assert requests.cancel_ns is not None
    data = (requests.arrival_ns, requests.prompt_tokens, requests.output_tokens, requests.cancel_ns)
    here = hashlib.sha256(b"".join(column.tobytes() for column in data)).hexdigest()
    root = Path(__file__).parents[2]
    for seed in ("0", "12345"):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST.format(text=text)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here


def test_a_share_of_clients_goes_away() -> None:
    requests, _ = requests_of(
        f"kind: poisson, rate_per_s: 5, requests: 20000, {LENGTHS}, "
        "cancels: {share: 0.25, after_s: {uniform: [1, 3]}}"
    )
    assert requests.cancel_ns is not None
    leaves = requests.cancel_ns != NEVER_NS
    delays = (requests.cancel_ns - requests.arrival_ns)[leaves] / 1e9
    assert leaves.mean() == pytest.approx(0.25, abs=0.015)
    assert 1 <= delays.min() < 1.01
    assert 2.99 < delays.max() <= 3


@pytest.mark.parametrize(("share", "stays"), [("0", True), ("1", False)])
def test_none_or_all_of_the_clients_go_away(share: str, stays: bool) -> None:
    requests, _ = requests_of(
        f"kind: trace, requests: [[0, 1, 1], [2, 1, 1]], cancels: {{share: {share}, after_s: 0.5}}"
    )
    assert requests.cancel_ns is not None
    assert requests.cancel_ns.tolist() == (
        [NEVER_NS] * 2 if stays else [500_000_000, 2_500_000_000]
    )


@pytest.mark.parametrize("block", [1, 7, 10, 1 << 16])
def test_a_rate_may_follow_phases(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Constant arrivals: ten, a pause of 10 s, twenty at twice the rate; again and again."""
    monkeypatch.setattr(arrivals, "BLOCK", block)
    phases = "{phases: [{rate_per_s: 1, for_s: 10}, {rate_per_s: 0, for_s: 10}, {rate_per_s: 2, for_s: 10}]"
    requests, _ = requests_of(
        f"kind: constant, rate_per_s: {phases}, repeat: true}}, requests: 45, {LENGTHS}"
    )
    once = [*range(10), *(20 + k / 2 for k in range(20))]
    expected = [*once, *(30 + at for at in once[:15])]
    assert (requests.arrival_ns / 1e9).tolist() == pytest.approx(expected)
    ends, _ = requests_of(f"kind: constant, rate_per_s: {phases}}}, duration_s: 100, {LENGTHS}")
    assert len(ends) == 10 + 2 * 80  # The last phase goes on.


def test_phases_have_the_expected_number_of_arrivals() -> None:
    requests, _ = requests_of(
        "kind: poisson, rate_per_s: {phases: [{rate_per_s: 100, for_s: {uniform: [99, 101]}}, "
        f"{{rate_per_s: 10, for_s: 1000}}], repeat: true}}, duration_s: 2200, {LENGTHS}"
    )
    seconds = requests.arrival_ns / 1e9
    assert np.count_nonzero(seconds < 99) == pytest.approx(9900, abs=400)
    assert np.count_nonzero((seconds > 101) & (seconds < 1099)) == pytest.approx(9980, abs=400)
    assert np.count_nonzero((seconds > 1102) & (seconds < 1198)) == pytest.approx(9600, abs=400)


def test_load_that_never_comes_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"workload\.requests: only 10 of 11"):
        requests_of(
            "kind: constant, rate_per_s: {phases: [{rate_per_s: 1, for_s: 10}, {rate_per_s: 0, for_s: 1}]}, "
            f"requests: 11, {LENGTHS}"
        )


def test_too_many_requests_or_phases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScenarioError, match=r"workload\.requests: found 60000000"):
        requests_of(f"kind: poisson, rate_per_s: 1, requests: 60000000, {LENGTHS}")
    monkeypatch.setattr(arrivals, "REQUESTS_MAX", 100_000)
    with pytest.raises(ScenarioError, match=r"workload\.duration_s: more than 100000"):
        requests_of(f"kind: poisson, rate_per_s: 1000, duration_s: 1000, {LENGTHS}")
    monkeypatch.setattr(arrivals, "PHASES_MAX", 50)
    with pytest.raises(ScenarioError, match=r"rate_per_s\.phases: more than 50 phases"):
        requests_of(
            "kind: constant, rate_per_s: {phases: [{rate_per_s: 1, for_s: 0.1}], repeat: true}, "
            f"requests: 6, {LENGTHS}"
        )
