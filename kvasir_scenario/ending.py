"""How commands end: an error is one message, a signal leaves nothing, a closed pipe is silent.

Exit status: 0 done, 1 the world said no, 2 wrong input; ended by a signal, what shells show for it.
Until `run_command` a signal just ends the process; then it is a `KeyboardInterrupt`.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import click

from kvasir_core.errors import KvasirError

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDING_S = 5.0  # Cleaning up takes less; a second signal would break it off half-way.
SIGNAL_STATUS = 128  # Shells add the signal's number.


def heeded_stops() -> list[signal.Signals]:
    """Signals to stop, without those that the starter wants ignored (`nohup`)."""
    return [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def stops_as_interrupts() -> Iterator[list[int]]:
    """A signal to stop raises `KeyboardInterrupt` here, and its number is in the list from then on.

    A second one soon after is the same impatience.
    """
    heard: list[int] = []
    deaf_until = 0.0

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal deaf_until
        del frame
        if time.monotonic() >= deaf_until:
            deaf_until = time.monotonic() + ENDING_S
            heard.append(number)
            raise KeyboardInterrupt

    before = {number: signal.signal(number, hear) for number in heeded_stops()}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(
    command: click.Command,
    name: str,
    arguments: Sequence[str] | None,
) -> None:
    """Run a command line to its end; end the process unless all went well.

    Args:
        command: What to run.
        name: What the user calls it, for messages.
        arguments: Without the name; None takes the process's.
    """
    status = 0
    with stops_as_interrupts() as heard:
        try:
            status = _status(command, name, arguments)
        except BaseException:  # Whatever cleaning up, or an import, made of the interrupt.
            if not heard:
                raise
        if heard:
            _end_by(heard[0])
    if status:
        sys.exit(status)


def _end_by(number: int) -> NoReturn:
    with suppress(OSError):  # The terminal may be gone.
        print("stopped", file=sys.stderr, flush=True)
    if number == signal.SIGINT:
        # Python then dies of the signal itself: loops in shells end too.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    sys.exit(SIGNAL_STATUS + number)


def _status(command: click.Command, name: str, arguments: Sequence[str] | None) -> int:
    try:
        status = command.main(args=arguments, prog_name=name, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except KvasirError as error:
        click.echo(f"{name}: {error}", err=True)
        return error.exit_status
    except BrokenPipeError:
        _let_go_of_closed_pipes()
        return 1
    except OSError as error:
        click.echo(f"{name}: {error}", err=True)
        return 1
    return status if isinstance(status, int) else 0


def _let_go_of_closed_pipes() -> None:
    """What is still to be written goes nowhere; Python would complain at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
