"""`kvasir-rt worker`: from options to a worker, until a signal."""

import asyncio
import os
from pathlib import Path

import torch

from kvasir_rt.worker.options import WorkerOptions
from kvasir_rt.worker.worker import Worker
from kvasir_scenario.ending import heeded_stops
from kvasir_scenario.out_file import STATUS, check_out_file


def default_store() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "kvasir" / "worker"


def run_worker(options: WorkerOptions) -> int:
    """Until SIGTERM or Ctrl-C; the second one hurries. Returns the exit status.

    Raises:
        KvasirError: It cannot begin, or the hub is not the one that was known.
    """
    if options.status_file is not None:
        check_out_file("--status-file", options.status_file, STATUS)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return asyncio.run(_run(options))


async def _run(options: WorkerOptions) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    for number in heeded_stops():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    worker = Worker(options)
    print(f"worker {worker.node} for {options.hub}", flush=True)
    await worker.run(stop, hurry)
    return 0
