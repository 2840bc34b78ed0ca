"""`kvasir-rt serve --hub URL`: what is said of remote experts, checked and completed."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvasir_core.errors import KvasirError
from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_rt import wire
from kvasir_rt.bridge.server import is_loopback
from kvasir_rt.hub.dials import Origin
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.swarm import protocol
from kvasir_rt.swarm.frames import Dtype
from kvasir_rt.swarm.hub_http import HubError, HubHttp, HubRefused

ASK_S = 3.0


class ExpertsError(KvasirError):
    """These experts cannot be shared as asked; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """What the command line asks for.

    Attributes:
        hub: Where it listens.
        relay: `ws(s)://...`; None is the hub's own.
        service_token: The hub's.
        model: Its name at the hub; None: what clients call it.
        slots_url: The bridge, as hub and stages on other machines reach it; None: its own address.
        overlap: Most micro-batches that a stage holds at once; 1 blocks.
        dtype: Of rows on the way to workers; None: by what the stages compute in.
        policy: The coordinators' numbers.
        seed: Of which answers are checked.
        events: Directory for the coordinators' event logs.
        log_level: Of what the coordinators log.
    """

    hub: Origin
    relay: str | None = None
    service_token: str = field(repr=False)
    model: str | None = None
    slots_url: Origin | None = None
    overlap: int = 2
    dtype: Dtype | None = None
    policy: SwarmPolicy = field(default_factory=SwarmPolicy)
    seed: int = 0
    events: Path | None = None
    log_level: str = "warning"


def check_experts(
    options: ExpertOptions,
    shape: ModelShape,
    name: str,
    number_format: str,
    has_remote_stages: bool,
    say: Callable[[str], object],
) -> None:
    """What can be seen wrong before anything is started. A hub that is away may come later.

    Raises:
        ExpertsError: The model has no experts, honest workers' answers would be taken for wrong,
            the hub or a stage could not reach the bridge, or the hub refuses our token.
    """
    if not shape.experts:
        raise ExpertsError(
            "--hub: the model is dense (it has no routed experts), so there is nothing that "
            "workers could take over; serve it without --hub"
        )
    if options.dtype not in (None, rows_dtype(number_format)) and number_format != "float32":
        raise ExpertsError(
            f"--experts-dtype {options.dtype}: the stages compute in {number_format}, so answers "
            "can only be checked as closely as bf16; leave it out"
        )
    elsewhere = []
    if not options.hub.is_loopback:
        elsewhere.append(f"the hub at {options.hub}")
    if has_remote_stages:
        elsewhere.append("stages on other machines")
    if elsewhere and (options.slots_url is None or options.slots_url.is_loopback):
        raise ExpertsError(
            f"{' and '.join(elsewhere)} must reach this bridge's GET /slots: give --slots-url "
            "http://THIS-HOST:PORT, listen there (--host), and list that address at the hub "
            "(--allow-coordinator)"
        )
    if options.events is not None and not options.events.is_dir():
        raise ExpertsError(f"--experts-events {options.events} is no directory")
    try:
        asyncio.run(_ask(options, options.model or name))
    except HubRefused as refused:
        if refused.status in (401, 403):
            raise ExpertsError(
                f"--hub: {options.hub} refuses the service token ({refused}); give the hub's own "
                "with --hub-token-file or KVASIR_HUB_TOKEN"
            ) from None
    except HubError as error:
        say(f"the hub does not answer ({error}); all experts are computed here until it does")


async def _ask(options: ExpertOptions, model: str) -> None:
    """A question that needs the service token."""
    http = HubHttp(str(options.hub), ASK_S)
    try:
        await http.ask(
            protocol.DispatchMap,
            "GET",
            "/api/expert-dispatch-map",
            token=options.service_token,
            query={"model": model},
        )
    finally:
        await http.close()


def rows_dtype(number_format: str) -> Dtype:
    """How rows travel unless told: answers are checked as closely as this allows.

    A stage's own numbers are what a worker's are compared with, so they must be at least as close.
    """
    return "f32" if number_format == "float32" else "bf16"


def experts_spec(
    options: ExpertOptions | None, name: str, url: str, api_key: str | None, number_format: str
) -> wire.ExpertsSpec | None:
    """What the stages are told.

    Args:
        options: Checked; None computes all experts in the stages.
        name: What clients call the model.
        url: Where the bridge listens.
        api_key: What `GET /slots` needs.
        number_format: What the stages compute in.
    """
    if options is None:
        return None
    slots_url = str(options.slots_url) if options.slots_url else own_address(url)
    return wire.ExpertsSpec(
        hub=str(options.hub),
        relay=options.relay,
        service_token=options.service_token,
        model=options.model or name,
        brings_file=options.hub.is_loopback,
        slots_url=slots_url,
        slots_key=api_key,
        overlap=options.overlap,
        dtype=options.dtype or rows_dtype(number_format),
        policy=options.policy,
        seed=options.seed,
        events=str(options.events) if options.events else None,
        log_level=options.log_level,
    )


def own_address(url: str) -> str:
    """The bridge as this machine reaches it: one that listens everywhere is dialled at loopback."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    if is_loopback(host.strip("[]")) or host not in ("0.0.0.0", "[::]"):  # noqa: S104 - Compared.
        return url
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else '[::1]'}:{port}"  # noqa: S104
