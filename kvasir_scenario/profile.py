"""The profile file: what `kvasir-rt profile` measures and `costs: {kind: profile}` reads.

One JSON object, version 1. Times are integer nanoseconds; every measured point ends with its
spread, the standard deviation over the repeats. A *body* is a stage that is neither head nor
tail, of `body.layers` layers; its holds are measured whole:

    rows     [n, ns, spread]              n rows whose attention is next to nothing (n spans of
                                          one row at position 0)
    decode   [decodes, context, ns, spread]   decodes alone, each reading `context` positions
    prefill  [rows, start, ns, spread]    one prompt chunk alone, `start` positions behind it

`decode` and `prefill` are full grids: every value of the first column with every one of the
second. `body.pass_ns` is what a pass costs whatever its layers, from bodies of two depths.

    head     [n, ns, spread]              what a head takes more than a body, by rows
    tail     [outputs, ns, spread]        what a tail takes more than a body, by output rows
    link     [bytes, ns, spread]          one hop, by bytes of the message
    lap      {bridge_ns, spread_ns}       from a tail result to the next launch
    experts  [distinct, rows, ns, spread] routed experts of one layer (a full grid; optional)
    crowd    {neighbours, rows}           optional: a body alone and beside so many other stages
                                          that compute on the same machine, [n, alone, beside]
    rest     {ns, rows}               optional: a body at once after its last pass, and after
                                          a rest of so many ns, [n, at once, rested]
    rescaled [n, then, now]               optional: the machine was faster or slower by a later
                                          measurement of `rows`, and all holds are scaled by it

`machine`, `model`, `dtype` and `commit` say what was measured: a profile is worth nothing for
another machine. The file is compared with the scenario where both name the number of layers,
hidden width and dtype.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvasir_core.errors import ScenarioError
from kvasir_scenario.run_dir import write_whole

PROFILE_BYTES_MAX = 16 << 20  # A dense profile is 50 kB.
POINTS_MAX = 20_000
NS_MAX = 10**15

_Size = Annotated[int, Field(ge=1, le=1 << 40)]
_SizeOrZero = Annotated[int, Field(ge=0, le=1 << 40)]
_Ns = Annotated[int, Field(ge=0, le=NS_MAX)]
_PositiveNs = Annotated[int, Field(ge=1, le=NS_MAX)]
_Word = Annotated[str, Field(min_length=1, max_length=512)]

Line = tuple[_SizeOrZero, _Ns, _Ns]
Plane = tuple[_Size, _SizeOrZero, _Ns, _Ns]
Lines = Annotated[list[Line], Field(min_length=2, max_length=POINTS_MAX)]
Pairs = Annotated[
    list[tuple[_Size, _PositiveNs, _PositiveNs]], Field(min_length=1, max_length=POINTS_MAX)
]
Planes = Annotated[list[Plane], Field(min_length=1, max_length=POINTS_MAX)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Body(_Part):
    """Holds of a stage that is neither head nor tail."""

    layers: Annotated[int, Field(ge=1, le=10_000)]
    pass_ns: _Ns
    rows: Lines
    decode: Planes
    prefill: Planes

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_line("rows", self.rows)
        check_grid("decode", self.decode)
        check_grid("prefill", self.prefill)
        shortest = shortest_hold(self.rows, self.decode, self.prefill)
        if self.pass_ns > shortest:
            raise ValueError(
                f"pass_ns is {self.pass_ns}, more than the shortest hold of {shortest}"
            )
        return self


class Lap(_Part):
    """The head's own work per lap."""

    bridge_ns: _Ns
    spread_ns: _Ns = 0


class Crowd(_Part):
    """What stages of one machine cost each other; all else in the file was measured alone."""

    neighbours: Annotated[int, Field(ge=1, le=1024)]
    rows: Pairs


class Rest(_Part):
    """A core that rested is slower at first; all else in the file was measured without a rest."""

    ns: _PositiveNs
    rows: Pairs


class Profile(_Part):
    """A whole file; see the module."""

    format: Literal["kvasir-profile"] = "kvasir-profile"
    version: Literal[1] = 1
    machine: _Word
    model: _Word
    dtype: _Word
    commit: _Word
    model_layers: Annotated[int, Field(ge=1, le=10_000)]
    hidden: Annotated[int, Field(ge=1, le=1 << 20)]
    repeats: Annotated[int, Field(ge=1, le=1_000_000)]
    body: Body
    head: Lines
    tail: Lines
    link: Lines
    lap: Lap
    experts: Planes | None = None
    crowd: Crowd | None = None
    rest: Rest | None = None
    rescaled: Pairs | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("head", "tail", "link"):
            check_line(name, getattr(self, name))
        if self.experts is not None:
            check_grid("experts", self.experts)
        if self.crowd is not None:
            check_line("crowd.rows", self.crowd.rows)
        if self.rest is not None:
            check_line("rest.rows", self.rest.rows)
        if self.rescaled is not None:
            check_line("rescaled", self.rescaled)
        return self


