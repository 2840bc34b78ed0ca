"""Who runs the points: worker processes of this machine, kept warm from the first to the last."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import IO, Protocol, Self

from kvasir_sim.sweep.evaluate import Reply, Task
from kvasir_sim.sweep.points import Source
from kvasir_sim.sweep.worker import READY

TRIES = 2  # Of a point whose process dies: once may be somebody else's doing.
AHEAD = 2  # Tasks per worker, one of them waiting: nobody idles while a reply is taken in.
JOBS_MAX = 1024
LOST = "the process that ran it died "


class Pool(Protocol):
    """Runs tasks, several at once; replies come in any order."""

    @property
    def jobs(self) -> int:
        """How many tasks run at once."""

    @property
    def open(self) -> int:
        """Tasks without a reply."""

    def has_room(self, ahead: int) -> bool:
        """Whether some worker has fewer than `ahead` tasks."""

    def submit(self, task: Task) -> None:
        """Give a task to the worker with the fewest."""

    def receive(self) -> Reply:
        """Wait for the next reply."""


def run_all(pool: Pool, tasks: Iterable[Task], total: int) -> Iterator[Reply]:
    """Replies to all tasks; towards the end no task waits behind another while a worker idles."""
    waiting = iter(tasks)
    left = total
    is_done = False
    while not is_done or pool.open:
        while not is_done and pool.has_room(AHEAD if left > 4 * AHEAD * pool.jobs else 1):
            task = next(waiting, None)
            is_done = task is None
            if task is not None:
                pool.submit(task)
                left -= 1
        if pool.open:
            yield pool.receive()


@dataclass(slots=True, eq=False)
class _Worker:
    """A process, and the tasks it has: the first is the one it runs."""

    process: subprocess.Popen[bytes]
    tasks: deque[Task] = field(default_factory=deque)
    is_ready: bool = False
    unread: bytes = b""

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None, "it was started with a pipe"
        return self.process.stdout

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None, "it was started with a pipe"
        with suppress(BrokenPipeError):  # It has died; the end of its output will say so.
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()


class LocalPool:
    """Worker processes; they end when this object is left, or when this process dies.

    Raises:
        ChildProcessError: In `receive`: a worker dies before it is ready.
    """

    def __init__(self, source: Source, jobs: int) -> None:
        self.jobs = jobs
        self._source = json.dumps(asdict(source))
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._tries: dict[int, int] = {}
        self._lost: deque[Reply] = deque()

    def __enter__(self) -> Self:
        for _ in range(self.jobs):
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.process.kill()  # It holds nothing that anybody needs.
        for worker in self._workers:
            self._forget(worker)
        self._selector.close()

    @property
    def open(self) -> int:
        return sum(len(worker.tasks) for worker in self._workers) + len(self._lost)

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return [worker.process.pid for worker in self._workers]

    def has_room(self, ahead: int) -> bool:
        return any(len(worker.tasks) < ahead for worker in self._workers)

    def submit(self, task: Task) -> None:
        worker = min(self._workers, key=lambda worker: len(worker.tasks))
        worker.tasks.append(task)
        worker.tell(task.to_json())

    def wait_ready(self) -> None:
        """Wait until every worker has started."""
        while not all(worker.is_ready for worker in self._workers):
            self._listen()

    def receive(self) -> Reply:
        assert self.open, "no reply is due"
        while True:
            if self._lost:
                return self._lost.popleft()
            for worker in self._workers:
                line, found, rest = worker.unread.partition(b"\n")
                if found:
                    worker.unread = rest
                    task = worker.tasks.popleft()
                    reply = Reply.from_json(line)
                    assert reply.number == task.number, "a worker answers in order"
                    return reply
            self._listen()

    def _listen(self) -> None:
        for key, _ in self._selector.select():
            worker: _Worker = key.data
            data = os.read(key.fd, 1 << 16)
            worker.unread += data
            if not worker.is_ready and worker.unread.startswith(READY.encode() + b"\n"):
                worker.is_ready = True
                worker.unread = worker.unread[len(READY) + 1 :]
            if not data:
                self._bury(worker)

    def _start(self) -> None:
        # Ctrl-C goes to all; a worker inherits that it is not for it, before it can say so itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvasir_sim.sweep.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(),
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        worker = _Worker(process)
        self._workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        worker.tell(self._source)

    def _forget(self, worker: _Worker) -> int:
        self._selector.unregister(worker.output)
        worker.output.close()
        assert worker.process.stdin is not None, "it was started with a pipe"
        with suppress(BrokenPipeError):  # What it never read.
            worker.process.stdin.close()
        return worker.process.wait()

    def _bury(self, worker: _Worker) -> None:
        """A worker died: another takes its place and its tasks; the first of them is suspect."""
        self._workers.remove(worker)
        status = self._forget(worker)
        if not worker.is_ready:
            raise ChildProcessError(f"a worker process ended before it began (status {status})")
        self._start()
        tasks = list(worker.tasks)
        if tasks:
            suspect = tasks[0].number
            self._tries[suspect] = self._tries.get(suspect, 0) + 1
            if self._tries[suspect] >= TRIES:
                self._lost.append(lost(tasks.pop(0).number, f"status {status}"))
        for task in tasks:
            self.submit(task)


def lost(number: int, why: str) -> Reply:
    """The reply to a task that nobody could finish."""
    error = f"{LOST}{TRIES} times ({why}); is there enough memory?"
    return Reply(number=number, figures={}, error=error, is_lost=True)


def _environment() -> dict[str, str]:
    """One thread each: there is a process for every core."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
