"""A progress bar for long runs; none when the output is not a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvasir_core import NANOS_PER_SECOND
from kvasir_scenario.schema import Scenario
from kvasir_sim.simulate import Progress as Report


@contextmanager
def progress_bar(scenario: Scenario, *, is_shown: bool) -> Iterator[Report | None]:
    """Yield what `simulate` calls with (virtual nanoseconds, requests ended), or None."""
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield None
        return
    horizon = scenario.run.horizon_s
    requests = getattr(scenario.workload, "requests", None)
    total = horizon if horizon is not None else requests if isinstance(requests, int) else None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[ended]} requests, {task.fields[now]:.0f} s simulated"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(scenario.name, total=total, ended=0, now=0.0)

        def update(now_ns: int, ended: int) -> None:
            now = now_ns / NANOS_PER_SECOND
            bar.update(task, completed=ended if horizon is None else now, ended=ended, now=now)

        yield update
