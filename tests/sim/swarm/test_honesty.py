"""Each kind of lie looks to the coordinator as it would on real tensors."""

import math
from random import Random
from typing import Any

import pytest

from kvasir_core.swarm import SwarmPolicy
from kvasir_core.swarm.verification import is_right, is_sound
from kvasir_scenario.schema_experts import WorkerClass
from kvasir_scenario.schema_ring import Link
from kvasir_sim.swarm.honesty import Conscience

POLICY = SwarmPolicy()


def conscience(honesty: Any, **more: Any) -> Conscience:
    kind = WorkerClass(
        name="w", count=1, per_expert_s=1e-3, link=Link(), download_bytes_per_s=1e8,
        honesty=honesty, **more,
    )  # fmt: skip
    return Conscience(kind, Random(5))


def test_an_honest_answer_is_sound_and_right() -> None:
    honest = conscience("honest")
    for rows in (1, 2, 500):
        answer = honest.answer(rows)
        assert is_sound(is_shaped=True, norm_ratio=answer.norm_ratio, policy=POLICY)
        assert is_right(answer.error, POLICY)


@pytest.mark.parametrize(
    ("honesty", "error"),
    [
        ("zeros", 1.0), ("swapped_rows", 1.4), ("stale", 1.4), ("scaled", 0.02), ("noise", 0.02),
    ],
)  # fmt: skip
def test_a_lie_has_the_error_that_its_kind_has(honesty: str, error: float) -> None:
    liar = conscience(honesty)
    answers = [liar.answer(4) for _ in range(50)]
    assert all(not is_right(answer.error, POLICY) for answer in answers)
    assert sum(a.error for a in answers) / 50 == pytest.approx(error, rel=0.35)
    assert all(is_sound(is_shaped=True, norm_ratio=a.norm_ratio, policy=POLICY) for a in answers), (
        "only a recomputation finds it"
    )


def test_not_a_number_is_never_sound() -> None:
    answer = conscience("nan").answer(4)
    assert math.isnan(answer.norm_ratio)
    assert not is_sound(is_shaped=True, norm_ratio=answer.norm_ratio, policy=POLICY)
    assert not is_right(answer.error, POLICY)


def test_a_turncoat_is_honest_exactly_so_long() -> None:
    liar = conscience("turncoat", honest_answers=7)
    rights = [is_right(liar.answer(4).error, POLICY) for _ in range(20)]
    assert rights == [True] * 7 + [False] * 13


def test_one_that_sometimes_errs_does_so_in_its_share() -> None:
    liar = conscience("sometimes", wrong_share=0.05)
    wrong = sum(not is_right(liar.answer(4).error, POLICY) for _ in range(4000))
    assert 150 <= wrong <= 250


def test_rows_cannot_be_swapped_in_an_answer_of_one() -> None:
    assert is_right(conscience("swapped_rows").answer(1).error, POLICY)
