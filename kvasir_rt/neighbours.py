"""Processes that keep other cores as busy as the other stages of a ring on this machine would.

Stages on one machine share its memory and its caches, so a stage alone is faster than one beside
others. What that costs is measured with neighbours at work and at rest, in turn.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Self

from kvasir_core.errors import PlanError
from kvasir_rt.stage import die_with_parent
from kvasir_rt.stage_bench import ProfileOptions, StageBench, Timer, in_pairs

LOAD_S_MAX = 120.0
ROWS_MAX = 8  # A decode of a usual width.


def _compute(
    model: Path,
    layers: tuple[int, int],
    options: ProfileOptions,
    core: int,
    parent: int,
    is_ready: Event,
) -> None:
    die_with_parent(parent)
    os.sched_setaffinity(0, {core})
    import torch

    torch.set_num_threads(options.threads)
    stage = StageBench(model, layers, options)
    rows = min(ROWS_MAX, options.rows[-1])
    compute = stage.rows(rows)
    compute()
    is_ready.set()
    while True:
        compute()


def check_neighbours(count: int) -> None:
    """Whether this process may use a core for each of them and one of its own.

    Raises:
        PlanError: It may not.
    """
    cores = len(os.sched_getaffinity(0))
    if count >= cores:
        raise PlanError(
            f"--neighbours {count} needs {count + 1} cores; this process may use {cores}"
        )


class Neighbours:
    """`options.neighbours` processes with the same layers, each on a core of its own, at rest."""

    def __init__(self, model: Path, layers: tuple[int, int], options: ProfileOptions) -> None:
        self._model = model
        self._arguments = (model, layers, options)
        self._count = options.neighbours
        self._workers: list[SpawnProcess] = []
        self._cores = sorted(os.sched_getaffinity(0))

    def __enter__(self) -> Self:
        """Start them and wait until they have computed once.

        Raises:
            PlanError: There are not so many cores, or one did not load.
        """
        cores, count = self._cores, self._count
        check_neighbours(count)
        context = multiprocessing.get_context("spawn")
        try:
            for core in cores[-count:]:
                is_ready = context.Event()
                arguments = (*self._arguments, core, os.getpid(), is_ready)
                worker = context.Process(target=_compute, args=arguments, daemon=True)
                self._workers.append(worker)
                # Ctrl-C goes to all; they inherit that it is not for them.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    worker.start()
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                self._wait_for(worker, is_ready)
                self._signal(worker, signal.SIGSTOP)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            if worker.pid is not None:  # Else it never started.
                worker.kill()
                worker.join()

    def beside(self, timers: Mapping[int, Timer], repeats: int) -> list[tuple[int, int, int]]:
        """By rows: how long alone, and how long while the neighbours compute (`in_pairs`).

        Meanwhile this process keeps off their cores.
        """

        def crowded(timer: Timer) -> int:
            with self.at_work():
                return timer()

        os.sched_setaffinity(0, set(self._cores[: -self._count]))
        try:
            return in_pairs(timers, repeats, crowded)
        finally:
            os.sched_setaffinity(0, set(self._cores))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """They compute inside."""
        for worker in self._workers:
            self._signal(worker, signal.SIGCONT)
        try:
            yield
        finally:
            for worker in self._workers:
                self._signal(worker, signal.SIGSTOP)

    def _wait_for(self, worker: SpawnProcess, is_ready: Event) -> None:
        until = time.monotonic() + LOAD_S_MAX
        while not is_ready.wait(0.1):
            if not worker.is_alive() or time.monotonic() > until:
                raise PlanError(f"a neighbour with {self._model.name} did not come to compute")

    @staticmethod
    def _signal(worker: SpawnProcess, number: signal.Signals) -> None:
        assert worker.pid is not None
        os.kill(worker.pid, number)
