"""Profile costs: exact at measured points, linear between, marked outside; and the file's rules."""

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_core.plan import Plan
from kvasir_scenario.profile import (
    PROFILE_BYTES_MAX,
    Profile,
    read_profile,
    scaled,
    write_profile,
)
from kvasir_scenario.schema import Scenario
from kvasir_sim.costs import build_costs
from kvasir_sim.costs.measured_experts import Mixture
from kvasir_sim.costs.profile import ProfileCosts
from kvasir_sim.costs.routing import zipf_shares
from tests.sim.cost_inputs import micro_batch, scenario
from tests.sim.profile_inputs import PROFILE, decode_ns, prefill_ns, rows_ns


def plan(*depths: int) -> Plan:
    edges = [sum(depths[:k]) for k in range(len(depths) + 1)]
    return Plan(
        layers=tuple(itertools.pairwise(edges)),
        row_width=64,
        micro_batch_width=8,
        window=2,
        window_max=2,
        running_max=8,
        context=1024,
        kv_tokens=(1024,) * len(depths),
        hidden=576,
        element_bytes=4,
    )


def costs_of(*depths: int, seed: int | None = None) -> ProfileCosts:
    profile = Profile.model_validate_json(json.dumps(PROFILE))
    return ProfileCosts(plan(*depths), profile, "p.json", noise_seed=seed)


def head_ns(rows: int) -> int:
    return 1000 * rows


def tail_ns(outputs: int) -> int:
    return 400_000 + 100_000 * outputs


@pytest.mark.parametrize(("decodes", "context"), [(1, 16), (4, 128), (8, 1024)])
def test_decodes_alone_at_a_measured_point_are_what_was_measured(
    decodes: int, context: int
) -> None:
    holds = costs_of(10, 10, 10).holds(micro_batch((context,) * decodes))
    body = decode_ns(decodes, context)
    assert holds == [body + head_ns(decodes), body, body + tail_ns(decodes)]


@pytest.mark.parametrize(("rows", "start"), [(16, 0), (64, 512), (1, 64)])
def test_one_chunk_alone_at_a_measured_point_is_what_was_measured(rows: int, start: int) -> None:
    holds = costs_of(10, 10, 10).holds(micro_batch((), ((start, rows),)))
    body = prefill_ns(rows, start)
    assert holds == [body + head_ns(rows), body, body]  # No output row, so no tail work.


def test_between_points_the_hold_is_linear_in_each_direction() -> None:
    hold = costs_of(10, 10, 10).holds(micro_batch((72,) * 6))[1]
    corners = [decode_ns(d, c) for d in (4, 8) for c in (16, 128)]
    assert hold == sum(corners) / 4  # Six decodes at 72 stand in the middle of the cell.


def test_a_mixture_pays_for_its_rows_once_and_for_each_spans_attention() -> None:
    hold = costs_of(10, 10, 10).holds(micro_batch((128,) * 4, ((64, 16), (0, 1))))[1]
    decodes = decode_ns(4, 128) - rows_ns(4)
    chunks = prefill_ns(16, 64) - rows_ns(16) + prefill_ns(1, 0) - rows_ns(1)
    assert hold == rows_ns(21) + decodes + chunks


def test_layers_scale_all_but_the_pass() -> None:
    deep, shallow, _ = costs_of(22, 3, 5).holds(micro_batch((128,) * 4))
    body = decode_ns(4, 128)
    assert deep == 200_000 + (body - 200_000) * 22 // 10 + head_ns(4)
    assert shallow == 200_000 + (body - 200_000) * 3 // 10


def test_outside_the_measured_range_the_report_counts_it() -> None:
    costs = costs_of(10, 10, 10)
    costs.holds(micro_batch((128,) * 4))
    assert not any("extrapolated" in line for line in costs.describe())
    far = costs.holds(micro_batch((2048,) * 8))[1]
    assert far == decode_ns(8, 2048)  # The last slope goes on.
    near = costs.holds(micro_batch((2,) * 8))[1]
    assert near == decode_ns(8, 16)  # Below the first point its value stands.
    assert "extrapolated: 2 of 3 micro-batches" in costs.describe()[-1]


def test_the_prediction_is_the_longest_stage_and_counts_nothing() -> None:
    costs = costs_of(12, 18)
    batch = micro_batch((100,) * 3, ((64, 16),))
    assert costs.predict(3, 300, 16, 64) == max(costs_of(12, 18).holds(batch))
    costs.predict(8, 80_000, 0, 0)
    assert costs.extrapolated == costs.lookups == 0


