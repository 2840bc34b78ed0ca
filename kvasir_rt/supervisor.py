"""Stage processes on this host: spawned, watched through pidfds, killed, replaced.

All calls come from one thread that lives as long as the ring: the kernel ties a child to the
*thread* that created it (PDEATHSIG), so a stage cannot outlive the engine.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvasir_rt.stage import StageConfig

STOPPED = "TtZX"  # States in /proc: stopped, traced, zombie, dead.
EXIT_WAIT_S = 2.0  # Asked to stop, a stage gets so long before it is killed.


class StageProcess:
    """One child. `pidfd` becomes readable when it ends."""

    def __init__(self, config: StageConfig, threads: int | None) -> None:
        environment = dict(os.environ)
        if threads is not None:  # Read when the library is loaded, so it must be set this early.
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvasir_rt.stage"],
            stdin=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C is for the bridge, which then ends it.
        )
        self.pidfd = os.pidfd_open(self._process.pid)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It died at once; its exit says so.
            self._process.stdin.write(msgspec.json.encode(config))
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, once it has ended; negative is a signal."""
        return self._process.returncode

    def wait(self, seconds: float | None) -> bool:
        """Whether it has ended within so long (None: waits for it)."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> str:
        """Kill it if it still runs, reap it, and say how it ended."""
        if self._process.poll() is None:
            self._process.kill()
        status = self._process.wait()
        os.close(self.pidfd)
        if status < 0:
            return f"killed by signal {-status} ({signal.Signals(-status).name})"
        return f"exit status {status}"


class Supervisor:
    """The children by stage index."""

    def __init__(self, configure: Callable[[int], StageConfig], threads: int | None = None) -> None:
        """Spawn nothing yet.

        Args:
            configure: The configuration of a stage's process.
            threads: Compute threads of each child; None leaves the library's default.
        """
        self._configure = configure
        self._threads = threads
        self.children: dict[int, StageProcess] = {}

    def spawn(self, stage: int) -> StageProcess:
        """Start the process of a stage that has none."""
        assert stage not in self.children
        child = StageProcess(self._configure(stage), self._threads)
        self.children[stage] = child
        return child

    def ended(self) -> list[int]:
        """Stages whose process has ended and was not reaped."""
        return [
            stage
            for stage, child in self.children.items()
            if select.select([child.pidfd], [], [], 0)[0]
        ]

    def may_be_slow(self, stage: int) -> bool:
        """Whether its process is alive and not stopped: it may only be waiting for a core."""
        child = self.children.get(stage)
        if child is None:
            return False
        try:
            stat = Path(f"/proc/{child.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in STOPPED

    def end(self, stage: int) -> str:
        """Kill and reap; says how the process ended."""
        return self.children.pop(stage).end()

    def close(self) -> None:
        """Give each child `EXIT_WAIT_S` in all to leave, then kill the rest."""
        pidfds = {child.pidfd for child in self.children.values()}
        poll = select.poll()
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        remaining_ms = int(EXIT_WAIT_S * 1000)
        while pidfds and remaining_ms > 0:
            ready = poll.poll(remaining_ms)
            if not ready:
                break
            for pidfd, _ in ready:
                poll.unregister(pidfd)
                pidfds.discard(pidfd)
        for stage in list(self.children):
            self.end(stage)
