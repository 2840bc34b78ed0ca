"""What people see while stages load: a bar on a terminal, a line per step elsewhere."""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

STEPS = ("absent", "loading", "loaded", "idle", "listening", "wired")
MEBIBYTE = 1 << 20


class LoadingBar:
    """Shows how far the stages are.

    Args:
        stages: How many there are.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._is_terminal = sys.stderr.isatty()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not self._is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("starting stages", total=stages * (len(STEPS) - 1))
        self._loaded: set[int] = set()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, stages: Sequence[tuple[str, int]]) -> None:
        """Takes each stage's state and the bytes its process holds."""
        steps = [STEPS.index(state) if state in STEPS else 0 for state, _ in stages]
        loaded = [index for index, step in enumerate(steps) if step >= STEPS.index("loaded")]
        self._progress.update(
            self._task,
            completed=sum(steps),
            description=f"loading: {len(loaded)} of {self._stages} stages",
        )
        for index in loaded:
            if index not in self._loaded and not self._is_terminal:
                mebibytes = stages[index][1] / MEBIBYTE
                print(
                    f"stage {index} of {self._stages} is loaded: {mebibytes:.0f} MiB",
                    file=sys.stderr,
                    flush=True,
                )
        self._loaded.update(loaded)
