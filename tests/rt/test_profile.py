"""`kvasir-rt profile` and `bench`: what they measure, not how fast this machine is."""

import json
import multiprocessing
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core.errors import PlanError, ScenarioError
from kvasir_core.microbatch import MicroBatch
from kvasir_rt import bench, profile
from kvasir_rt.expert_bench import choices, measure_experts
from kvasir_rt.hop_bench import hop_lines
from kvasir_rt.neighbours import Neighbours
from kvasir_rt.stage_bench import ProfileOptions, in_pairs, micro_batch, spread
from kvasir_scenario.profile import read_profile
from tests.rt.tiny_models import TinyModel, write_tiny_model
from tests.sim.profile_inputs import PROFILE


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("m") / "tiny.gguf", TinyModel(layers=6))


def test_a_profile_is_a_file_the_simulator_reads(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    arguments = ["--repeats", "2", "--rows", "1,4", "--decodes", "1,3", "--contexts", "8,16"]
    arguments += ["--chunks", "1,8", "--behind", "0,16", "--out", str(out)]
    result = CliRunner().invoke(profile.command, [str(tiny), *arguments])
    assert result.exception is None
    found = read_profile(out)
    assert (found.model, found.model_layers, found.hidden) == ("tiny", 6, 64)
    assert found.body.layers == 4
    assert [point[0] for point in found.body.rows] == [1, 4]
    assert [point[:2] for point in found.body.decode] == [(1, 8), (1, 16), (3, 8), (3, 16)]
    assert [point[:2] for point in found.body.prefill] == [(1, 0), (1, 16), (8, 0), (8, 16)]
    assert all(point[1] > 0 for point in found.body.rows)
    assert [point[0] for point in found.link] == [rows * 64 * 4 for rows in (1, 8, 32, 128)]
    assert 0 <= found.lap.bridge_ns < 10**9


def test_a_profile_is_scaled_to_the_speed_of_another_moment(tiny: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    arguments = ["--repeats", "2", "--rows", "1,2,4,8,16", "--decodes", "1", "--contexts", "8"]
    arguments += ["--chunks", "1", "--behind", "0", "--out", str(first)]
    assert CliRunner().invoke(profile.command, [str(tiny), *arguments]).exception is None
    arguments = ["--rescale", str(first), "--out", str(again), "--quiet"]
    assert CliRunner().invoke(profile.command, [str(tiny), *arguments]).exception is None
    before, after = read_profile(first), read_profile(again)
    assert before.rescaled is None
    assert after.rescaled is not None
    assert [count for count, _, _ in after.rescaled] == [1, 2, 4, 16]
    now = {count: ns for count, _, ns in after.rescaled}
    found = {count: ns for count, ns, _ in after.body.rows}
    assert all(found[count] == pytest.approx(ns, abs=1) for count, ns in now.items())
    assert after.link == before.link


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a second core")
def test_a_look_at_the_speed_is_one_at_what_neighbours_cost_too(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    known = {"machine": profile.machine_name(ProfileOptions()), "model": "tiny"}
    body = PROFILE["body"] | {"layers": 4}
    crowd = {"neighbours": 1, "rows": [[1, 5, 10], [64, 5, 50]]}
    path.write_text(json.dumps(PROFILE | known | {"body": body, "crowd": crowd}))
    cores = os.sched_getaffinity(0)
    found = profile.rescaled_now(path, tiny, "tiny", ProfileOptions())
    assert os.sched_getaffinity(0) == cores
    assert multiprocessing.active_children() == []
    assert found.crowd is not None
    assert found.rescaled is not None
    assert [(count, ns) for count, _, ns in found.rescaled] == [
        (count, alone) for count, alone, _ in found.crowd.rows
    ]
    assert all(beside >= alone for _, alone, beside in found.crowd.rows)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [("machine", "another", "machine"), ("model", "m", "'tiny'"), ("dtype", "bfloat16", "float32")],
)
def test_a_profile_of_something_else_is_not_scaled(
    tiny: Path, tmp_path: Path, key: str, value: str, word: str
) -> None:
    options = ProfileOptions()
    path = tmp_path / "profile.json"
    known = {"machine": profile.machine_name(options), "model": "tiny"}
    path.write_text(json.dumps(PROFILE | known | {key: value}))
    with pytest.raises(ScenarioError, match=word):
        profile.rescaled_now(path, tiny, "tiny", options)


def test_what_a_rest_costs_is_measured_too(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    arguments = ["--repeats", "2", "--rows", "1,4", "--decodes", "1", "--contexts", "8"]
    arguments += ["--chunks", "1", "--behind", "0", "--out", str(out)]
    assert CliRunner().invoke(profile.command, [str(tiny), *arguments]).exception is None
    rest = read_profile(out).rest
    assert rest is not None
    assert rest.ns == profile.REST_NS
    assert [count for count, _, _ in rest.rows] == [1, 4]
    assert all(rested >= usual > 0 for _, usual, rested in rest.rows)


def test_pairs_give_the_median_of_their_ratios_and_never_less_than_one() -> None:
    """The machine gets slower from pair to pair; what slows is twice as slow, or faster."""
    times = iter([7, 7, 10, 20, 40, 80, 30, 60])
    assert in_pairs({8: lambda: next(times)}, 3, lambda timer: timer()) == [(8, 30, 60)]
    times = iter([7, 7, 10, 9])
    assert in_pairs({8: lambda: next(times)}, 1, lambda timer: timer()) == [(8, 10, 10)]


@pytest.mark.parametrize("middle", [0, 1, 3, 12, 126, 509])
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_positions_are_spread_around_their_middle(middle: int, count: int) -> None:
    found = spread(middle, count)
    assert len(found) == count
    assert found == sorted(found)
    assert sum(found) / count == pytest.approx(middle, abs=1)
    assert found[0] >= middle - middle // 4 >= (middle > 0)


def test_a_context_that_the_model_lacks_is_refused_by_number(tiny: Path, tmp_path: Path) -> None:
    arguments = [str(tiny), "--contexts", "16,4096", "--out", str(tmp_path / "profile.json")]
    result = CliRunner().invoke(profile.command, arguments)
    assert isinstance(result.exception, PlanError)
    assert "512 tokens" in str(result.exception)
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a second core")
def test_what_a_busy_neighbour_costs_is_measured_beside_one(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    arguments = ["--repeats", "2", "--rows", "1,4", "--decodes", "1", "--contexts", "8"]
    arguments += ["--chunks", "1", "--behind", "0", "--neighbours", "1", "--out", str(out)]
    cores = os.sched_getaffinity(0)
    result = CliRunner().invoke(profile.command, [str(tiny), *arguments])
    assert result.exception is None
    assert os.sched_getaffinity(0) == cores
    assert multiprocessing.active_children() == []
    crowd = read_profile(out).crowd
    assert crowd is not None
    assert crowd.neighbours == 1
    assert [point[0] for point in crowd.rows] == [1, 4]
    assert all(beside >= alone > 0 for _, alone, beside in crowd.rows)


def test_experts_are_measured_by_how_many_are_touched_and_by_how_many_rows(tmp_path: Path) -> None:
    model = TinyModel(architecture="qwen3moe", layers=3, experts=6, experts_used=2)
    path = write_tiny_model(tmp_path / "moe.gguf", model)
    planes = measure_experts(path, ProfileOptions(repeats=2, rows=(1, 8)))
    assert planes is not None
    assert [plane[:2] for plane in planes] == [(d, r) for d in (2, 4, 6) for r in (1, 8)]
    assert all(plane[2] > 0 for plane in planes)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 4))
def test_every_expert_that_is_to_be_touched_is_touched(distinct: int, rows: int, used: int) -> None:
    distinct = max(distinct, used)
    chosen = choices(distinct, rows, used)
    assert {expert for row in chosen for expert in row} == set(range(distinct))
    assert all(len(set(row)) == len(row) >= used for row in chosen)


def test_a_dense_model_has_no_experts_to_measure(tiny: Path) -> None:
    assert measure_experts(tiny, ProfileOptions(repeats=2, rows=(1, 8))) is None


def test_more_neighbours_than_cores_are_refused(tiny: Path) -> None:
    options = ProfileOptions(neighbours=1024)
    with pytest.raises(PlanError, match="needs 1025 cores"), Neighbours(tiny, (1, 3), options):
        pass


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--rows", "4"], "at least two"),
        (["--rows", "4,2"], "ascend"),
        (["--chunks", "0,2"], "at least 1"),
        (["--contexts", "a"], "list of numbers"),
        (["--rows", "1," + "9" * 5000], "list of numbers"),
    ],
)
def test_wrong_sizes_are_told(tiny: Path, arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(profile.command, [str(tiny), *arguments])
    assert result.exit_code == 2
    assert word in result.output


@pytest.mark.parametrize("command", [profile.command, bench.command])
@pytest.mark.parametrize(("device", "why"), [("cuda:99", "is not there"), ("gpu7", "no device")])
def test_a_device_that_is_not_here_is_told_before_anything_is_loaded(
    tiny: Path, command: click.Command, device: str, why: str
) -> None:
    result = CliRunner().invoke(command, [str(tiny), "--device", device])
    assert isinstance(result.exception, PlanError)
    assert why in str(result.exception)
    assert not result.output


def test_more_neighbours_than_cores_are_refused_before_anything_is_measured(tiny: Path) -> None:
    result = CliRunner().invoke(profile.command, [str(tiny), "--neighbours", "1024"])
    assert isinstance(result.exception, PlanError)
    assert not result.output


def test_where_the_profile_cannot_be_written_is_told_before_anything_is_measured(
    tiny: Path, tmp_path: Path
) -> None:
    other = tmp_path / "package.json"
    other.write_text("{}")
    for out, why in (
        (tmp_path / "no" / "p.json", "no directory"),
        (tmp_path, "a directory"),
        (other, "did not write it"),
        (tmp_path / "p.txt", "must end in .json"),
    ):
        result = CliRunner().invoke(profile.command, [str(tiny), "--out", str(out)])
        assert isinstance(result.exception, ScenarioError)
        assert why in str(result.exception)
        assert not result.output
    assert other.read_text() == "{}"
    assert list(tmp_path.iterdir()) == [other]


def test_a_model_without_a_middle_stage_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TinyModel(layers=2))
    with pytest.raises(PlanError, match="2 layers"):
        profile.measure_profile(path, "m", ProfileOptions(), lambda _: None)


