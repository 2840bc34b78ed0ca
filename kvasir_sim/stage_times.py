"""What `window: auto` is computed from: holds and links, sampled from returned laps."""

from statistics import pstdev

from kvasir_core import Nanos, Plan, StageTimesMeasured

SAMPLES = 16  # Laps per report: enough for a mean, few enough to settle within a few rounds.
SAMPLE_EVERY = 8  # After the first reports a sample of the laps is enough.
STAMPS = 4


class StageTimeSampler:
    """Collects stamps of laps and reports their means every SAMPLES sampled laps."""

    def __init__(self, plan: Plan, turnaround_ns: int) -> None:
        self._stages = plan.stages
        self._turnaround = turnaround_ns
        self._laps = 0
        self._every = 1
        self._taken: list[tuple[list[int], int]] = []

    def lap(self, stamps: list[int], returned_ns: int) -> StageTimesMeasured | None:
        """Take a returned lap in; a report is due every SAMPLES sampled laps."""
        self._laps += 1
        if self._laps % self._every:
            return None
        self._taken.append((stamps, returned_ns))
        if len(self._taken) < SAMPLES:
            return None
        taken, self._taken = self._taken, []
        self._every = SAMPLE_EVERY
        count, stages = len(taken), self._stages
        holds = [
            sum(stamps[STAMPS * k + 2] - stamps[STAMPS * k + 1] for stamps, _ in taken) // count
            for k in range(stages)
        ]
        links = [
            sum(stamps[STAMPS * (k + 1)] - stamps[STAMPS * k + 3] for stamps, _ in taken) // count
            for k in range(stages - 1)
        ]
        back = sum(returned - stamps[-1] for stamps, returned in taken) // count
        links.append(max(0, back - self._turnaround))
        laps = [
            sum(stamps[STAMPS * k + 2] - stamps[STAMPS * k + 1] for k in range(stages))
            for stamps, _ in taken
        ]
        return StageTimesMeasured(
            tuple(map(Nanos, holds)),
            tuple(map(Nanos, links)),
            Nanos(self._turnaround),
            Nanos(round(pstdev(laps))),
        )
