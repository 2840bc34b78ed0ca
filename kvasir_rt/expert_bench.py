"""Routed experts of one layer, timed by distinct experts and rows, for `kvasir-rt profile`."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, pstdev

from kvasir_rt.stage_bench import ProfileOptions
from kvasir_scenario.profile import Plane


def measure_experts(model: Path, options: ProfileOptions) -> list[Plane] | None:
    """A full grid of distinct experts by rows; None for a model without experts.

    Each row chooses as many experts as the model's rows do, or more where few rows are to touch
    many; every expert that is touched has as many rows as the others, give or take one.

    Raises:
        ModelFileError: The file cannot be used.
    """
    import torch

    from kvasir_rt.experts.backend import load_local
    from kvasir_rt.gguf_file import open_gguf
    from kvasir_rt.model.linear import Numerics
    from kvasir_rt.model.moe import expert_sum
    from kvasir_rt.model.shape import ModelShape

    numerics = Numerics.of(options.device, options.dtype)
    with open_gguf(model) as gguf:
        shape = ModelShape.of(gguf)
        if not shape.experts:
            return None
        experts = load_local(gguf, (0, 1), numerics)[0]
    sizes = distinct_sizes(shape.experts_used, shape.experts)
    planes: list[Plane] = []
    with torch.inference_mode():
        for distinct in sizes:
            for rows in options.rows:
                chosen = torch.tensor(choices(distinct, rows, shape.experts_used))
                chosen = chosen.to(numerics.device)
                x = torch.ones(rows, shape.hidden, dtype=numerics.compute, device=numerics.device)
                weights = torch.full(
                    chosen.shape, 1 / chosen.shape[1], dtype=x.dtype, device=numerics.device
                )
                times = []
                for _ in range(options.repeats + 1):
                    start = time.perf_counter_ns()
                    expert_sum(experts, x, chosen, weights)
                    if numerics.device.type != "cpu":
                        torch.cuda.synchronize(numerics.device)
                    times.append(time.perf_counter_ns() - start)
                planes.append((distinct, rows, round(median(times[1:])), round(pstdev(times[1:]))))
    return planes


def distinct_sizes(used: int, experts: int) -> list[int]:
    """From those of one row to all, doubling."""
    sizes = [used]
    while sizes[-1] < experts:
        sizes.append(min(2 * sizes[-1], experts))
    return sizes


def choices(distinct: int, rows: int, used: int) -> Sequence[Sequence[int]]:
    """For each row different experts below `distinct`, all of them touched."""
    width = max(used, -(-distinct // rows))
    return [[(row * width + place) % distinct for place in range(width)] for row in range(rows)]
