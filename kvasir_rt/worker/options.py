"""What a worker is told at its start."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from kvasir_core.errors import KvasirError
from kvasir_rt.errors import UnsupportedModel
from kvasir_rt.model.linear import Numerics

MEMORY_SHARE = 0.5  # Of what is free at the start, where nothing is said.


class WorkerError(KvasirError):
    """What was asked for cannot be done here; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The command line.

    Attributes:
        hub: `http(s)://HOST:PORT`.
        relay: `ws(s)://HOST:PORT/api/expert-relay`; None is the hub's own.
        store: Directory of key and slices.
        experts_max: Held in memory at once.
        memory_bytes: What their weights may take; None: half of what is free.
        store_bytes: What slices may take on disk.
        dtype: "float32" or "bfloat16"; None: by device.
        model: The only one to serve; None: any.
        join_token: Where the hub admits by invitation.
        drain_s: Longest wait for calls to stop coming before leaving.
        quiet_s: Without a call for so long, a draining worker leaves: coordinators have a new map.
        delay_s: Every answer waits so long; for experiments with distance.
    """

    hub: str
    relay: str | None = None
    store: Path
    experts_max: int = 64
    memory_bytes: int | None = None
    store_bytes: int = 20 << 30
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    model: str | None = None
    join_token: str | None = None
    drain_s: float = 30.0
    quiet_s: float = 6.0
    delay_s: float = 0.0
    status_file: Path | None = None


def numerics_of(options: WorkerOptions) -> Numerics:
    """The device, if it is there.

    Raises:
        WorkerError: It is not, or computes no such dtype.
    """
    kind = options.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise WorkerError(f"--device is {options.device!r}; it must be cpu, cuda or cuda:N")
    try:
        device = torch.device(options.device)
        if kind == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise WorkerError(
                f"--device {options.device}: this machine has {torch.cuda.device_count()} CUDA "
                "devices; use --device cpu"
            )
        dtype = options.dtype or ("float32" if kind == "cpu" else "bfloat16")
        return Numerics.of(options.device, dtype)
    except (RuntimeError, UnsupportedModel) as error:
        raise WorkerError(f"--device {options.device}: {error}") from None


def memory_of(options: WorkerOptions, numerics: Numerics) -> int:
    """What weights may take, in bytes."""
    if options.memory_bytes is not None:
        return options.memory_bytes
    if numerics.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(numerics.device)
    else:
        free = psutil.virtual_memory().available
    return int(free * MEMORY_SHARE)
