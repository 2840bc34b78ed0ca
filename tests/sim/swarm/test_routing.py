"""Which experts rows choose: exactly top_k each, with the shares given, and as many distinct ones
as were counted in a real model.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from kvasir_core import ScenarioError
from kvasir_sim.swarm.routing import SAMPLES, Routing, inclusion, read_shares
from tests.sim.shipped import shared
from tests.sim.swarm.swarms import Run, scenario_of

COUNTED = {1: 2.0, 2: 3.5, 4: 5.3, 8: 7.0, 16: 7.8}  # Mixtral's distinct experts of 8 by batch.


def routing(shares: list[list[float]], top_k: int, seed: int = 1) -> Routing:
    return Routing(inclusion(np.array(shares), top_k), top_k, np.random.default_rng(seed))


def test_measured_shares_touch_as_many_experts_as_were_counted() -> None:
    path = shared("traces/moe_routing/mixtral_derived_stats.json")
    measured = Routing(inclusion(read_shares(path, 8), 2), 2, np.random.default_rng(1))
    for rows, counted in COUNTED.items():
        assert measured.distinct(rows) == pytest.approx(counted, abs=0.15)


def test_every_row_chooses_exactly_top_k_different_experts() -> None:
    one = routing([[0.9] + [0.01] * 9], 3)
    for _ in range(50):
        pairs = one.draw(0, 1)
        assert [count for _, count in pairs] == [1, 1, 1]
        assert [expert for expert, _ in pairs] == sorted({expert for expert, _ in pairs})
        assert pairs[0][0] == 0, "an expert whose probability is capped at 1 is always chosen"


def test_counts_follow_the_shares() -> None:
    shares = [0.4, 0.3, 0.2, 0.1]
    rows = 20_000
    counts = dict(routing([shares], 1).draw(0, rows))
    for expert, share in enumerate(shares):
        assert counts[expert] / rows == pytest.approx(share, abs=0.015)


def test_the_number_of_distinct_experts_is_the_expected_one_on_average() -> None:
    skewed = routing([[1 / (rank + 1) for rank in range(32)]], 4)
    drawn = [len(skewed._sample(0, 16)) for _ in range(400)]
    assert np.mean(drawn) == pytest.approx(skewed.distinct(16), rel=0.02)


def test_drawn_counts_are_used_again_and_the_same_for_the_same_seed() -> None:
    one, other = (routing([[1.0] * 16], 2, seed=7) for _ in range(2))
    draws = [one.draw(0, 5) for _ in range(3 * SAMPLES)]
    assert draws == [other.draw(0, 5) for _ in range(3 * SAMPLES)]
    assert len(set(draws)) <= SAMPLES


def test_rows_of_a_part_are_those_with_a_pair_in_it() -> None:
    one = routing([[1.0] * 16], 2)
    assert one.rows_of(10 * 2, 10) == 10, "all pairs are all rows"
    assert one.rows_of(1, 10) == 1
    assert 5 <= one.rows_of(10, 10) <= 10, "half the pairs are more than half the rows"


def test_capped_probabilities_still_sum_to_top_k() -> None:
    chances = inclusion(np.array([[100.0, 1.0, 1.0, 1.0, 0.0]]), 2)
    assert chances.sum() == pytest.approx(2)
    assert chances.max() <= 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "must be JSON"),
        ("{}", "must be JSON"),
        ('{"data": {"a": {"tokens": 0, "expert_share_by_layer": [[1, 1]]}}}', "must be JSON"),
        ('{"data": {"a": {"tokens": 5, "expert_share_by_layer": [[1, 1]]}}}', "shares of 2 exp"),
        (
            '{"data": {"a": {"tokens": 5, "expert_share_by_layer": [[0.5, -1, 1, 1]]}}}',
            "at least 0",
        ),
    ],
)
def test_a_wrong_file_of_shares_is_refused_with_what_is_wrong(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "shares.json"
    path.write_text(content)
    with pytest.raises(ScenarioError, match=message):
        read_shares(path, 4)


def test_a_scenario_reads_measured_shares(tmp_path: Path) -> None:
    shares = {"data": {"a": {"tokens": 5, "expert_share_by_layer": [[0.5] + [0.5 / 15] * 15]}}}
    (tmp_path / "s.json").write_text(json.dumps(shares))
    section = {"routing": {"kind": "measured", "file": "s.json"}}
    run = Run(scenario_of(section=section, base=tmp_path, run={"horizon_s": 20}))
    assert run.report.throughput.output_tokens_per_s
    assert run.swarm.routing.distinct(1) == pytest.approx(2)
    with pytest.raises(ScenarioError, match=r"experts\.routing\.file"):
        Run(scenario_of(section=section, base=tmp_path / "elsewhere"))