def shortest_hold(*tables: Sequence[Line] | Sequence[Plane]) -> int:
    """Nanoseconds; what a pass costs whatever its layers cannot be more."""
    return min(point[-2] for table in tables for point in table)


def check_line(name: str, points: Sequence[Line]) -> None:
    """Raises ValueError unless sizes ascend strictly."""
    for before, after in itertools.pairwise(points):
        if after[0] <= before[0]:
            raise ValueError(f"{name}: size {after[0]} follows {before[0]}; sizes must ascend")


def check_grid(name: str, points: Sequence[Plane]) -> None:
    """Raises ValueError unless the points are a full grid, each once."""
    seen = {(point[0], point[1]) for point in points}
    if len(seen) != len(points):
        raise ValueError(f"{name}: {len(points) - len(seen)} point(s) are there twice")
    seconds = sorted({second for _, second in seen})
    for first in sorted({first for first, _ in seen}):
        for second in seconds:
            if (first, second) not in seen:
                raise ValueError(f"{name}: [{first}, {second}] is missing; the grid must be full")


def read_profile(path: Path) -> Profile:
    """Reads and checks a profile file.

    Raises:
        ScenarioError: Missing, too large, no JSON, another version, or a broken rule; names the
            path, the place in the file and what was found.
    """
    try:
        if (size := path.stat().st_size) > PROFILE_BYTES_MAX:
            raise ScenarioError(f"{path}: {size} bytes; a profile has at most {PROFILE_BYTES_MAX}")
        data = path.read_bytes()
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read the profile: {error.strerror}") from error
    try:
        return Profile.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(step) for step in first["loc"]) or "the whole file"
        found = (
            ""
            if isinstance(first["input"], dict | list | bytes | str)
            else f" ({first['input']!r})"
        )
        raise ScenarioError(
            f"{path}: not a version 1 profile: {place}{found}: {first['msg']}"
        ) from None


def scaled(
    profile: Profile,
    now: Sequence[tuple[int, int]],
    crowd: Sequence[tuple[int, int, int]] | None = None,
) -> Profile:
    """The profile at another speed of the machine.

    Every hold is multiplied by how much longer its number of rows takes now, linear between the
    sizes of `now` and flat beyond them. Hops and the bridge's work stay as they were.

    Args:
        profile: As measured.
        now: Rows (ascending) and nanoseconds of a body as the profile's, at the new speed.
        crowd: The same, alone and beside the profile's neighbours, in place of what it says.
    """
    measured = profile.body.rows
    sizes, then = [line[0] for line in measured], [line[1] for line in measured]
    again = [(count, round(np.interp(count, sizes, then)), ns) for count, ns in now]
    factors = [ns / max(before, 1) for _, before, ns in again]

    def longer(rows: int, ns: int) -> int:
        return round(ns * float(np.interp(rows, [count for count, _, _ in again], factors)))

    def line(points: Sequence[Line]) -> list[Line]:
        return [(n, longer(n, ns), longer(n, spread)) for n, ns, spread in points]

    def plane(points: Sequence[Plane], rows_at: int = 0) -> list[Plane]:
        return [(*p[:2], longer(p[rows_at], p[2]), longer(p[rows_at], p[3])) for p in points]

    body, experts, neighbours = profile.body, profile.experts, profile.crowd
    rows, decode, prefill = line(body.rows), plane(body.decode), plane(body.prefill)
    pass_ns = min(longer(sizes[0], body.pass_ns), shortest_hold(rows, decode, prefill))
    if neighbours is not None and crowd is not None:
        neighbours = Crowd(neighbours=neighbours.neighbours, rows=list(crowd))
    return profile.model_copy(
        update={
            "body": Body(
                layers=body.layers, pass_ns=pass_ns, rows=rows, decode=decode, prefill=prefill
            ),
            "head": line(profile.head),
            "tail": line(profile.tail),
            "experts": None if experts is None else plane(experts, rows_at=1),
            "crowd": neighbours,
            "rescaled": again,
        }
    )


def write_profile(profile: Profile, path: Path) -> None:
    """Writes the file; it appears complete or not at all.

    Raises:
        OutputError: It cannot be written, as on a full disk; nothing is left there.
    """
    text = json.dumps(profile.model_dump(), indent=1, allow_nan=False) + "\n"
    write_whole(path, text.encode())
