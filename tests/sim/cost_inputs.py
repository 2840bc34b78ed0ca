"""Micro-batches and scenarios for the tests of the cost models."""

from pathlib import Path

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_core.microbatch import BindingLimit, MicroBatch
from kvasir_core.plan import Plan
from kvasir_core.units import Epoch, MicroBatchId, RequestId
from kvasir_scenario.data_paths import data_directory
from kvasir_scenario.load import load_text
from kvasir_scenario.planning import plan_of
from kvasir_scenario.schema import Scenario

TRACE = "workload: {kind: trace, requests: [[0, 1, 10]]}\n"


def micro_batch(
    contexts: tuple[int, ...] = (),
    chunks: tuple[tuple[int, int], ...] = (),
    completing: int = 0,
) -> MicroBatch:
    """Decodes that read so many positions each, and chunks (start, rows); the first complete."""
    starts = tuple(context - 1 for context in contexts) + tuple(start for start, _ in chunks)
    rows = (1,) * len(contexts) + tuple(count for _, count in chunks)
    return MicroBatch(
        id=MicroBatchId(0),
        epoch=Epoch(0),
        requests=tuple(RequestId(place) for place in range(len(rows))),
        starts=starts,
        rows=rows,
        decodes=len(contexts),
        completing=tuple(range(len(contexts), len(contexts) + completing)),
        row_count=sum(rows),
        decode_context=sum(contexts),
        binding=BindingLimit.NOTHING_WAITING,
    )


def scenario(text: str) -> tuple[Scenario, Plan]:
    """A scenario with a trivial workload, and its plan."""
    made = load_text(text + TRACE, label="case.yaml")
    return made, plan_of(made)


def data_file(*parts: str) -> Path:
    """A file of the data directory; the test is skipped where it is absent."""
    try:
        path = data_directory(Path(__file__)).joinpath(*parts)
    except ScenarioError as error:
        pytest.skip(str(error))
    if not path.exists():
        pytest.skip(f"no {path}: set KVASIR_DATA to the folder that holds {parts[0]}")
    return path
