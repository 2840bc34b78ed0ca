"""The options of `kvasir-rt relay`: a relay beside the hub."""

import sys
from pathlib import Path
from typing import Any

import click

from kvasir_rt.swarm.cli_values import origin_of
from kvasir_scenario.option_numbers import Whole


@click.command("relay")
@click.option("--hub", required=True, metavar="URL", help="The hub: http(s)://HOST:PORT.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=Whole(0, 65535), default=9001, show_default=True)
@click.option(
    "--service-token-file",
    type=click.Path(path_type=Path),
    help="The hub's service token; or set KVASIR_HUB_TOKEN. [default: of a hub of this user here]",
)
@click.option(
    "--relay", "nats", metavar="nats://HOST:PORT", help="Reach other relays through this server."
)
@click.option(
    "--nats-credentials",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A NATS .creds file.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
)
@click.option("--log-form", type=click.Choice(["text", "json"]), default="text")
def command(**given: Any) -> None:
    """Carry bytes between workers and rings, both of whom dial.

    The hub embeds a relay; this one is for more machines (start the hub with --no-relay). Several
    of them work together through a NATS server: then give each the same --relay.
    """
    from kvasir_rt import logs
    from kvasir_rt.bridge.server import listen
    from kvasir_rt.hub.command import TOKEN_BYTES_MAX, default_state, find_service_token
    from kvasir_rt.relay.server import run_relay
    from kvasir_rt.swarm.identity import read_secret_file

    logs.configure(level=given["log_level"], form=given["log_form"])
    hub = origin_of("--hub", given["hub"])
    nats = given["nats"]
    if nats is not None and not nats.startswith(("nats://", "tls://")):
        raise click.UsageError(f"--relay is {nats[:80]!r}; it must be nats://HOST:PORT")
    credentials = given["nats_credentials"]
    if credentials is not None and nats is None:
        raise click.UsageError("--nats-credentials needs --relay nats://HOST:PORT")
    path = given["service_token_file"]
    token = (
        find_service_token(default_state())
        if path is None
        else read_secret_file(path, TOKEN_BYTES_MAX)
    )
    with listen(given["host"], given["port"]) as listener:
        sys.exit(
            run_relay(
                str(hub),
                token,
                listener,
                nats=nats,
                credentials=None if credentials is None else str(credentials),
            )
        )
