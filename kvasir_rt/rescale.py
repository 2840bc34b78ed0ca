"""How fast the machine is now, against a profile that was measured here before.

A machine that others share, or that gets warm, does the same work at another speed an hour later.
Two seconds of a few sizes tell by how much, and `kvasir_scenario.profile.scaled` does the rest.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from kvasir_rt.neighbours import Neighbours
from kvasir_rt.stage_bench import ProfileOptions, StageBench, in_rounds
from kvasir_scenario.profile import Profile

SIZES_MAX = 4
ROUNDS = 9


def few_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """At most four, from the least to the greatest."""
    steps, last = min(SIZES_MAX, len(sizes)) - 1, len(sizes) - 1
    return tuple(sizes[place * last // steps] for place in range(steps + 1))


class SpeedProbe:
    """A body as the profile's, kept loaded so that it can be timed again and again.

    With the profile's neighbours, if it has any: what they cost drifts too.

    Args:
        model: The GGUF file the profile is of.
        profile: What to compare with.
        options: Device, dtype and threads as when it was measured; its sizes are not used.
    """

    def __init__(self, model: Path, profile: Profile, options: ProfileOptions) -> None:
        import torch

        torch.set_num_threads(options.threads)
        crowd = profile.crowd
        options = replace(
            options,
            neighbours=0 if crowd is None else crowd.neighbours,
            rows=few_sizes([count for count, _, _ in profile.body.rows]),
            decodes=(1,),
            contexts=(1,),
            chunks=(1,),
            behind=(0,),
        )
        layers = 1, 1 + profile.body.layers
        stage = StageBench(model, layers, options)
        self._timers = {count: stage.rows(count) for count in options.rows}
        self._neighbours = None if crowd is None else Neighbours(model, layers, options)

    def __enter__(self) -> Self:
        """Start the neighbours, at rest.

        Raises:
            PlanError: There are not so many cores, or one did not load.
        """
        if self._neighbours is not None:
            self._neighbours.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._neighbours is not None:
            self._neighbours.__exit__()

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]] | None]:
        """Rows and the median nanoseconds they take now; and alone and beside neighbours."""
        if self._neighbours is not None:
            crowd = self._neighbours.beside(self._timers, ROUNDS)
            return [(count, alone) for count, alone, _ in crowd], crowd
        points = in_rounds(self._timers, ROUNDS)
        return [(count, ns) for count, (ns, _) in points.items()], None
