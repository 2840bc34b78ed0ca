"""The points of a sweep: each a scenario of its own, known by the hash of all that it says.

The hash covers the resolved scenario (defaults filled in, seed included), the contents of the
files it reads, and the version of Kvasir. So a point keeps its key however it was asked for, and
loses it when anything that decides its results has changed.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir_core.errors import KvasirError, ScenarioError
from kvasir_scenario.complaints import found
from kvasir_scenario.data_paths import expand_path
from kvasir_scenario.load import load_text, read_text
from kvasir_scenario.variants import variant_of
from kvasir_sim.planner import auto_layers
from kvasir_sim.sweep.axes import POINTS_MAX, Axis, Range

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario

FORMAT = 1  # Rises when a point's figures change their meaning.
KEY_CHARACTERS = 32  # 128 bits.
UNHASHED = frozenset({"name", "question", "what_if", "runtime"})  # They decide no result.
PRICE = {"price_per_hour": True}
PRICES: dict[str, Any] = {
    "devices": {"__all__": PRICE},
    "experts": {"workers": {"__all__": PRICE}},
}
"""Nor do these."""
SEED_MAX = 2**63 - 1

Changes = tuple[tuple[str, Any], ...]
"""Keys of the scenario (dotted) and what each becomes, in this order."""


@dataclass(frozen=True, slots=True)
class Source:
    """A base scenario as text: what a worker needs to make any point of it.

    Attributes:
        text: The file's content.
        label: Its name in messages, without folders: they would tell machines apart.
        base: Absolute directory that relative paths resolve against.
        settings: From `--set`.
    """

    text: str
    label: str
    base: str
    settings: tuple[str, ...] = ()

    @classmethod
    def of_file(cls, path: Path, settings: Sequence[str] = ()) -> "Source":
        """Read a scenario file.

        Raises:
            ScenarioError: It cannot be read.
        """
        return cls(read_text(path), path.name, str(path.parent.absolute()), tuple(settings))

    def load(self) -> "Scenario":
        """The base scenario, checked.

        Raises:
            ScenarioError: It is wrong.
        """
        return load_text(
            self.text, label=self.label, base=Path(self.base), overrides=self.settings,
            planner=auto_layers,
        )  # fmt: skip


def point_scenario(base: "Scenario", changes: Changes) -> "Scenario":
    """The base with changes, without its variants; complaints name the key that was changed.

    Raises:
        ScenarioError: It is no valid scenario.
    """
    return variant_of(base, [(key, value, _place(key, value)) for key, value in changes])


def _place(key: str, value: Any) -> str:
    return f"{key} = {found(value)}"


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep.

    Attributes:
        key: Hash of what decides its results.
        axes: The axes' values.
        seed: `run.seed`.
        error: Why it is no valid scenario, if it is none.
    """

    key: str
    axes: tuple[Any, ...]
    seed: int
    error: str | None = None


class Sweep:
    """Every combination of grid values, samples and seeds, in this order; doubles are dropped."""

    def __init__(
        self,
        source: Source,
        axes: Sequence[Axis],
        ranges: Sequence[Range] = (),
        samples: Sequence[Sequence[float]] = (),
        seeds: int = 1,
    ) -> None:
        """Check the axes against the scenario.

        Raises:
            ScenarioError: The scenario is wrong, there are too many points, or an axis fits none.
        """
        self.source = source
        self.base = source.load()
        self.keys = (*(axis.key for axis in axes), *(span.key for span in ranges))
        drawn = [
            tuple(span.at(share) for span, share in zip(ranges, sample, strict=True))
            for sample in (samples if ranges else [()])
        ]
        self._axes, self._drawn, self._seeds = axes, drawn, seeds
        count = seeds * len(drawn)
        for axis in axes:
            count *= len(axis.values)
        if count > POINTS_MAX:
            raise ScenarioError(
                f"the sweep has {count} points ({seeds} seeds); at most {POINTS_MAX}: give fewer "
                "values or seeds, or sample with --sample"
            )
        if self.base.run.seed + seeds - 1 > SEED_MAX:
            raise ScenarioError(f"run.seed {self.base.run.seed} and {seeds} seeds pass {SEED_MAX}")
        self._digests: dict[Path, str] = {}
        self._check_axes()

    def columns(self) -> list[tuple[str, list[Any]]]:
        """Each axis and all its values."""
        given = [list(axis.values) for axis in self._axes]
        given += [list(values) for values in zip(*self._drawn, strict=True)]
        return list(zip(self.keys, given, strict=True))

    def changes(self, point: Point) -> Changes:
        """What makes the point of the base."""
        return (*zip(self.keys, point.axes, strict=True), ("run.seed", point.seed))

    def points(self) -> Iterator[Point]:
        """In order; the same run twice (samples of whole numbers can meet) comes once."""
        known: set[str] = set()
        for values in itertools.product(*(axis.values for axis in self._axes), self._drawn):
            axes = (*values[:-1], *values[-1])
            for seed in range(self.base.run.seed, self.base.run.seed + self._seeds):
                point = self._point(axes, seed)
                if point.key not in known:
                    known.add(point.key)
                    yield point

    def _point(self, axes: tuple[Any, ...], seed: int) -> Point:
        changes = (*zip(self.keys, axes, strict=True), ("run.seed", seed))
        try:
            scenario = point_scenario(self.base, changes)
        except KvasirError as error:
            said = [hash_of(self.base, self._digests), changes]
            return Point(_digest(json.dumps(said)), axes, seed, str(error))
        return Point(hash_of(scenario, self._digests), axes, seed)

    def _check_axes(self) -> None:
        """Each axis has a value that is right by itself, or with the others' first values."""
        columns = self.columns()
        firsts = {key: values[0] for key, values in columns}
        for key, values in columns:
            refused: ScenarioError | None = None
            for value in values:
                alone, together = ((key, value),), tuple({**firsts, key: value}.items())
                for changes in (alone, together):
                    try:
                        point_scenario(self.base, changes)
                    except ScenarioError as error:
                        refused = refused or error
                    else:
                        break
                else:
                    continue
                break
            else:
                assert refused is not None, "an axis has values"
                raise ScenarioError(f"--grid or --range {key}: no value of it fits: {refused}")


def hash_of(scenario: "Scenario", digests: dict[Path, str]) -> str:
    """The key of a run; `digests` remembers files that were read."""
    files = {text: _file_digest(path, digests) for text, path in _files(scenario)}
    said = scenario.model_dump_json(exclude={**dict.fromkeys(UNHASHED, True), **PRICES})
    return _digest(json.dumps([FORMAT, version("kvasir"), files, said], sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARACTERS]


def _files(scenario: "Scenario") -> Iterator[tuple[str, Path]]:
    """Files that a simulation of the scenario reads."""
    for text in (getattr(scenario.workload, "path", None), getattr(scenario.costs, "file", None)):
        if text is not None:
            try:
                yield text, expand_path(text, scenario.base)
            except ScenarioError:
                continue  # The run will say so.


def _file_digest(path: Path, digests: dict[Path, str]) -> str:
    if path not in digests:
        try:
            with path.open("rb") as file:
                digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return "missing"  # The run will say so; it may be there the next time.
    return digests[path]
