"""Which answers are recomputed, and what counts as right.

The numbers are compared where they are; the rules stand here. A NaN must fail every one of them,
so each is written `isfinite(x) and x <= limit`: `not x > limit` would let a NaN pass. The error is
the relative L2 error of the worst row; cosine similarity misses a scaling by 1.02.
"""

from math import isfinite

from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.words import Chance


def is_sound(*, is_shaped: bool, norm_ratio: float | None, policy: SwarmPolicy) -> bool:
    """Checked on every answer: shape, finiteness, norm.

    `norm_ratio` is the largest output row norm over the largest input row norm: one NaN or
    infinity anywhere makes it not finite. None stands for "not finite" in an event log.
    """
    return is_shaped and norm_ratio is not None and _within(norm_ratio, policy.norm_ratio_max)


def is_right(error: float | None, policy: SwarmPolicy) -> bool:
    """Whether a recomputed answer agrees; None stands for "not finite"."""
    return error is not None and _within(error, policy.tolerance)


def _within(value: float, limit: float) -> bool:
    return isfinite(value) and value <= limit


def check_probability(answers: int, policy: SwarmPolicy) -> float:
    """How likely answer number `answers` (from 1) of a worker is recomputed."""
    if answers <= policy.answers_checked_first:
        return 1.0
    return max(policy.check_share, 1 / answers)


def is_checked(answers: int, chance: Chance, policy: SwarmPolicy) -> bool:
    """Decided after the answer arrived, so that no worker can know."""
    probability = check_probability(answers, policy)
    return probability >= 1 or chance.random() < probability
