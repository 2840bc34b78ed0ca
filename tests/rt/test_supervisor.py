"""Whether a silent child may only be waiting for a core: what the kernel says of real processes."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvasir_rt.supervisor import Supervisor
from tests.rt.rings import until


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def supervisor_of(child: subprocess.Popen[bytes]) -> Supervisor:
    def never(stage: int) -> object:
        raise AssertionError(stage)

    supervisor = Supervisor(never)  # type: ignore[arg-type]
    supervisor.children[1] = child  # type: ignore[assignment]
    return supervisor


def test_a_child_that_lives_may_be_slow_and_one_that_is_stopped_or_dead_is_not(
    child: subprocess.Popen[bytes],
) -> None:
    supervisor = supervisor_of(child)
    assert supervisor.may_be_slow(1)
    assert not supervisor.may_be_slow(0), "nobody's"
    child.send_signal(signal.SIGSTOP)
    until(lambda: not supervisor.may_be_slow(1), "it is stopped")
    child.send_signal(signal.SIGCONT)
    until(lambda: supervisor.may_be_slow(1), "it goes on")
    child.kill()
    until(lambda: not supervisor.may_be_slow(1), "it is dead")
    child.wait()
    assert not supervisor.may_be_slow(1), "reaped"
