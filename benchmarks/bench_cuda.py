"""The runtime on a GPU: equal to the CPU, in flight against drained, hold times.

    python benchmarks/bench_cuda.py [--json] [--repeats 3] [--layers 16] [--hidden 1024]

Needs the checkout, torch and the `rt` packages; the model is random and written on the spot.
Without a GPU it says so and does nothing (exit status 0). Each part is printed as it is done:

    equality   float32: logits and greedy tokens of stages on the GPU against stages on the CPU
    holds      bfloat16: what a stage of a quarter of the layers takes, by rows and phase
    rings      bfloat16: tokens per second, drained and in flight, for 2 and 4 stage processes over
               the GPUs there are (several stages on one GPU are time-sliced: expect little)
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - After the path, to run as a script.

from kvasir_core.microbatch import BindingLimit, MicroBatch  # noqa: E402
from kvasir_core.units import Epoch, MicroBatchId, RequestId  # noqa: E402
from kvasir_rt.bench import Load, compare  # noqa: E402
from kvasir_rt.gguf_file import open_gguf  # noqa: E402
from kvasir_rt.model.shape import ModelShape  # noqa: E402
from kvasir_rt.model.stage_model import StageModel  # noqa: E402
from kvasir_rt.serve_plan import RingOptions  # noqa: E402
from kvasir_rt.split import split_by_cost  # noqa: E402
from tests.rt.tiny_models import TinyModel, write_tiny_model  # noqa: E402

Part = tuple[int, int, int]  # Request, start, rows.
PROMPT_TOKENS = 48
NEW_TOKENS = 24
LOGITS_TOLERANCE = 2e-3  # Of a scale of some tens; sums are taken in another order.
HOLD_REPEATS = 20
CONTEXT = 1024


def micro_batch(decodes: Sequence[tuple[int, int]], chunks: Sequence[Part] = ()) -> MicroBatch:
    """Decodes are (request, position); every chunk ends its prompt."""
    parts = [(request, start, 1) for request, start in decodes] + list(chunks)
    return MicroBatch(
        id=MicroBatchId(0),
        epoch=Epoch(0),
        requests=tuple(RequestId(request) for request, _, _ in parts),
        starts=tuple(start for _, start, _ in parts),
        rows=tuple(rows for _, _, rows in parts),
        decodes=len(decodes),
        completing=tuple(range(len(decodes), len(parts))),
        row_count=sum(rows for _, _, rows in parts),
        decode_context=sum(start + 1 for _, start in decodes),
        binding=BindingLimit.NOTHING_WAITING,
    )


def stages_of(model: Path, device: str, dtype: str, count: int) -> list[StageModel]:
    with open_gguf(model) as gguf:
        layers = split_by_cost(ModelShape.of(gguf).layers, count)
        return [
            StageModel(
                gguf,
                span,
                running_max=64,
                context=CONTEXT,
                kv_tokens=64 * CONTEXT,
                device=device,
                dtype=dtype,
            )
            for span in layers
        ]


def through(stages: Sequence[StageModel], batch: MicroBatch, ids: list[int]) -> torch.Tensor:
    hidden = torch.tensor(ids)
    for stage in stages:
        hidden = stage.forward(batch, hidden)
    return hidden.cpu()


def greedy(stages: Sequence[StageModel], prompts: list[list[int]]) -> tuple[list[Any], list[Any]]:
    """Greedy tokens of all prompts decoded together, and the logits of each step."""
    tokens: list[list[int]] = [[] for _ in prompts]
    steps = []
    for request, prompt in enumerate(prompts):
        logits = through(stages, micro_batch([], [(request, 0, len(prompt))]), prompt)
        steps.append(logits)
        tokens[request].append(int(logits[0].argmax()))
    for step in range(NEW_TOKENS - 1):
        places = [(request, len(prompt) + step) for request, prompt in enumerate(prompts)]
        logits = through(stages, micro_batch(places), [each[-1] for each in tokens])
        steps.append(logits)
        for request, row in enumerate(logits.argmax(-1).tolist()):
            tokens[request].append(row)
    return tokens, steps


def equality(folder: Path, device: str) -> dict[str, Any]:
    """Every architecture in float32; a difference ends the script with status 1."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    result: dict[str, Any] = {}
    for architecture in ("llama", "qwen2", "qwen3", "qwen3moe"):
        model = write_tiny_model(
            folder / f"{architecture}.gguf", TinyModel(architecture=architecture, context=CONTEXT)
        )
        load = Load(requests=4, prompt_tokens=PROMPT_TOKENS)
        prompts = load.prompts(300)
        expected, right = greedy(stages_of(model, "cpu", "float32", 2), prompts)
        found, logits = greedy(stages_of(model, device, "float32", 2), prompts)
        apart = max(
            float((mine - theirs).abs().max()) for mine, theirs in zip(logits, right, strict=True)
        )
        result[architecture] = {"same_tokens": found == expected, "logits_apart_max": apart}
        print(f"equality  {architecture:9} same tokens: {found == expected}, apart {apart:.2e}")
        if found != expected and apart > LOGITS_TOLERANCE:
            raise SystemExit(f"{architecture} on {device} differs from the CPU")
    return result


