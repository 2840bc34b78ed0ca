"""A ring of two stages against its rivals on one machine: tokens per second, in one run.

    python benchmarks/bench_ring.py [--json] [--repeats 5] [--dtype float32] [--engine in_flight]

16 requests of 128 prompt tokens and 64 new ones, all there at once; tokens per second are new
tokens over the whole time, prefill included. Each engine is loaded once, in a process of its own,
and warmed up; then they take turns, `--repeats` times, so that what else the machine does falls on
all of them. Medians, with the spread.

    in_flight    two stage processes, one core each, micro-batches of 8, two in flight
    drained      the same stages and width, one micro-batch at a time
    one_process  the same `StageModel`, whole, in one process with two threads, micro-batches of 16
    generate     transformers' `generate`, one batch of all requests, two threads
    xllamacpp    llama.cpp (wheel), all requests in parallel, two threads; float32 file only
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.turns import Loaded, serve_turns  # noqa: E402
from kvasir_rt.bench import BenchRing, Load  # noqa: E402 - After the path, to run as a script.
from kvasir_rt.model_files import find_model  # noqa: E402
from kvasir_rt.serve_plan import RingOptions, plan_for  # noqa: E402

DTYPES = ("float32", "bfloat16")
CORES = 2
WIDTH = 8
Tokens = list[list[int]]
Measured = tuple[float, Tokens | None]  # Seconds, and the tokens where they can be compared.
Run = Callable[[Load], Measured]


def ring_options(load: Load, dtype: str, packer: str, width: int) -> RingOptions:
    return RingOptions(
        stages=2,
        dtype=dtype,
        context=load.prompt_tokens + load.new_tokens,
        row_width=2 * load.prompt_tokens,  # Half of it beside decodes: a prompt is one chunk.
        micro_batch_width=width,
        window=1 if packer == "drained" else 2,
        running_max=load.requests,
        packer=packer,
    )


def warm_up_of(load: Load) -> Load:
    return Load(requests=load.requests, prompt_tokens=8, new_tokens=2, seed=load.seed + 1)


@contextmanager
def ring(model: Path, load: Load, dtype: str, packer: str) -> Iterator[Run]:
    with BenchRing(model, ring_options(load, dtype, packer, WIDTH), pin=True) as it:
        yield it.run


def in_flight(model: Path, load: Load, dtype: str) -> AbstractContextManager[Run]:
    return ring(model, load, dtype, "cohort")


def drained(model: Path, load: Load, dtype: str) -> AbstractContextManager[Run]:
    return ring(model, load, dtype, "drained")


@contextmanager
def one_process(model: Path, load: Load, dtype: str) -> Iterator[Run]:
    """The core and the stage's code without any process, wire or hop between them."""
    import torch

    from kvasir_rt.gguf_file import open_gguf
    from kvasir_rt.model.shape import ModelShape
    from kvasir_rt.model.stage_model import StageModel

    torch.set_num_threads(CORES)
    with open_gguf(model) as gguf:
        shape = ModelShape.of(gguf)
        plan = plan_for(shape, ring_options(load, dtype, "drained", load.requests))
        whole = StageModel(
            gguf,
            (0, shape.layers),
            running_max=plan.running_max,
            context=plan.context,
            kv_tokens=plan.kv_blocks * plan.kv_block,
            dtype=dtype,
        )

    def run(of: Load) -> Measured:
        started = time.perf_counter()
        tokens = drive_whole(whole, plan, of, shape.vocab)
        return time.perf_counter() - started, tokens

    yield run