def test_noise_is_seeded_and_as_wide_as_measured() -> None:
    batch = micro_batch((128,) * 4)
    middle = costs_of(10, 10, 10).holds(batch)[1]
    first, again, other = (costs_of(10, 10, 10, seed=seed) for seed in (1, 1, 2))
    drawn = [first.holds(batch)[1] for _ in range(2000)]
    assert drawn == [again.holds(batch)[1] for _ in range(2000)]
    assert drawn != [other.holds(batch)[1] for _ in range(2000)]
    mean = sum(drawn) / len(drawn)
    spread = (sum((value - mean) ** 2 for value in drawn) / len(drawn)) ** 0.5
    assert mean == pytest.approx(middle, rel=0.01)
    assert spread / mean == pytest.approx(0.1, rel=0.1)
    assert min(drawn) > 0


def scenario_with(
    path: Path, *, noise: bool = False, hidden: int = 576, dtype: str = "float32"
) -> tuple[Scenario, Plan]:
    return scenario(
        f"model: {{layers: 30, hidden: {hidden}, dtype: {dtype}}}\nring: {{stages: 2}}\n"
        f"costs: {{kind: profile, file: {path}, noise: {str(noise).lower()}}}\n"
    )


def test_a_scenario_takes_a_profile_and_its_bridge_time(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(Profile.model_validate_json(json.dumps(PROFILE)), path)
    costs = build_costs(*scenario_with(path))
    assert costs.provenance == "measured"
    assert costs.turnaround_ns == 42_000
    assert "SmolLM2-135M, float32, on 2 cores, 5 repeats, commit 0123abc" in costs.describe()[0]
    noisy = build_costs(*scenario_with(path, noise=True))
    batch = micro_batch((128,) * 4)
    assert noisy.holds(batch) != costs.holds(batch)
    assert "drawn from the measured spread" in noisy.describe()[2]


@pytest.mark.parametrize(
    ("hidden", "dtype", "what"),
    [
        (64, "float32", "model.hidden of the profile is 576, of the scenario 64"),
        (576, "bfloat16", "dtype of the profile is float32, of the scenario bfloat16"),
    ],
)
def test_a_profile_of_another_model_is_refused_with_both_values(
    tmp_path: Path, hidden: int, dtype: str, what: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PROFILE))
    with pytest.raises(ScenarioError, match=rf"case\.yaml:3: costs\.file: .*{what}"):
        build_costs(*scenario_with(path, hidden=hidden, dtype=dtype))


def _drop_point(profile: dict[str, Any]) -> None:
    del profile["body"]["decode"][4]


def _twice(profile: dict[str, Any]) -> None:
    profile["body"]["prefill"].append(profile["body"]["prefill"][0])


def _unsorted(profile: dict[str, Any]) -> None:
    profile["tail"].reverse()


def _other_version(profile: dict[str, Any]) -> None:
    profile["version"] = 2


def _negative(profile: dict[str, Any]) -> None:
    profile["body"]["rows"][1][1] = -5


def _floating(profile: dict[str, Any]) -> None:
    profile["lap"]["bridge_ns"] = 0.5


def _unknown(profile: dict[str, Any]) -> None:
    profile["tial"] = []


def _missing(profile: dict[str, Any]) -> None:
    del profile["machine"]


def _long_pass(profile: dict[str, Any]) -> None:
    profile["body"]["pass_ns"] = 10**9


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_drop_point, r"body: .*decode: \[4, 128\] is missing"),
        (_twice, r"body: .*prefill: 1 point\(s\) are there twice"),
        (_unsorted, "tail: size 1 follows 8"),
        (_other_version, r"version \(2\)"),
        (_negative, r"body\.rows\.1\.1 \(-5\)"),
        (_floating, r"lap\.bridge_ns \(0\.5\)"),
        (_unknown, "tial"),
        (_missing, "machine"),
        (_long_pass, "pass_ns is 1000000000, more than the shortest hold of 1010000"),
    ],
)
def test_a_broken_rule_names_its_place_in_the_file(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], what: str
) -> None:
    profile = copy.deepcopy(PROFILE)
    change(profile)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile))
    with pytest.raises(ScenarioError, match=rf"p\.json: not a version 1 profile: .*{what}"):
        read_profile(path)


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ScenarioError, match=r"p\.json: not a version 1 profile: the whole file"):
        read_profile(path)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with path.open("wb") as file:
        file.truncate(PROFILE_BYTES_MAX + 1)
    with pytest.raises(ScenarioError, match="16777217 bytes; a profile has at most 16777216"):
        read_profile(path)