def rings(model: Path, devices: Sequence[str], load: Load, repeats: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for count in (2, 4):
        options = RingOptions(
            stages=count,
            devices=tuple(devices[index % len(devices)] for index in range(count)),
            dtype="bfloat16",
            context=load.prompt_tokens + load.new_tokens,
            row_width=256,
            micro_batch_width=8,
            running_max=load.requests,
        )
        ring_load = replace(load, requests=8 * count)
        options = replace(options, running_max=ring_load.requests)
        measured = compare(model, options, ring_load, pin=False, repeats=repeats)
        result[f"{count}_stages"] = measured
        print(
            f"rings     {count} stages on {', '.join(dict.fromkeys(options.devices))}: drained "
            f"{measured['drained']['tokens_per_s']:.1f}, in flight "
            f"{measured['in_flight']['tokens_per_s']:.1f} tokens/s, "
            f"ratio {measured['in_flight_over_drained']:.2f}"
        )
    return result


def holds(model: Path, device: str) -> list[dict[str, Any]]:
    """The second of four stages: neither head nor tail."""
    with open_gguf(model) as gguf:
        shape = ModelShape.of(gguf)
        stage = StageModel(
            gguf,
            split_by_cost(shape.layers, 4)[1],
            running_max=64,
            context=CONTEXT,
            kv_tokens=64 * CONTEXT,
            device=device,
            dtype="bfloat16",
        )
    table = []
    for context in (1, 512):
        for decodes in (1, 8, 32, 64):
            places = [(request, context - 1) for request in range(decodes)]
            warm = [micro_batch([], [(request, 0, context - 1)]) for request, _ in places]
            point = timed(stage, warm if context > 1 else [], micro_batch(places))
            table.append({"decodes": decodes, "context": context, "hold_s": point})
    for rows in (64, 256, 512):
        point = timed(stage, [], micro_batch([], [(0, 0, rows)]))
        table.append({"prefill_rows": rows, "hold_s": point})
    for line in table:
        what = ", ".join(f"{key} {value}" for key, value in line.items() if key != "hold_s")
        print(f"holds     {what}: {line['hold_s'] * 1000:.3f} ms")
    return table


def timed(stage: StageModel, before: Sequence[MicroBatch], batch: MicroBatch) -> float:
    """Median seconds of one execution, each on KV that `before` has filled."""

    def run(each: MicroBatch) -> None:
        hidden = torch.zeros(each.row_count, stage.shape.hidden, dtype=stage.boundary)
        stage.forward(each, hidden)

    seconds = []
    for _ in range(HOLD_REPEATS + 2):  # The first two warm up.
        for each in before:
            run(each)
        synchronise()
        started = time.perf_counter()
        run(batch)
        synchronise()
        seconds.append(time.perf_counter() - started)
        stage.reset()
    return median(seconds[2:])


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--device", help="such as cpu, to try the script itself")
    parser.add_argument("--json", action="store_true", help="last line is one object of JSON")
    given = parser.parse_args()
    if given.device is None and not torch.cuda.is_available():
        print("skipped: torch sees no GPU here (torch.cuda.is_available() is false)")
        return
    devices = [given.device or ""]
    if given.device is None:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    on_gpu = devices[0].startswith("cuda")
    card = torch.cuda.get_device_name(devices[0]) if on_gpu else "no card"
    print(f"{card}, torch {torch.__version__}, devices {', '.join(devices)}")
    load = Load(prompt_tokens=given.prompt_tokens, new_tokens=given.new_tokens)
    with tempfile.TemporaryDirectory(prefix="kvasir-cuda-") as name:
        folder = Path(name)
        result: dict[str, Any] = {"card": card, "equality": equality(folder, devices[0])}
        large = TinyModel(
            layers=given.layers,
            hidden=given.hidden,
            heads=given.hidden // 64,
            kv_heads=max(1, given.hidden // 128),
            head_dim=64,
            ffn=4 * given.hidden,
            context=CONTEXT,
            quantisation="F16",
        )
        model = write_tiny_model(folder / "large.gguf", large)
        result["holds"] = holds(model, devices[0])
        result["rings"] = rings(model, devices, load, given.repeats)
    if given.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
