"""Samples of a unit cube that cover it evenly: Sobol' sequences and Latin hypercubes (scipy)."""

from typing import Literal

from kvasir_core.errors import ScenarioError

Method = Literal["sobol", "lhs"]


def draw_samples(method: Method, count: int, dimensions: int, seed: int) -> list[tuple[float, ...]]:
    """`count` points in [0, 1) of each dimension, the same for the same seed.

    Sobol' points are scrambled (Owen); they balance best when their number is a power of 2.

    Raises:
        ScenarioError: scipy is not installed.
    """
    try:
        from scipy.stats import qmc
    except ImportError:
        raise ScenarioError(
            f"--sample {method} needs scipy, which is not installed: pip install 'kvasir[sweep]'"
        ) from None
    if method == "sobol":
        # All of a power of 2 and then the first of them: scipy warns of anything else.
        drawn = qmc.Sobol(dimensions, rng=seed).random_base2((count - 1).bit_length())[:count]
    else:
        drawn = qmc.LatinHypercube(dimensions, rng=seed).random(count)
    return [tuple(float(share) for share in row) for row in drawn]
