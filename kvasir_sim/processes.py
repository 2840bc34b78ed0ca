"""Worker processes of one command, and its end by a signal: neither leaves anything behind."""

import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children
from types import FrameType
from typing import NoReturn


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _heed_the_asker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the asker decides.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def process_pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that is not waited for when its asker is stopped."""
    others = set(active_children())
    with ProcessPoolExecutor(count, initializer=_heed_the_asker) as pool:
        try:
            yield pool
        except BaseException:
            for child in set(active_children()) - others:
                child.kill()  # It holds nothing that anybody needs.
            raise