def drive_whole(whole: Any, plan: Any, load: Load, vocabulary: int) -> Tokens:
    """Carries out the core's orders with one model that holds every layer."""
    import torch

    from kvasir_core.decisions import Deliver, Launch, Release
    from kvasir_core.events import LapEnded, ReleaseEnded, RequestArrived, RingEvent
    from kvasir_core.ring import Ring
    from kvasir_core.units import Nanos, RequestId

    core = Ring(plan)
    prompts = load.prompts(vocabulary)
    histories = [list(prompt) for prompt in prompts]
    events: list[RingEvent] = [
        RequestArrived(RequestId(index), len(prompt), load.new_tokens)
        for index, prompt in enumerate(prompts)
    ]
    picked: dict[RequestId, int] = {}
    start = time.monotonic_ns()
    while events:
        for decision in core.handle(events.pop(0), Nanos(time.monotonic_ns() - start)):
            match decision:
                case Launch(batch):
                    ids = [
                        token
                        for request, at, rows in zip(
                            batch.requests, batch.starts, batch.rows, strict=True
                        )
                        for token in histories[request][at : at + rows]
                    ]
                    logits = whole.forward(batch, torch.tensor(ids))
                    picked = dict(zip(batch.outputs, logits.argmax(-1).tolist(), strict=True))
                    events.append(LapEnded(batch.id, batch.epoch))
                case Deliver(_, requests):
                    for request in requests:
                        histories[request].append(picked[request])
                case Release(requests, epoch):
                    whole.release(requests)
                    events.append(ReleaseEnded(requests, epoch))
                case _:
                    pass  # Finish: its tokens are in the history.
    return [history[load.prompt_tokens :] for history in histories]


@contextmanager
def generate(model: Path, load: Load, dtype: str) -> Iterator[Run]:
    del load
    import torch
    import transformers

    torch.set_num_threads(CORES)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=getattr(torch, dtype)
    )
    oracle = loaded.eval()

    def run(of: Load) -> Measured:
        ids = torch.tensor(of.prompts(oracle.config.vocab_size))
        started = time.perf_counter()
        output = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=of.new_tokens,
            min_new_tokens=of.new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started, output[:, of.prompt_tokens :].tolist()

    with torch.inference_mode():
        yield run


@contextmanager
def xllamacpp(model: Path, load: Load, dtype: str) -> Iterator[Run]:
    """`model` is the float32 file here."""
    del dtype
    import xllamacpp as llama

    context = load.prompt_tokens + load.new_tokens
    params = llama.CommonParams()
    params.model.path = str(model)
    params.n_parallel = load.requests
    params.n_ctx = load.requests * -(-context // 64) * 64
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = CORES
    params.cpuparams_batch.n_threads = CORES
    params.warmup = False
    params.verbosity = 0
    server = llama.Server(params)
    vocabulary = vocabulary_of(model)

    def ask(prompt: list[int], new_tokens: int) -> None:
        answers: list[Any] = []
        request = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": False,
        }
        server.handle_completions(json.dumps(request), answers.append)
        answer = json.loads(answers[-1]) if isinstance(answers[-1], str) else answers[-1]
        if answer.get("usage", {}).get("completion_tokens") != new_tokens:
            raise SystemExit(f"xllamacpp answered {str(answer)[:500]}")

    def run(of: Load) -> Measured:
        prompts = of.prompts(vocabulary)
        started = time.perf_counter()
        with ThreadPoolExecutor(of.requests) as pool:
            list(pool.map(ask, prompts, [of.new_tokens] * of.requests))
        return time.perf_counter() - started, None

    yield run


def vocabulary_of(model: Path) -> int:
    from kvasir_rt.gguf_file import open_gguf
    from kvasir_rt.model.shape import ModelShape

    with open_gguf(model) as gguf:
        return ModelShape.of(gguf).vocab


ENGINES: dict[str, Callable[[Path, Load, str], AbstractContextManager[Run]]] = {
    "in_flight": in_flight,
    "drained": drained,
    "generate": generate,
    "one_process": one_process,
    "xllamacpp": xllamacpp,
}


def write_float32(source: Path, target: Path) -> None:
    """The same weights, dequantised: llama.cpp then computes what the others compute."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(
            name, field.contents(), field.types[0], field.types[-1] if is_array else None
        )
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def turn(run: Run, load: Load) -> dict[str, Any]:
    """One measurement, in the engine's own process."""
    seconds, tokens = run(load)
    digest = tokens and hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    return {"tokens_per_s": load.requests * load.new_tokens / seconds, "digest": digest}


