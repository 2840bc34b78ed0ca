"""Distributions of lengths and durations, and users in a closed loop."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_scenario.lengths import (
    Empirical,
    Fixed,
    Sampler,
    Uniform,
    draw_nanos,
    draw_tokens,
    lognormal,
    percentiles,
    sampler_of,
)
from kvasir_scenario.load import load_text
from kvasir_scenario.schema_workload import Distribution
from kvasir_scenario.streams import Purpose, stream
from kvasir_scenario.workload import ClosedLoop, build_workload

RING = """
model: {layers: 8, context: 8192}
ring: {stages: 2, row_width: 64, micro_batch_width: 8, window: 2, kv_tokens: 100000}
costs: {kind: fixed, pass_s: 1.0}
run: {horizon_s: 100}
"""


def tokens(sampler: Sampler, count: int = 200_000) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return draw_tokens(sampler, stream(7, Purpose.PROMPT_TOKENS), count).reshape(count)


def test_a_lognormal_meets_its_median_and_its_p90() -> None:
    drawn = tokens(lognormal(1000, 2700))
    assert np.percentile(drawn, [50, 90]) == pytest.approx([1000, 2700], rel=0.01)
    sigma = np.log(2.7) / 1.2815515655
    assert np.percentile(drawn, 99) == pytest.approx(1000 * np.exp(sigma * 2.326348), rel=0.03)
    assert drawn.mean() == pytest.approx(1000 * np.exp(sigma**2 / 2), rel=0.02)


def test_percentiles_are_met_and_nothing_is_above_the_highest() -> None:
    points = {50.0: 1020.0, 90.0: 2734.0, 99.0: 4142.0}
    drawn = tokens(percentiles(points))
    assert np.percentile(drawn, [50, 90, 99]) == pytest.approx([1020, 2734, 4142], rel=0.01)
    assert drawn.max() == 4142
    lower = np.percentile(drawn, 10)  # The line from 90 to 50 goes on below.
    assert lower == pytest.approx(1020**2 / 2734, rel=0.02)


def test_the_line_between_percentiles_is_straight_in_logs_over_the_normal_score() -> None:
    drawn = tokens(percentiles({50: 100, 97.72498680518208: 10_000}))
    assert np.percentile(drawn, 84.13447460685429) == pytest.approx(1000, rel=0.02)


def test_percentiles_0_and_100_are_bounds() -> None:
    drawn = tokens(percentiles({0: 60, 50: 100, 90: 150, 100: 151}))
    assert (drawn.min(), drawn.max()) == (60, 151)
    assert np.percentile(drawn, [50, 90]) == pytest.approx([100, 150], rel=0.01)
    alone = tokens(percentiles({0: 10, 100: 1000}))
    assert np.percentile(alone, 50) == pytest.approx(100, rel=0.02)


def test_one_percentile_is_a_constant() -> None:
    assert set(tokens(percentiles({50: 77}), 100).tolist()) == {77}


def test_a_percentile_of_0_makes_the_line_straight_without_logs() -> None:
    drawn = percentiles({50: 0, 90: 10}).draw(stream(1, Purpose.THINK_TIME), 100_000)
    assert drawn.min() == 0
    assert np.mean(drawn == 0) == pytest.approx(0.5, abs=0.01)
    assert np.percentile(drawn, 75) == pytest.approx(10 * 0.6744898 / 1.2815516, rel=0.03)


@given(
    st.dictionaries(
        st.floats(0, 100), st.floats(0, 1e8).map(lambda x: round(x, 3)), min_size=1, max_size=6
    )
)
def test_any_percentiles_give_numbers_within_them(points: Mapping[float, float]) -> None:
    ordered = dict(zip(sorted(points), sorted(points.values()), strict=True))
    drawn = percentiles(ordered).draw(stream(1, Purpose.PROMPT_TOKENS), 1000)
    assert np.isfinite(drawn).all()
    assert (drawn <= max(ordered.values()) * (1 + 1e-12)).all()
    assert (drawn >= 0).all()
    if 0 in ordered:
        assert (drawn >= ordered[0]).all()


def test_uniform_tokens_are_whole_and_include_both_ends() -> None:
    drawn = tokens(Uniform(3, 6, is_whole=True))
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [3, 4, 5, 6]
    assert counts / len(drawn) == pytest.approx([0.25] * 4, abs=0.01)


def test_uniform_durations_are_real() -> None:
    drawn = draw_nanos(Uniform(1.5, 2.5, is_whole=False), stream(1, Purpose.THINK_TIME), 100_000)
    assert len(np.unique(drawn)) > 99_000
    assert drawn.mean() == pytest.approx(2e9, rel=0.005)
    assert drawn.min() >= 1_500_000_000
    assert drawn.max() <= 2_500_000_000


def test_empirical_values_come_as_often_as_they_stand_there() -> None:
    values, counts = np.unique(tokens(Empirical((5.0, 9.0, 9.0, 9.0))), return_counts=True)
    assert values.tolist() == [5, 9]
    assert counts[1] / counts.sum() == pytest.approx(0.75, abs=0.01)


def test_a_length_is_at_least_one_token() -> None:
    assert set(tokens(Fixed(0), 10).tolist()) == {1}
    assert tokens(lognormal(0.01, 0.02), 10).tolist() == [1] * 10
    assert tokens(lognormal(1e8, 1e8), 10).tolist() == [10**8] * 10


def test_min_and_max_clip_what_is_drawn() -> None:
    spec = Distribution.model_validate({"uniform": [1, 100], "min": 20, "max": 30})
    drawn = tokens(sampler_of(spec, is_whole=True))
    assert (drawn.min(), drawn.max()) == (20, 30)
    floor = Distribution.model_validate({"lognormal": {"median": 10, "p90": 100}, "min": 8})
    assert tokens(sampler_of(floor, is_whole=True)).min() == 8


@pytest.mark.parametrize(
    "sampler",
    [
        lognormal(10, 30),
        percentiles({50: 10, 99: 90}),
        Uniform(1, 9, is_whole=True),
        Empirical((1.0, 2.0, 3.0)),
    ],
)
def test_draws_do_not_depend_on_how_many_are_made_at_a_time(sampler: Sampler) -> None:
    at_once = stream(3, Purpose.OUTPUT_TOKENS)
    bit_by_bit = stream(3, Purpose.OUTPUT_TOKENS)
    pieces = [draw_tokens(sampler, bit_by_bit, count) for count in (1, 10, 100, 889)]
    assert draw_tokens(sampler, at_once, 1000).tolist() == np.concatenate(pieces).tolist()


def test_every_purpose_has_its_own_stream() -> None:
    first = {purpose: float(stream(1, purpose).random()) for purpose in Purpose}
    assert len(set(first.values())) == len(Purpose)
    assert float(stream(2, Purpose.ARRIVALS).random()) != first[Purpose.ARRIVALS]
    assert float(stream(2**63 - 1, Purpose.ARRIVALS).random()) != first[Purpose.ARRIVALS]


def closed_loop(keys: str, seed: int = 1) -> ClosedLoop:
    text = f"{RING}workload: {{kind: closed, {keys}}}\n"
    loop, facts = build_workload(load_text(text, seed=seed))
    assert isinstance(loop, ClosedLoop)
    assert facts.trace_span_s is None
    return loop


def test_a_closed_loop_states_its_users_and_ends() -> None:
    loop = closed_loop(
        "users: 4, think_s: 0.25, requests: 9, duration_s: 50, deadline_s: 3, prompt_tokens: 7, output_tokens: 5"
    )
    assert (loop.users, loop.requests) == (4, 9)
    assert (loop.duration_ns, loop.deadline_ns) == (50 * 10**9, 3 * 10**9)
    assert loop.next_lengths() == (7, 5)
    assert loop.next_think_ns() == 250_000_000
    assert loop.next_cancel_ns() is None
    endless = closed_loop("users: 1, prompt_tokens: 7, output_tokens: 5")
    assert endless.requests is None
    assert endless.duration_ns is None
    assert endless.next_think_ns() == 0


def test_closed_loop_draws_repeat_and_do_not_disturb_each_other() -> None:
    """Thinking in between, or other thinking times, must not change the lengths."""
    lengths = "prompt_tokens: {uniform: [1, 999]}, output_tokens: {lognormal: {median: 9, p90: 90}}"
    plain = closed_loop(f"users: 2, {lengths}")
    thinking = closed_loop(f"users: 2, think_s: {{uniform: [1, 2]}}, {lengths}")
    first = [plain.next_lengths() for _ in range(3000)]
    second = []
    for _ in range(3000):
        second.append(thinking.next_lengths())
        assert 10**9 <= thinking.next_think_ns() <= 2 * 10**9
    assert first == second
    assert len(set(first)) > 2000
    alike = closed_loop(
        "users: 2, prompt_tokens: {uniform: [1, 9]}, output_tokens: {uniform: [1, 9]}"
    )
    assert sum(len(set(alike.next_lengths())) for _ in range(900)) == pytest.approx(1700, abs=60)
    other = closed_loop(f"users: 2, {lengths}", seed=2)
    assert [other.next_lengths() for _ in range(10)] != first[:10]


def test_closed_loop_prompts_are_cut_and_counted() -> None:
    loop = closed_loop(
        "users: 1, max_total_tokens: 10, prompt_tokens: 8, output_tokens: {empirical: [2, 3]}"
    )
    drawn = [loop.next_lengths() for _ in range(100)]
    assert set(drawn) == {(8, 2), (7, 3)}
    assert loop.clipped == drawn.count((7, 3))


def test_closed_loop_clients_may_go_away() -> None:
    loop = closed_loop(
        "users: 1, prompt_tokens: 8, output_tokens: 2, cancels: {share: 0.5, after_s: 2}"
    )
    delays = [loop.next_cancel_ns() for _ in range(4000)]
    assert set(delays) == {None, 2 * 10**9}
    assert delays.count(None) == pytest.approx(2000, abs=200)
