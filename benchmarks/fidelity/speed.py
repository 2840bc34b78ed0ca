"""How fast a real ring is now, against what a profile says of it.

A machine that others share does the same work at another speed minutes later. A look runs one ring
that is no scenario of the suite, for real, and simulates the same with the profile as it was
measured: how much longer the real holds are, without and with prompt chunks in them, is the speed
of the moment. Stages of a ring are what is to be foretold, so stages of a ring are what is looked
at: a lone process that computes one size again and again, with nobody beside it, was found to be
faster than a ring by more than the bars allow.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.fidelity.runs import measure, predict
from kvasir_scenario.profile import read_profile, scaled, write_profile

REFERENCE = Path(__file__).parent / "reference" / "reference.yaml"
NARROW, WIDE = "narrow", "wide"  # Decodes alone; with a prompt chunk.


@dataclass(frozen=True, slots=True)
class Holds:
    """Of one kind of micro-batch, of all stages, over one run or several."""

    rows: float  # In the mean.
    seconds: float  # In the mean.


def holds_of(*directories: Path) -> dict[str, Holds]:
    """What the tables of these runs say, by kind."""
    tables = []
    for directory in directories:
        stages = pd.read_parquet(directory / "stages.parquet")
        sizes = pd.read_parquet(directory / "micro_batches.parquet")
        tables.append(stages.merge(sizes, on="micro_batch_id"))
    table = pd.concat(tables)
    table["seconds"] = table["end_s"] - table["start_s"]
    kinds = np.where(table["prefill_rows"] > 0, WIDE, NARROW)
    means = table.groupby(kinds)[["rows", "seconds"]].mean()
    return {
        str(kind): Holds(float(at["rows"]), float(at["seconds"])) for kind, at in means.iterrows()
    }


class Speed:
    """Looks at the machine's speed.

    Args:
        profile: The file that the suite has measured.
        out: A folder for the runs.
        reference: The scenario of a look.
    """

    def __init__(self, profile: Path, out: Path, reference: Path = REFERENCE) -> None:
        self._profile = read_profile(profile)
        self._reference = reference
        self._out = out / "speed"
        self._out.mkdir(parents=True, exist_ok=True)
        predict(reference, profile, self._out / "simulated")
        self._foretold = holds_of(self._out / "simulated")
        self._looks: list[Path] = []
        self._count = 0

    def look(self) -> None:
        """Run the reference once more."""
        self._count += 1
        directory = self._out / f"look_{self._count}"
        measure(self._reference, directory)
        self._looks.append(directory)

    def scaled_to(self, path: Path) -> Path:
        """The profile at the speed of the looks since the last call, as a file.

        The last of them counts for the next call too.
        """
        found = holds_of(*self._looks)
        sizes, times, _ = zip(*self._profile.body.rows, strict=True)
        now = []
        for kind in (NARROW, WIDE):
            slower = found[kind].seconds / self._foretold[kind].seconds
            rows = round(self._foretold[kind].rows)
            now.append((rows, round(float(np.interp(rows, sizes, times)) * slower)))
        write_profile(scaled(self._profile, now), path)
        self._looks = self._looks[-1:]
        return path
