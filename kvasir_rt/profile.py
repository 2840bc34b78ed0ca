"""`kvasir-rt profile`: how long a stage holds micro-batches here, for the simulator.

Measured on the stage's own code, with as many threads as a stage has: a *body* of some middle
layers, by rows, by decodes and context, and by prompt chunk and what lies behind it; the same with
fewer layers, for what a pass costs whatever its layers; and what head and tail take beside. Hops
and the bridge's work per lap are measured on a ring of two processes that compute nothing. The
file's form is `kvasir_scenario.profile`. With `--rescale` only the machine's speed of the moment is
measured, and an earlier profile scaled to it (`kvasir_rt.rescale`).
"""

import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click

from kvasir_core.errors import PlanError, ScenarioError
from kvasir_rt.expert_bench import measure_experts
from kvasir_rt.model_files import find_model, model_name
from kvasir_rt.neighbours import Neighbours, check_neighbours
from kvasir_rt.rescale import SpeedProbe, few_sizes
from kvasir_rt.serve_plan import check_devices
from kvasir_rt.stage_bench import (
    ProfileOptions,
    StageBench,
    Timer,
    in_pairs,
    point,
    resting,
    rounds,
)
from kvasir_scenario.digits import whole_number
from kvasir_scenario.option_numbers import THREADS_MAX, TOKENS_MAX, Whole
from kvasir_scenario.out_file import PROFILE, check_out_file
from kvasir_scenario.profile import (
    Body,
    Crowd,
    Line,
    Plane,
    Profile,
    Rest,
    read_profile,
    scaled,
    shortest_hold,
    write_profile,
)

Say = Callable[[str], None]

PAIRED_ROUNDS = 3
REST_NS = 20_000_000  # What a stage usually waits for the others; longer ones cost no more.
BODY_LAYERS_MAX = 10  # Deep enough that a layer's time shows, shallow enough to be quick.


