"""`kvasir-rt profile`: how long a stage holds micro-batches here, for the simulator.

Measured on the stage's own code, with as many threads as a stage has: a *body* of some middle
layers, by rows, by decodes and context, and by prompt chunk and what lies behind it; the same with
fewer layers, for what a pass costs whatever its layers; and what head and tail take beside. Hops
and the bridge's work per lap are measured on a ring of two processes that compute nothing. The
file's form is `kvasir_scenario.profile`.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from kvasir_core.errors import PlanError
from kvasir_rt.expert_bench import measure_experts
from kvasir_rt.model_files import find_model, model_name
from kvasir_rt.neighbours import Neighbours
from kvasir_rt.stage_bench import ProfileOptions, StageBench
from kvasir_scenario.profile import Body, Crowd, Line, Plane, Profile, write_profile

Say = Callable[[str], None]

BODY_LAYERS_MAX = 10  # Deep enough that a layer's time shows, shallow enough to be quick.


def measure_profile(model: Path, name: str, options: ProfileOptions, say: Say) -> Profile:
    """Everything, one after another.

    Raises:
        PlanError: The model has too few layers for a stage between head and tail.
        ModelFileError: The file cannot be used.
    """
    import torch

    from kvasir_rt.gguf_file import open_gguf
    from kvasir_rt.hop_bench import measure_hops
    from kvasir_rt.model.shape import ModelShape
    from kvasir_rt.serve_plan import ELEMENT_BYTES

    torch.set_num_threads(options.threads)
    with open_gguf(model) as gguf:
        shape = ModelShape.of(gguf)
    depth = min(BODY_LAYERS_MAX, shape.layers - 2)
    if depth < 1:
        raise PlanError(
            f"{name} has {shape.layers} layers; a profile needs a stage between head and tail, "
            "so at least 3"
        )
    body, pass_ns = measure_body(model, shape.layers, depth, options, say)
    say("head and tail")
    head = measure_beside(StageBench(model, (0, depth), options), body.rows)
    tail = measure_beside(
        StageBench(model, (shape.layers - depth, shape.layers), options), body.rows
    )
    crowd = None
    if options.neighbours:
        say(f"beside {options.neighbours} busy")
        crowd = measure_crowd(model, (1, 1 + depth), options)
    say("experts")
    experts = measure_experts(model, options)
    say("hops")
    link, lap = measure_hops(shape.hidden, ELEMENT_BYTES[options.dtype], options.repeats)
    return Profile(
        machine=machine_name(options),
        model=name,
        dtype=options.dtype,
        commit=commit_name(),
        model_layers=shape.layers,
        hidden=shape.hidden,
        repeats=options.repeats,
        body=body.model_copy(update={"pass_ns": pass_ns}),
        head=head,
        tail=tail,
        link=link,
        lap=lap,
        experts=experts,
        crowd=crowd,
    )


def measure_body(
    model: Path, layers: int, depth: int, options: ProfileOptions, say: Say
) -> tuple[Body, int]:
    """The three tables of a middle stage, and what a pass of it costs whatever its layers."""
    say(f"{depth} layers by rows")
    stage = StageBench(model, (1, 1 + depth), options)
    rows: list[Line] = [(count, *stage.rows(count)) for count in options.rows]
    decode: list[Plane] = []
    for context in options.contexts:
        say(f"decodes of context {context}")
        points = stage.decodes(context)
        decode += [(width, context, *point) for width, point in points.items()]
    say("prompt chunks")
    prefill: list[Plane] = [
        (chunk, behind, *stage.prefill(chunk, behind))
        for chunk in options.chunks
        for behind in options.behind
    ]
    shortest = min(point[-2] for table in (rows, decode, prefill) for point in table)
    other = max(1, depth // 2)
    pass_ns = 0
    if other < depth and 1 + other < layers:
        say(f"{other} layers")
        small = StageBench(model, (1, 1 + other), options).rows(options.rows[0])[0]
        per_layer = (rows[0][1] - small) / (depth - other)
        pass_ns = round(max(0.0, rows[0][1] - per_layer * depth))
    tables = {"rows": rows, "decode": sorted(decode), "prefill": sorted(prefill)}
    return Body(layers=depth, pass_ns=0, **tables), min(pass_ns, shortest)


def measure_crowd(model: Path, layers: tuple[int, int], options: ProfileOptions) -> Crowd:
    """A body alone and beside busy neighbours, in turn."""
    with Neighbours(model, layers, options) as neighbours:
        stage = StageBench(model, layers, options)
        rows = []
        for count in options.rows:
            alone, _ = stage.rows(count)
            with neighbours.at_work():
                beside, _ = stage.rows(count)
            rows.append((count, alone, max(alone, beside)))
    return Crowd(neighbours=options.neighbours, rows=rows)


def measure_beside(stage: StageBench, body: Sequence[Line]) -> list[Line]:
    """What a stage takes more than a body of as many layers, by rows; never less than nothing."""
    lines: list[Line] = []
    for count, body_ns, body_spread in body:
        ns, spread = stage.rows(count)
        lines.append((count, max(0, ns - body_ns), max(spread, body_spread)))
    return lines


def machine_name(options: ProfileOptions) -> str:
    """What the figures hold for; no host name."""
    if options.device != "cpu":
        import torch

        return str(torch.cuda.get_device_name(options.device))
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    except OSError:
        pass
    threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
    return f"{processor}, {threads} of {os.cpu_count()} cores"


def commit_name() -> str:
    """The commit of this checkout, or `unknown`."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _sizes(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """`1,8,64`: ascending."""
    del context, parameter
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,8,64")
    sizes = tuple(int(part) for part in parts)
    if list(sizes) != sorted(set(sizes)):
        raise click.BadParameter(f"{text!r}: numbers must ascend")
    return sizes


@click.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), default="profile.json", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--threads", type=click.IntRange(1), default=1, help="As a stage will have.")
@click.option(
    "--neighbours",
    type=click.IntRange(0, 1024),
    default=0,
    help="Measure too what so many busy stages on other cores of this machine cost one.",
)
@click.option("--repeats", type=click.IntRange(2), default=5, show_default=True)
@click.option("--rows", callback=_sizes, default="1,2,4,8,16,32,64,128", show_default=True)
@click.option("--decodes", callback=_sizes, default="1,4,8,16", show_default=True)
@click.option("--contexts", callback=_sizes, default="16,128,512", show_default=True)
@click.option("--chunks", callback=_sizes, default="1,16,64,128", show_default=True)
@click.option("--behind", callback=_sizes, default="0,128,512", show_default=True)
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def command(
    model: str,
    out: Path,
    device: str,
    dtype: str,
    threads: int,
    neighbours: int,
    repeats: int,
    rows: tuple[int, ...],
    decodes: tuple[int, ...],
    contexts: tuple[int, ...],
    chunks: tuple[int, ...],
    behind: tuple[int, ...],
    quiet: bool,
) -> None:
    """Measure hold times of MODEL's stages here, for `costs: {kind: profile}`."""
    for name, sizes in (("rows", rows), ("decodes", decodes), ("chunks", chunks)):
        if sizes[0] < 1:
            raise click.UsageError(f"--{name} begins with {sizes[0]}; it must be at least 1")
    if len(rows) < 2:
        raise click.UsageError("--rows needs at least two sizes, to draw a line through")
    options = ProfileOptions(
        device=device,
        dtype=dtype,
        threads=threads,
        neighbours=neighbours,
        repeats=repeats,
        rows=rows,
        decodes=decodes,
        contexts=contexts,
        chunks=chunks,
        behind=behind,
    )
    say: Say = (lambda _: None) if quiet else (lambda text: print(text, file=sys.stderr))
    profile = measure_profile(find_model(model), model_name(model), options, say)
    write_profile(profile, out)
    if not quiet:
        print(out)
