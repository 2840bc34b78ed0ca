"""Worker processes of one command: they end with it."""

import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children


def _heed_the_asker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the asker decides.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


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