def loaded(engine: str, model: Path, load: Load, dtype: str, folder: Path) -> Loaded:
    arguments = [
        *(sys.executable, __file__, "--one", "--model", str(model)),
        *("--engine", engine, "--dtype", dtype, "--seed", str(load.seed)),
        *("--requests", str(load.requests), "--prompt-tokens", str(load.prompt_tokens)),
        *("--new-tokens", str(load.new_tokens)),
    ]
    return Loaded(f"{engine} in {dtype}", arguments, folder / f"{engine}.{dtype}.log")


def compare(given: argparse.Namespace, load: Load, folder: Path) -> dict[str, dict[str, Any]]:
    float32 = folder / "float32.gguf"
    model = find_model(given.model)
    engines, dtypes = given.engine or list(ENGINES), given.dtype or list(DTYPES)
    pairs = [
        (engine, dtype)
        for dtype in dtypes
        for engine in engines
        if engine != "xllamacpp" or dtype == "float32"
    ]
    if "xllamacpp" in {engine for engine, _ in pairs}:
        write_float32(model, float32)
    results: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    with ExitStack() as stack:
        takes_turns: dict[tuple[str, str], Loaded] = {}
        for engine, dtype in pairs:
            path = float32 if engine == "xllamacpp" else model
            one = loaded(engine, path, load, dtype, folder)
            takes_turns[engine, dtype] = stack.enter_context(one)
        for repeat in range(given.repeats):
            for engine, dtype in pairs:
                result = takes_turns[engine, dtype].measure()
                results[engine, dtype].append(result)
                rate = result["tokens_per_s"]
                print(f"{repeat} {dtype:9} {engine:12} {rate:8.1f} tokens/s", file=sys.stderr)
    return {dtype: summary(results, dtype) for dtype in DTYPES}


def summary(results: dict[tuple[str, str], list[dict[str, Any]]], dtype: str) -> dict[str, Any]:
    """Medians and spread of one dtype; null for what was not run."""
    parts: dict[str, Any] = {}
    for engine in ENGINES:
        rates = [result["tokens_per_s"] for result in results.get((engine, dtype), [])]
        parts[f"{engine}_tokens_per_s"] = round(median(rates), 2) if rates else None
        parts[f"{engine}_spread"] = [round(min(rates), 2), round(max(rates), 2)] if rates else None
    ours = results.get(("in_flight", dtype), [])
    for engine in ENGINES:
        theirs = results.get((engine, dtype), [])
        if engine != "in_flight" and ours and theirs:
            ratios = [
                a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, theirs, strict=True)
            ]
            parts[f"in_flight_over_{engine}"] = round(median(ratios), 3)
            if theirs[0]["digest"] is not None:
                parts[f"same_tokens_as_{engine}"] = ours[0]["digest"] == theirs[0]["digest"]
    return parts


def show(results: dict[str, dict[str, Any]]) -> None:
    for dtype, parts in results.items():
        for engine in ENGINES:
            rate = parts[f"{engine}_tokens_per_s"]
            if rate is None:
                continue
            low, high = parts[f"{engine}_spread"]
            ratio = parts.get(f"in_flight_over_{engine}")
            beside = "" if ratio is None else f"  in flight is {ratio:.2f} times this"
            print(f"{dtype:9} {engine:12} {rate:8.1f} tokens/s ({low} to {high}){beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", action="append", choices=list(ENGINES))
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="last line is one object of JSON")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    load = Load(
        requests=given.requests,
        prompt_tokens=given.prompt_tokens,
        new_tokens=given.new_tokens,
        seed=given.seed,
    )
    if given.one:
        engine = ENGINES[given.engine[0]]
        with engine(find_model(given.model), load, given.dtype[0]) as run:
            run(warm_up_of(load))
            serve_turns(lambda: turn(run, load))
        return
    with suppress(AttributeError):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as folder:
        results = compare(given, load, Path(folder))
    show(results)
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
