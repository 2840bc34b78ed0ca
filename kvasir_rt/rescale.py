"""How fast the machine is now, against a profile that was measured here before.

A machine that others share, or that gets warm, does the same work at another speed an hour later.
Two seconds of a few sizes tell by how much, and `kvasir_scenario.profile.scaled` does the rest.
"""

from dataclasses import replace
from pathlib import Path

from kvasir_rt.stage_bench import ProfileOptions, StageBench, in_rounds
from kvasir_scenario.profile import Profile

SIZES_MAX = 4
ROUNDS = 9


class SpeedProbe:
    """A body as the profile's, kept loaded so that it can be timed again and again.

    Args:
        model: The GGUF file the profile is of.
        profile: What to compare with.
        options: Device, dtype and threads as when it was measured; its sizes are not used.
    """

    def __init__(self, model: Path, profile: Profile, options: ProfileOptions) -> None:
        import torch

        torch.set_num_threads(options.threads)
        sizes = [count for count, _, _ in profile.body.rows]
        steps = min(SIZES_MAX, len(sizes)) - 1
        self._sizes = sorted(
            {sizes[place * (len(sizes) - 1) // steps] for place in range(steps + 1)}
        )
        options = replace(
            options, rows=tuple(self._sizes), decodes=(1,), contexts=(1,), chunks=(1,), behind=(0,)
        )
        stage = StageBench(model, (1, 1 + profile.body.layers), options)
        self._timers = {count: stage.rows(count) for count in self._sizes}

    def take(self) -> list[tuple[int, int]]:
        """Rows and the median nanoseconds they take now."""
        points = in_rounds(self._timers, ROUNDS)
        return [(count, points[count][0]) for count in self._sizes]
