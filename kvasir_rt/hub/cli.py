"""The options of `kvasir-rt hub`."""

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.units import nanos
from kvasir_rt.swarm.cli_values import origin_of
from kvasir_scenario.option_numbers import SEED_MAX, Whole

REPLICAS_MAX = 1_000_000  # More nodes than any swarm has.
SLOTS_MAX = 1_000_000
POLICY_MAX = 1_000_000_000  # Seconds (31 years) or a count: what travels and is kept has 64 bits.
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=Whole(0, 65535), default=9000, show_default=True)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of database, service token and slices. [default: ~/.local/state/kvasir/hub]",
)
@click.option("--database", help="URL, for example postgresql+psycopg://USER@HOST/NAME.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=FILE",
    help="Cut slices of this model. Coordinators on this machine bring their own.",
)
@click.option(
    "--allow-coordinator",
    "allowed",
    multiple=True,
    metavar="http://HOST:PORT",
    help="A coordinator elsewhere whose slots may be polled.",
)
@click.option("--base", type=Whole(0, REPLICAS_MAX), help="Replicas wanted at rest.")
@click.option("--boost", type=Whole(0, REPLICAS_MAX), help="Replicas more under load.")
@click.option("--threshold", type=Whole(1, SLOTS_MAX), help="Busy slots that saturate.")
@click.option(
    "--policy",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any number of the swarm's policy, times as ..._s: hub_up_s=3.",
)
@click.option("--faster", type=Whole(1, 1000), default=1, help="Divide all policy times by this.")
@click.option(
    "--service-token-file",
    type=click.Path(path_type=Path),
    help="What coordinators show; or set KVASIR_HUB_TOKEN. [default: made in --state]",
)
@click.option(
    "--join-token-file", type=click.Path(path_type=Path), help="What nodes show to be let in."
)
@click.option("--open", "is_open", is_flag=True, help="Beyond this machine, let every node in.")
@click.option("--slices-bytes", default="20G", show_default=True, help="Slices kept on disk.")
@click.option("--no-relay", is_flag=True, help="A relay runs elsewhere.")
@click.option("--events", type=click.Path(path_type=Path), help="Write the core's event log.")
@click.option("--seed", type=Whole(0, SEED_MAX), help="Of retry times. [default: drawn]")
@click.option("--status-file", type=click.Path(path_type=Path), help="Written with the address.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
)
@click.option("--log-form", type=click.Choice(["text", "json"]), default="text")
def command(**given: Any) -> None:
    """Run the hub: demand market, slices and wiring of a swarm of expert workers."""
    from kvasir_rt import logs
    from kvasir_rt.hub.command import TOKEN_BYTES_MAX, HubOptions, default_state, run_hub
    from kvasir_rt.swarm.identity import read_secret_file

    logs.configure(level=given["log_level"], form=given["log_form"])

    def secret(path: Path | None) -> str | None:
        return None if path is None else read_secret_file(path, TOKEN_BYTES_MAX)

    options = HubOptions(
        host=given["host"],
        port=given["port"],
        state=given["state"] or default_state(),
        database=given["database"],
        models=tuple(_model(text) for text in given["models"]),
        allowed=frozenset(origin_of("--allow-coordinator", text) for text in given["allowed"]),
        policy=make_policy(
            tuple(given["settings"]),
            faster=given["faster"],
            **{name: given[name] for name in ("base", "boost", "threshold")},
        ),
        service_token=secret(given["service_token_file"]),
        join_token=secret(given["join_token_file"]),
        is_open=given["is_open"],
        slices_bytes=_size(given["slices_bytes"]),
        events=given["events"],
        status_file=given["status_file"],
        seed=given["seed"],
        has_relay=not given["no_relay"],
    )
    sys.exit(run_hub(options))


def make_policy(
    settings: tuple[str, ...], *, faster: int = 1, option: str = "--policy", **given: int | None
) -> SwarmPolicy:
    """The policy that the options ask for: divided first, then what was set by name.

    Raises:
        click.UsageError: An unknown name, or a value out of range.
    """
    policy = SwarmPolicy().faster(faster) if faster > 1 else SwarmPolicy()
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    kinds = {each.name: getattr(policy, each.name) for each in fields(policy)}
    said: set[str] = set()
    for text in settings:
        name, _, value = text.partition("=")
        is_time = name.endswith("_s") and f"{name.removesuffix('_s')}_ns" in kinds
        key = f"{name.removesuffix('_s')}_ns" if is_time else name
        if key not in kinds or (key.endswith("_ns") and not is_time):
            raise click.UsageError(f"{option} {text}: the policy has no number {name!r}")
        if key in said:
            raise click.UsageError(f"{option} {name} is given twice; say each number once")
        said.add(key)
        changes[key] = _value(f"{option} {text}", value, kinds[key], is_time=is_time)
    try:
        return replace(policy, **changes)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None


def _value(text: str, value: str, like: Any, *, is_time: bool) -> Any:
    """The value in the type of the policy's own."""
    try:
        if not isinstance(like, bool | str) and float(value) > POLICY_MAX:
            raise click.UsageError(f"{text}: found {value[:80]}; it must be at most {POLICY_MAX:,}")
        if is_time:
            return nanos(float(value))
        if isinstance(like, bool):
            return {"true": True, "false": False}[value.lower()]
        return type(like)(value)
    except (ValueError, KeyError, OverflowError):
        kind = "seconds" if is_time else type(like).__name__
        raise click.UsageError(f"{text}: {value!r} is no {kind}") from None


def _model(text: str) -> tuple[str, Path]:
    from kvasir_rt.swarm.protocol import NAME_RULE, is_name

    name, is_named, path = text.partition("=")
    if not is_named:
        name, path = Path(text).stem, text
    if not is_name(name) or not path:
        raise click.UsageError(f"--model {text[:200]!r} must be NAME=FILE; a name has {NAME_RULE}")
    return name, Path(path)


def _size(text: str) -> int:
    number, unit = text.rstrip("kKmMgGtT"), text[len(text.rstrip("kKmMgGtT")) :].lower()
    try:
        size = float(number) * SIZES[unit]
        if not 1 <= size < 2**63:
            raise ValueError
    except (KeyError, ValueError):
        raise click.UsageError(
            f"--slices-bytes is {text!r}; it must be a size such as 500M or 20G"
        ) from None
    return int(size)