def measure_profile(model: Path, name: str, options: ProfileOptions, say: Say) -> Profile:
    """Everything, one after another.

    Raises:
        PlanError: The model has too few layers for a stage between head and tail, or its context
            is shorter than what is to be measured.
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
    if options.context > shape.context:
        raise PlanError(
            f"{name} has a context of {shape.context} tokens; these sizes need {options.context} "
            "(with room for the measured steps): give smaller --contexts, --behind or --chunks, or "
            "fewer --repeats"
        )
    body, head, tail = measure_stages(model, shape.layers, depth, options, say)
    crowd, rest = measure_surroundings(model, (1, 1 + depth), options, say)
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
        body=body,
        head=head,
        tail=tail,
        link=link,
        lap=lap,
        experts=experts,
        crowd=crowd,
        rest=rest,
    )


def measure_stages(
    model: Path, layers: int, depth: int, options: ProfileOptions, say: Say
) -> tuple[Body, list[Line], list[Line]]:
    """A middle stage's tables with what a pass costs whatever its layers; head's, tail's lines.

    All in the same rounds: what head and tail take beside a body is a small difference of times,
    so it is the median of the rounds' differences.
    """
    say(f"loading stages of {depth} layers")
    body = StageBench(model, (1, 1 + depth), options)
    head = StageBench(model, (0, depth), options)
    tail = StageBench(model, (layers - depth, layers), options)
    other = max(1, depth // 2)
    timers: dict[tuple[str, int, int], Timer] = {}
    for context in options.contexts:
        for width, timer in body.decodes(context).items():
            timers["decode", width, context] = timer
    for chunk, behind in itertools.product(options.chunks, options.behind):
        timers["prefill", chunk, behind] = body.prefill(chunk, behind)
    for count in options.rows:
        timers["rows", count, 0] = body.rows(count)
        timers["head", count, 0] = head.rows(count)
        timers["tail", count, 0] = tail.rows(count)
    least = options.rows[0]
    if other < depth:
        timers["small", least, 0] = StageBench(model, (1, 1 + other), options).rows(least)
    times = rounds(timers, options.repeats, say)
    points = {key: point(taken) for key, taken in times.items()}

    def plane(name: str) -> list[Plane]:
        return sorted((*key[1:], *point) for key, point in points.items() if key[0] == name)

    def beside(name: str) -> list[Line]:
        lines: list[Line] = []
        for count in options.rows:
            taken, alone = times[name, count, 0], times["rows", count, 0]
            more = median(whole - part for whole, part in zip(taken, alone, strict=True))
            spread = max(points[name, count, 0][1], points["rows", count, 0][1])
            lines.append((count, max(0, round(more)), spread))
        return lines

    rows: list[Line] = [(count, *points["rows", count, 0]) for count in options.rows]
    decode, prefill = plane("decode"), plane("prefill")
    pass_ns = 0
    if other < depth:
        per_layer = (rows[0][1] - points["small", least, 0][0]) / (depth - other)
        pass_ns = min(
            round(max(0.0, rows[0][1] - per_layer * depth)), shortest_hold(rows, decode, prefill)
        )
    made = Body(layers=depth, pass_ns=pass_ns, rows=rows, decode=decode, prefill=prefill)
    return made, beside("head"), beside("tail")


def measure_surroundings(
    model: Path, layers: tuple[int, int], options: ProfileOptions, say: Say
) -> tuple[Crowd | None, Rest]:
    """A body beside busy neighbours, and after a rest: few sizes, small costs, so many times."""
    stage = StageBench(model, layers, options)
    timers = {count: stage.rows(count) for count in few_sizes(options.rows)}
    pairs = PAIRED_ROUNDS * options.repeats
    say("after a rest")
    rest = Rest(ns=REST_NS, rows=in_pairs(timers, pairs, resting(REST_NS)))
    if not options.neighbours:
        return None, rest
    say(f"beside {options.neighbours} busy")
    with Neighbours(model, layers, options) as neighbours:
        rows = neighbours.beside(timers, pairs)
    return Crowd(neighbours=options.neighbours, rows=rows), rest


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


def rescaled_now(file: Path, model: Path, name: str, options: ProfileOptions) -> Profile:
    """The profile in `file`, scaled to how fast the machine is now.

    Raises:
        ScenarioError: The file cannot be read, or was measured on something else.
    """
    profile = read_profile(file)
    for what, measured, here in (
        ("machine", profile.machine, machine_name(options)),
        ("model", profile.model, name),
        ("dtype", profile.dtype, options.dtype),
    ):
        if measured != here:
            raise ScenarioError(
                f"{file}: {what} of the profile is {measured!r}, here it is {here!r}; measure a "
                "profile of its own (leave --rescale out)"
            )
    with SpeedProbe(model, profile, options) as probe:
        return scaled(profile, *probe.take())


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
    found = [whole_number(part.strip(), 0, TOKENS_MAX) for part in parts]
    sizes = tuple(size for size in found if size is not None)
    if len(sizes) < len(parts):
        raise click.BadParameter(f"{text[:40]!r} is no list of numbers such as 1,8,64")
    if list(sizes) != sorted(set(sizes)):
        raise click.BadParameter(f"{text!r}: numbers must ascend")
    return sizes


@click.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), default="profile.json", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--threads", type=Whole(1, THREADS_MAX), default=1, help="As a stage will have.")
@click.option(
    "--neighbours",
    type=Whole(0, 1024),
    default=0,
    help="Measure too what so many busy stages on other cores of this machine cost one.",
)
@click.option("--repeats", type=Whole(2, 1000), default=5, show_default=True)
@click.option("--rows", callback=_sizes, default="1,2,4,8,16,32,64,128", show_default=True)
@click.option("--decodes", callback=_sizes, default="1,4,8,16", show_default=True)
@click.option("--contexts", callback=_sizes, default="16,128,512", show_default=True)
@click.option("--chunks", callback=_sizes, default="1,16,64,128", show_default=True)
@click.option("--behind", callback=_sizes, default="0,128,512", show_default=True)
@click.option(
    "--rescale",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Measure but the machine's speed of the moment, and scale this earlier profile to it.",
)
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
    rescale: Path | None,
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
    check_out_file("--out", out, PROFILE, (".json",))
    check_devices([device])
    check_neighbours(neighbours)
    if rescale is None:
        profile = measure_profile(find_model(model), model_name(model), options, say)
    else:
        profile = rescaled_now(rescale, find_model(model), model_name(model), options)
    write_profile(profile, out)
    if not quiet:
        print(out)
