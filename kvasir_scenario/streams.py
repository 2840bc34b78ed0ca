"""Named streams of chance: one seed, and a stream of its own for each purpose.

What one purpose draws never moves another: with other lengths the arrivals stay the same, so that
two scenarios differ by what was changed and not by luck (common random numbers).
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """Each number is a stream's key for good: a new one moves every result of old seeds."""

    ARRIVALS = 0
    PROMPT_TOKENS = 1
    OUTPUT_TOKENS = 2
    THINK_TIME = 3
    CANCELS = 4
    CANCEL_DELAYS = 5
    RATE_PHASES = 6
    FAULTS = 7
    WORKERS = 8


def stream(seed: int, purpose: Purpose) -> np.random.Generator:
    """The purpose's generator (PCG64), the same in every process, for a seed from 0."""
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(int(purpose),))
    return np.random.Generator(np.random.PCG64(sequence))
