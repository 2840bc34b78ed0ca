"""`kvasir-rt`: serve a model, be a stage, run a scenario on real processes.

A first argument that is no subcommand is a scenario. Exit status: 0 done, 1 it could not go on
(a taken port, a ring that gave up), 2 what was asked for is wrong. Everything heavy is imported by
the command that needs it, so `--help` is quick.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvasir_core.plan import STAGES_MAX, WIDTH_MAX
from kvasir_rt.serve_cli import expert_options, read_expert_options
from kvasir_scenario.digits import whole_number
from kvasir_scenario.ending import run_command
from kvasir_scenario.first_word import check_first_word
from kvasir_scenario.option_numbers import (
    CORES_MAX,
    SECONDS_MAX,
    THREADS_MAX,
    TOKENS_MAX,
    Number,
    Whole,
)

STAGES_DEFAULT = 2
SCENARIO = "SCENARIO"  # The name, in the help, of the command that no name selects.

# Commands with a module of their own: name -> (module, attribute, help). Imported when used.
ELSEWHERE = {
    "bench": ("kvasir_rt.bench", "command", "Compare drained and in-flight on this machine."),
    "hub": ("kvasir_rt.hub.cli", "command", "Run the hub: demand market and wiring."),
    "profile": ("kvasir_rt.profile", "command", "Measure hold times for the simulator."),
    "relay": ("kvasir_rt.relay.cli", "command", "Carry bytes between workers and rings."),
    "worker": ("kvasir_rt.worker.cli", "command", "Serve experts for coordinators."),
    SCENARIO: ("kvasir_rt.run_scenario", "command", "Run a scenario for real, write its report."),
}


class RuntimeGroup(click.Group):
    """Subcommands, and a scenario where none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else "--help"
        commands = self.list_commands(ctx)
        if first not in commands and first not in ("--help", "-h", "--version"):
            check_first_word(ctx, first, [name for name in commands if name != SCENARIO])
            args = [SCENARIO, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *filter(_is_installed, ELSEWHERE)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = ELSEWHERE[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does, but without importing every command for its help."""
        rows = []
        for name in self.list_commands(ctx):
            if name in ELSEWHERE:
                rows.append((name, ELSEWHERE[name][2]))
            else:
                command = super().get_command(ctx, name)
                assert command is not None
                rows.append((name, command.get_short_help_str()))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _is_installed(name: str) -> bool:
    module = ELSEWHERE[name][0]
    package = module.rpartition(".")[0]
    return (
        importlib.util.find_spec(package) is not None
        and importlib.util.find_spec(module) is not None
    )


@click.group(cls=RuntimeGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvasir")
def group() -> None:
    """Serve large models with in-flight rings of stages.

    A first argument that is no command is a scenario: kvasir-rt scenarios/4stage_tiny.yaml
    """


@group.command()
@click.argument("model")
@click.option(
    "--stages",
    type=Whole(2, STAGES_MAX),
    help="Stages of the ring, at least 2 [default: 2, or as --layers says].",
)
@click.option(
    "--layers",
    help="Layers per stage, head first: 18,12. Or auto: as measured [default: estimated].",
)
@click.option(
    "--device", default="cpu", show_default=True, help="cpu, cuda:0, or one per stage: cuda:0,cpu."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: by device]")
@click.option("--pin", is_flag=True, help="Each stage on a processor core of its own.")
@click.option("--context", type=Whole(1, TOKENS_MAX), help="Most tokens of a request.")
@click.option("--row-width", type=Whole(1, WIDTH_MAX), default=128, show_default=True)
@click.option("--micro-batch-width", type=Whole(1, WIDTH_MAX), default=8, show_default=True)
@click.option("--window", default="auto", show_default=True, help="Open micro-batches, or auto.")
@click.option("--running-max", type=Whole(1, WIDTH_MAX), default=32, show_default=True)
@click.option(
    "--kv-tokens", type=Whole(1, TOKENS_MAX), help="KV capacity of each stage, in tokens."
)
@click.option("--packer", default="cohort", show_default=True, help="How micro-batches are made.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=Whole(0, 65535), default=8000, show_default=True)
@click.option("--name", help="What clients call the model.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="Holds the key that clients must send; or set KVASIR_API_KEY.",
)
@click.option(
    "--status-file", type=click.Path(path_type=Path), help="Written with address and state."
)
@click.option("--queue-max", type=Whole(0, TOKENS_MAX), default=256, help="Requests that may wait.")
@click.option("--deadline-s", type=Number(0.001, SECONDS_MAX), default=600.0, show_default=True)
@click.option("--drain-s", type=Number(0, SECONDS_MAX), default=30.0, show_default=True)
@click.option("--remote", default="", help="Stages that join from other machines: 1,2.")
@click.option("--ring-listen", help="HOST:PORT where those stages join.")
@click.option("--ring-keys", type=click.Path(path_type=Path), help="Keeps the ring's keys.")
@click.option(
    "--launcher", type=click.Choice(["processes", "ray"]), default="processes", show_default=True,
    help="Who starts the stages.",
)  # fmt: skip
@click.option("--cluster", metavar="auto|HOST:PORT", help="With --launcher ray. [default: auto]")
@click.option("--events", type=click.Path(path_type=Path), help="Write the core's event log.")
@expert_options
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
)
@click.option("--log-form", type=click.Choice(["text", "json"]), default="text")
def serve(**given: Any) -> None:
    """Serve MODEL (a GGUF file, or smollm2-135m) over an OpenAI-compatible API.

    With --hub, routed experts of a mixture-of-experts model may be computed by workers under load.
    """
    from kvasir_rt import logs
    from kvasir_rt.api_key import read_api_key
    from kvasir_rt.bridge.limits import Limits
    from kvasir_rt.serve import ServeOptions
    from kvasir_rt.serve import serve as run
    from kvasir_rt.serve_plan import RingOptions

    logs.configure(level=given["log_level"], form=given["log_form"])
    experts = read_expert_options(given)
    ring = RingOptions(
        stages=_stages(given["stages"], given["layers"]),
        layers=given["layers"],
        devices=tuple(given["device"].split(",")),
        dtype=given["dtype"],
        context=given["context"],
        row_width=given["row_width"],
        micro_batch_width=given["micro_batch_width"],
        window=_number_or_auto("--window", given["window"]),
        running_max=given["running_max"],
        kv_tokens=given["kv_tokens"],
        packer=given["packer"],
        overlap=experts.overlap if experts is not None else 1,
    )
    options = ServeOptions(
        model=given["model"],
        name=given["name"],
        ring=ring,
        host=given["host"],
        port=given["port"],
        api_key=read_api_key(given["api_key_file"]),
        status_file=given["status_file"],
        limits=Limits(waiting_max=given["queue_max"], deadline_s=given["deadline_s"]),
        drain_s=given["drain_s"],
        pin=given["pin"],
        remote=_stage_indexes(given["remote"]),
        ring_listen=given["ring_listen"],
        ring_keys=given["ring_keys"],
        events=given["events"],
        experts=experts,
    )
    if given["launcher"] == "processes":
        if given["cluster"] is not None:
            raise click.UsageError("--cluster needs --launcher ray")
        sys.exit(run(options))
    if options.remote or options.ring_listen or options.ring_keys:
        raise click.UsageError("--launcher ray places every stage; leave --remote and --ring-* out")
    from kvasir_rt.ray_stages import placed_on_ray
    from kvasir_rt.serve import say

    with placed_on_ray(options, given["cluster"] or "auto", say) as placed:
        sys.exit(run(placed))


@group.command()
@click.option("--join", "bridge", required=True, help="HOST:PORT of the ring's bridge.")
@click.option("--listen", required=True, help="HOST:PORT where the stage before this one sends.")
@click.option("--model", required=True, help="This machine's copy of the model file.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Or set KVASIR_JOIN_TOKEN.")
@click.option("--threads", type=Whole(1, THREADS_MAX), help="Compute threads.")
@click.option("--core", type=Whole(0, CORES_MAX), help="The one processor core to run on.")
def stage(
    bridge: str,
    listen: str,
    model: str,
    token_file: Path | None,
    threads: int | None,
    core: int | None,
) -> None:
    """Be a stage of a ring whose bridge runs on another machine."""
    from kvasir_rt.join import find_token, join_ring
    from kvasir_rt.model_files import find_model

    join_ring(
        bridge,
        listen,
        token=find_token(token_file),
        model=find_model(model),
        threads=threads,
        core=core,
        say=lambda text: click.echo(text, err=True),
    )


def _stages(stages: int | None, layers: str | None) -> int:
    """How many; `--layers 18,12` names two."""
    named = layers.count(",") + 1 if layers is not None and layers != "auto" else None
    if None not in (stages, named) and stages != named:
        raise click.UsageError(
            f"--stages is {stages}, but --layers {str(layers)[:40]} names {named}; leave one out"
        )
    return stages or named or STAGES_DEFAULT


def _number_or_auto(option: str, text: str) -> int | None:
    if text == "auto":
        return None
    number = whole_number(text, 1, WIDTH_MAX)
    if number is None:
        raise click.UsageError(
            f"{option} is {text[:40]!r}; it must be auto or a number from 1 to {WIDTH_MAX}"
        )
    return number


def _stage_indexes(text: str) -> frozenset[int]:
    stages = set()
    for part in filter(None, map(str.strip, text.split(","))):
        stage = whole_number(part, 0, STAGES_MAX - 1)
        if stage is None:
            raise click.UsageError(
                f"--remote is {text[:40]!r}; it must be stage indexes such as 1,2"
            )
        stages.add(stage)
    return frozenset(stages)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and end the process."""
    run_command(group, "kvasir-rt", arguments)


if __name__ == "__main__":
    main()
