"""The options of `kvasir-rt serve` that concern remote experts."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvasir_rt.swarm.cli_values import name_of, origin_of, relay_of
from kvasir_scenario.option_numbers import SEED_MAX, Whole

if TYPE_CHECKING:
    from kvasir_rt.scenario_swarm import HubAccess
    from kvasir_rt.serve_experts import ExpertOptions

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

OPTIONS = (
    click.option(
        "--hub", metavar="URL", help="Share routed experts with this hub's workers under load."
    ),
    click.option(
        "--hub-token-file",
        type=click.Path(path_type=Path),
        help="The hub's service token; or set KVASIR_HUB_TOKEN. [default: of a hub of this user "
        "here]",
    ),
    click.option("--hub-model", help="What the hub calls the model. [default: as clients do]"),
    click.option(
        "--slots-url",
        metavar="URL",
        help="This bridge as a hub elsewhere reaches it: http://HOST:PORT.",
    ),
    click.option(
        "--relay",
        metavar="URL",
        help="ws(s)://HOST:PORT/api/expert-relay. [default: the hub's own]",
    ),
    click.option(
        "--experts-overlap",
        type=Whole(1, 1024),
        help="Micro-batches that a stage holds at once while experts are awaited. [default: 2]",
    ),
    click.option(
        "--experts-dtype",
        type=click.Choice(["f32", "f16", "bf16"]),
        help="Of rows on the way to workers. [default: f32, or bf16 if stages compute so]",
    ),
    click.option(
        "--experts-policy",
        multiple=True,
        metavar="NAME=VALUE",
        help="Any number of the coordinators' policy, times as ..._s: call_deadline_s=1.",
    ),
    click.option(
        "--experts-faster",
        type=Whole(1, 1000),
        help="Divide all times of the coordinators' policy by this; tell the hub the same.",
    ),
    click.option("--experts-seed", type=Whole(0, SEED_MAX), help="Of which answers are checked."),
    click.option(
        "--experts-events",
        type=click.Path(path_type=Path, file_okay=False),
        help="Directory for each coordinator's event log.",
    ),
)


def expert_options(function: FunctionT) -> FunctionT:
    """Add them to a command."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def read_expert_options(given: dict[str, Any]) -> "ExpertOptions | None":
    """What was asked for; None without `--hub`.

    Raises:
        click.UsageError: An option is wrong, or says something of experts and there is no hub.
        KvasirError: The token cannot be read.
    """
    if given["hub"] is None:
        names = ("hub_token_file", "hub_model", "slots_url", "relay", "experts_overlap",
                 "experts_dtype", "experts_policy", "experts_faster", "experts_seed",
                 "experts_events")  # fmt: skip
        said = next((name for name in names if given[name] not in (None, ())), None)
        if said is not None:
            raise click.UsageError(f"--{said.replace('_', '-')} needs --hub URL")
        return None
    from kvasir_rt.hub.cli import make_policy
    from kvasir_rt.serve_experts import ExpertOptions

    slots_url = given["slots_url"]
    return ExpertOptions(
        hub=origin_of("--hub", given["hub"]),
        relay=relay_of(given["relay"]),
        service_token=read_service_token(given["hub_token_file"]),
        model=name_of("--hub-model", given["hub_model"]),
        slots_url=None if slots_url is None else origin_of("--slots-url", slots_url),
        overlap=given["experts_overlap"] or 2,
        dtype=given["experts_dtype"],
        policy=make_policy(
            tuple(given["experts_policy"]),
            option="--experts-policy",
            faster=given["experts_faster"] or 1,
        ),
        seed=given["experts_seed"] or 0,
        events=given["experts_events"],
        log_level=given["log_level"],
    )


def read_access(hub: str | None, token_file: Path | None) -> "HubAccess | None":
    """A hub on this machine, for a scenario's run.

    Raises:
        click.UsageError: No such address, or one elsewhere.
        KvasirError: The token cannot be read.
    """
    if hub is None:
        if token_file is not None:
            raise click.UsageError("--hub-token-file needs --hub URL")
        return None
    from kvasir_rt.scenario_swarm import HubAccess

    origin = origin_of("--hub", hub)
    if not origin.is_loopback:
        raise click.UsageError(
            f"--hub {origin}: a scenario's slots are shown at loopback only, so its hub must run "
            "on this machine; a model is served to a hub elsewhere with `kvasir-rt serve`"
        )
    return HubAccess(origin, read_service_token(token_file))


def read_service_token(path: Path | None) -> str:
    """From a file, else from the environment or a hub of this user here. Raises KvasirError."""
    from kvasir_rt.hub.command import TOKEN_BYTES_MAX, default_state, find_service_token
    from kvasir_rt.swarm.identity import read_secret_file

    if path is None:
        return find_service_token(default_state())
    return read_secret_file(path, TOKEN_BYTES_MAX)
