"""`--layers auto`: what head and tail take beside their layers here, measured in a process.

A process of its own, so that the bridge needs no torch: `python -m kvasir_rt.measure_split`. The
measure is a request of 128 prompt tokens and 64 new ones: one chunk, and its share of 64 decodes.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from kvasir_rt.ring_errors import RingDown

DEPTH_MAX = 4  # Layers that are timed.
PROMPT_TOKENS = 128
NEW_TOKENS = 64
REPEATS = 5
MEASURE_S_MAX = 300.0


@dataclass(frozen=True, slots=True)
class Beside:
    """What head and tail do beside their layers, in layers."""

    head_layers: float
    tail_layers: float


def measure_apart(model: Path, *, device: str, dtype: str, threads: int, width: int) -> Beside:
    """Runs the measurement in a process of its own.

    Args:
        model: The GGUF file.
        device: Where to measure, such as the first stage's.
        dtype: `float32` or `bfloat16`.
        threads: Compute threads of a stage.
        width: Decodes of one micro-batch.

    Raises:
        RingDown: It failed; its last words are in the message.
    """
    arguments = [str(model), device, dtype, str(threads), str(width)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvasir_rt.measure_split", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=MEASURE_S_MAX,
        )
    except subprocess.TimeoutExpired:
        raise RingDown(f"--layers auto: not measured within {MEASURE_S_MAX:g} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RingDown(f"--layers auto: the measurement failed: {last[0]}")
    return Beside(**json.loads(done.stdout))


def measure(model: Path, *, device: str, dtype: str, threads: int, width: int) -> Beside:
    """Times a few layers alone, with the head's work, and with the tail's."""
    import torch

    from kvasir_rt.gguf_file import open_gguf
    from kvasir_rt.model.shape import ModelShape
    from kvasir_rt.stage_bench import HEAD_ROOM, ProfileOptions, StageBench, Timer, in_rounds

    torch.set_num_threads(threads)
    with open_gguf(model) as gguf:
        shape = ModelShape.of(gguf)
    chunk = min(PROMPT_TOKENS, shape.context - HEAD_ROOM)
    depth = min(DEPTH_MAX, shape.layers - 2)
    if depth < 1 or chunk <= REPEATS:
        return Beside(0.0, 0.0)  # Two layers have but one split; and a toy is split evenly.
    options = ProfileOptions(
        device=device,
        dtype=dtype,
        threads=threads,
        repeats=REPEATS,
        rows=(width,),
        decodes=(width,),
        contexts=(1,),
        chunks=(chunk,),
        behind=(0,),
    )

    timers: dict[tuple[str, str], Timer] = {}
    for name, first in (("body", 1), ("head", 0), ("tail", shape.layers - depth)):
        stage = StageBench(model, (first, first + depth), options)
        timers[name, "decodes"] = stage.rows(width)
        timers[name, "chunk"] = stage.prefill(chunk, 0)
    points = in_rounds(timers, REPEATS)
    body, head, tail = (
        points[name, "chunk"][0] + points[name, "decodes"][0] * NEW_TOKENS / width
        for name in ("body", "head", "tail")
    )
    layer = body / depth
    return Beside(max(0.0, head - body) / layer, max(0.0, tail - body) / layer)


def main() -> None:
    """The body of the measuring process: one line of JSON."""
    model, device, dtype, threads, width = sys.argv[1:]
    beside = measure(
        Path(model), device=device, dtype=dtype, threads=int(threads), width=int(width)
    )
    print(json.dumps(asdict(beside)))


if __name__ == "__main__":
    main()