def test_what_is_written_is_read_back_the_same(tmp_path: Path) -> None:
    profile = Profile.model_validate_json(json.dumps(PROFILE))
    path = tmp_path / "p.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert list(tmp_path.iterdir()) == [path]


def test_rows_that_choose_different_experts_cost_what_the_more_of_them_were_measured_to() -> None:
    """The table is 1000 ns an expert and 1 a row: only the experts beyond the first count."""
    profile = Profile.model_validate_json(json.dumps(PROFILE))
    shares = zipf_shares(8, 0.0)
    mixed = ProfileCosts(plan(10, 20), profile, "p.json", mixture=Mixture(1, shares))
    plain = ProfileCosts(plan(10, 20), profile, "p.json")
    batch = micro_batch((72,) * 6)
    touched = 8 * (1 - (7 / 8) ** 6)
    more = [a - b for a, b in zip(mixed.holds(batch), plain.holds(batch), strict=True)]
    assert more == pytest.approx([10_000 * (touched - 1), 20_000 * (touched - 1)], abs=1)
    one = micro_batch((72,))
    assert mixed.holds(one) == plain.holds(one)


def test_a_mixture_without_a_table_of_experts_is_told_to_be_too_fast() -> None:
    document = {**PROFILE, "experts": None}
    profile = Profile.model_validate_json(json.dumps(document))
    mixture = Mixture(1, zipf_shares(8, 0.0))
    costs = ProfileCosts(plan(10, 10), profile, "p.json", mixture=mixture)
    assert any("no table of experts" in line for line in costs.describe())


def test_a_machine_half_as_fast_holds_everything_twice_as_long() -> None:
    profile = Profile.model_validate_json(json.dumps(PROFILE))
    slower = scaled(profile, [(1, 2 * rows_ns(1)), (64, 2 * rows_ns(64))])
    before, after = (
        ProfileCosts(plan(10, 20), profile, "p"),
        ProfileCosts(plan(10, 20), slower, "p"),
    )
    for batch in (micro_batch((16, 128)), micro_batch((), ((0, 16),))):
        assert after.holds(batch) == pytest.approx([2 * hold for hold in before.holds(batch)])
    assert any("2.00 to 2.00" in line for line in after.describe())
    assert (slower.link, slower.lap) == (profile.link, profile.lap)
    assert read_again(slower) == slower


def test_a_speed_that_differs_by_size_scales_each_size_by_its_own() -> None:
    profile = Profile.model_validate_json(json.dumps(PROFILE))
    other = scaled(profile, [(8, rows_ns(8)), (64, 3 * rows_ns(64))])
    assert [ns for _, ns, _ in other.body.rows] == [rows_ns(1), rows_ns(8), 3 * rows_ns(64)]
    assert {(d, c): ns for d, c, ns, _ in other.body.decode}[8, 16] == decode_ns(8, 16)
    chunks = {(r, s): ns for r, s, ns, _ in other.body.prefill}
    assert chunks[64, 0] == 3 * prefill_ns(64, 0)
    assert chunks[16, 0] == pytest.approx(prefill_ns(16, 0) * (1 + 2 * 8 / 56), abs=1)
    assert other.rescaled == [(8, rows_ns(8), rows_ns(8)), (64, rows_ns(64), 3 * rows_ns(64))]


def test_what_neighbours_cost_now_takes_the_place_of_what_they_did() -> None:
    crowd = {"neighbours": 1, "rows": [[1, 100, 110]]}
    profile = Profile.model_validate_json(json.dumps(PROFILE | {"crowd": crowd}))
    now = [(1, rows_ns(1)), (64, rows_ns(64))]
    assert scaled(profile, now).crowd == profile.crowd
    other = scaled(profile, now, [(1, 100, 150), (64, 200, 220)]).crowd
    assert other is not None
    assert (other.neighbours, other.rows) == (1, [(1, 100, 150), (64, 200, 220)])


def read_again(profile: Profile) -> Profile:
    return Profile.model_validate_json(json.dumps(profile.model_dump()))