def test_hops_are_told_from_holds_and_waits() -> None:
    def lap(batch: MicroBatch, start: int, hop: int) -> tuple[MicroBatch, list[int]]:
        sent = start + 100
        return batch, [start, start, sent, sent, sent + hop, sent + hop, sent + 300, sent + 300]

    prompt, decode = micro_batch([], (0, 0, 4)), micro_batch([(0, 4)])
    laps = [lap(prompt, 0, 20), lap(decode, 450, 10), lap(prompt, 9000, 30), lap(decode, 9450, 10)]
    lines, bridge = hop_lines(laps, row_bytes=2)
    assert lines == [(2, 10, 0), (8, 25, 5)]
    assert bridge.bridge_ns == 40  # 50 from the tail to the head, 10 of them the hop back.


def test_bench_compares_the_same_work_both_ways(tiny: Path) -> None:
    arguments = ["--requests", "4", "--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1"]
    result = CliRunner().invoke(bench.command, [str(tiny), *arguments, "--no-pin", "--json"])
    assert result.exception is None
    found = json.loads(result.stdout)
    assert found["same_tokens"]
    assert found["layers"] == [3, 3]
    for way in ("drained", "in_flight"):
        assert found[way]["tokens_per_s"] > 0
        assert len(found[way]["stage_busy_share"]) == 2
