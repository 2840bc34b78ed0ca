"""What the tests of sweeps share: a small scenario, a pool that is no process, the command line."""

import json
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from kvasir_sim.cli import main
from kvasir_sim.sweep.axes import read_axes
from kvasir_sim.sweep.evaluate import Evaluator, Reply, Task
from kvasir_sim.sweep.points import Source, Sweep

SMALL = """\
model: {layers: 8, context: 256}
ring: {stages: 2, row_width: 32, micro_batch_width: 4, window: 2, running_max: 16}
costs: {kind: fixed, pass_s: 0.01, per_token_s: 0.0001}
workload: {kind: poisson, rate_per_s: 20, requests: 12, prompt_tokens: 10, output_tokens: 4}
run: {seed: 7}
"""


def small(folder: Path, **changes: str) -> Path:
    """The small scenario as a file, with texts in it replaced."""
    text = SMALL
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "small.yaml"
    path.write_text(text)
    return path


def sweep_of(path: Path, *grids: str, seeds: int = 1) -> Sweep:
    axes, _ = read_axes(grids, ())
    return Sweep(Source.of_file(path), axes, seeds=seeds)


class HerePool:
    """Evaluates in this process; after `stop_after` replies the user presses Ctrl-C."""

    jobs = 1

    def __init__(self, source: Source, stop_after: int | None = None) -> None:
        self._evaluator = Evaluator(json.dumps(asdict(source)))
        self._tasks: deque[Task] = deque()
        self._left = stop_after
        self.count = 0

    @property
    def open(self) -> int:
        return len(self._tasks)

    def has_room(self, ahead: int) -> bool:
        return len(self._tasks) < ahead

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def receive(self) -> Reply:
        if self._left is not None:
            if not self._left:
                raise KeyboardInterrupt
            self._left -= 1
        self.count += 1
        return Reply.from_json(self._evaluator.evaluate(self._tasks.popleft().to_json()))


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What a command that exits with 2 says."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    said = capsys.readouterr()
    assert (stop.value.code, said.out) == (2, ""), said
    return said.err


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "kvasir_sim.cli", *(str(word) for word in words)]


def run_command(words: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
