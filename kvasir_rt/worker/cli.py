"""The options of `kvasir-rt worker`."""

import sys
from pathlib import Path
from typing import Any

import click

from kvasir_rt.swarm.cli_values import name_of, origin_of, relay_of
from kvasir_scenario.digits import whole_number
from kvasir_scenario.option_numbers import SECONDS_MAX, THREADS_MAX, Number, Whole

EXPERTS_MAX = 1_000_000  # Of all layers together: above what any model has.
DELAY_MS_MAX = 3.6e6  # An hour.

SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _size(_context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Bytes: 500M, 8G, 1000000."""
    if text is None:
        return None
    number, unit = text.rstrip("KMGTkmgt"), text[len(text.rstrip("KMGTkmgt")) :].upper()
    count = whole_number(number, 1, 2**63 - 1)
    if count is None or unit not in SIZES:
        raise click.BadParameter(
            f"{text[:40]!r} is no size; write 500M, 8G or 1000000", param=option
        )
    return count * SIZES[unit]


@click.command("worker")
@click.option("--hub", required=True, metavar="URL", help="The hub: http(s)://HOST:PORT.")
@click.option(
    "--relay", metavar="URL", help="ws(s)://HOST:PORT/api/expert-relay. [default: the hub's]"
)
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    help="Key and slices on disk. [default: ~/.local/state/kvasir/worker]",
)
@click.option("--store-bytes", default="20G", show_default=True, callback=_size)
@click.option(
    "--max-experts", type=Whole(1, EXPERTS_MAX), default=64, show_default=True, help="Held at once."
)
@click.option("--memory", callback=_size, help="For weights: 8G. [default: half of what is free]")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: by device]")
@click.option("--threads", type=Whole(1, THREADS_MAX), help="Compute threads.")
@click.option("--model", help="Serve only this model.")
@click.option(
    "--join-token-file", type=click.Path(path_type=Path), help="Where the hub invites its nodes."
)
@click.option(
    "--drain-s",
    type=Number(0, SECONDS_MAX),
    default=30.0,
    show_default=True,
    help="Longest wait for calls to stop coming, after SIGTERM.",
)
@click.option(
    "--quiet-s",
    type=Number(0, SECONDS_MAX),
    default=6.0,
    show_default=True,
    help="After SIGTERM: leave when no call came for so long.",
)
@click.option(
    "--delay-ms",
    type=Number(0, DELAY_MS_MAX),
    default=0.0,
    help="Hold every answer back so long: an experiment with distance.",
)
@click.option("--status-file", type=click.Path(path_type=Path), help="Written with the state.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
@click.option("--log-form", type=click.Choice(["text", "json"]), default="text")
def command(**given: Any) -> None:
    """Serve experts of a mixture-of-experts model to whoever the hub finds in need.

    Opens outgoing connections only. SIGTERM leaves in order, a second one at once.
    """
    from kvasir_rt import logs
    from kvasir_rt.swarm.identity import read_secret_file
    from kvasir_rt.worker.command import default_store, run_worker
    from kvasir_rt.worker.options import WorkerOptions

    logs.configure(level=given["log_level"], form=given["log_form"])
    token_file = given["join_token_file"]
    options = WorkerOptions(
        hub=str(origin_of("--hub", given["hub"])),
        relay=relay_of(given["relay"]),
        store=given["store"] or default_store(),
        store_bytes=given["store_bytes"],
        experts_max=given["max_experts"],
        memory_bytes=given["memory"],
        device=given["device"],
        dtype=given["dtype"],
        threads=given["threads"],
        model=name_of("--model", given["model"]),
        join_token=None if token_file is None else read_secret_file(token_file, 1024),
        drain_s=given["drain_s"],
        quiet_s=given["quiet_s"],
        delay_s=given["delay_ms"] / 1000,
        status_file=given["status_file"],
    )
    sys.exit(run_worker(options))
