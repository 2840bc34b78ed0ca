"""`kvasir-rt hub`: from options to a served hub, and back to nothing.

The order: options are checked, the port is bound (a taken one costs nothing), the database is
locked and read, models are opened, and then one line says where the hub is. SIGTERM and Ctrl-C
write the state and leave; connections under way get a few seconds.
"""

import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kvasir_core.errors import KvasirError
from kvasir_core.swarm import SwarmPolicy
from kvasir_core.swarm.events import StateRestored
from kvasir_core.swarm.refusal import Refused
from kvasir_core.swarm.words import ModelName
from kvasir_rt.bridge.server import AddressError, allow_descriptors, is_loopback, listen, url_of
from kvasir_rt.hub.app import make_app
from kvasir_rt.hub.auth import Keeper
from kvasir_rt.hub.control import Control
from kvasir_rt.hub.dials import Dials, Origin
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.models import ExpertModel, open_expert_model
from kvasir_rt.hub.record import Record
from kvasir_rt.hub.registry import Registry
from kvasir_rt.hub.relaying import RelayGate
from kvasir_rt.hub.server import HubServer
from kvasir_rt.hub.service import HubService
from kvasir_rt.hub.slices import SliceStore
from kvasir_rt.hub.store import Store, StoreError
from kvasir_rt.relay.embedded import embedded_relay
from kvasir_rt.swarm.event_log import EventLog
from kvasir_rt.swarm.identity import create_secret_file, read_secret_file
from kvasir_scenario.ending import heeded_stops
from kvasir_scenario.out_file import EVENT_LOG, STATUS, check_out_file
from kvasir_scenario.run_dir import named_output

TOKEN_VARIABLE = "KVASIR_HUB_TOKEN"  # noqa: S105 - Where it is looked for.
TOKEN_CHARACTERS_MIN = 16
TOKEN_BYTES_MAX = 1024
EXIT_BROKEN = 70  # As EX_SOFTWARE: start it again.
DATABASE = "hub.sqlite"
SERVICE_TOKEN = "service.token"  # noqa: S105 - A file's name.


class HubError(KvasirError):
    """What was asked for cannot be run as it stands; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """What the command line asks for.

    Attributes:
        state: Directory of the database, the service token and slices.
        database: URL; None is SQLite in `state`.
        models: Name and file of models whose slices are served.
        allowed: Coordinators elsewhere that may be polled.
        service_token: None takes it from the environment or `state`, where it is made if need be.
        join_token: What nodes show to be let in; None lets every key in.
        is_open: Listening beyond this machine, let every key in all the same.
        slices_bytes: What slices may take on disk.
        events: Where to write the core's event log.
        seed: Of retry times; None is drawn.
        has_relay: Embed the relay.
    """

    host: str = "127.0.0.1"
    port: int = 9000
    state: Path
    database: str | None = None
    models: tuple[tuple[str, Path], ...] = ()
    allowed: frozenset[Origin] = frozenset()
    policy: SwarmPolicy = field(default_factory=SwarmPolicy)
    limits: HubLimits = field(default_factory=HubLimits)
    service_token: str | None = None
    join_token: str | None = None
    is_open: bool = False
    slices_bytes: int = 20 << 30
    events: Path | None = None
    status_file: Path | None = None
    seed: int | None = None
    has_relay: bool = True


def default_state() -> Path:
    """Where a hub's state is, and where programs of the same user find its service token."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "kvasir" / "hub"


def find_service_token(state: Path) -> str:
    """The hub's service token: from the environment, else from its state directory.

    Raises:
        IdentityError: There is none, or others can read it.
    """
    return os.environ.get(TOKEN_VARIABLE) or read_secret_file(
        state / SERVICE_TOKEN, TOKEN_BYTES_MAX
    )


def run_hub(options: HubOptions) -> int:
    """Runs until a signal. Returns the exit status.

    Raises:
        KvasirError: It could not begin; nothing is left running.
    """
    _check(options)
    allow_descriptors(options.limits.http.connections_max)
    listener = listen(options.host, options.port)
    with listener:
        return asyncio.run(_run_until_signal(HubRun(options, listener)))


async def _run_until_signal(run: "HubRun") -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in heeded_stops():
        loop.add_signal_handler(number, stop.set)
    return await run.run(stop)


def _check(options: HubOptions) -> None:
    """What can be seen wrong without touching anything."""
    if not is_loopback(options.host) and options.join_token is None and not options.is_open:
        raise HubError(
            f"--host {options.host} can be reached from other machines, so nodes need a token: "
            "give --join-token-file, or --open to let every key in"
        )
    for name, token in (("service", options.service_token), ("join", options.join_token)):
        if token is not None and len(token) < TOKEN_CHARACTERS_MIN:
            raise HubError(
                f"the {name} token has {len(token)} characters; it must have at least "
                f"{TOKEN_CHARACTERS_MIN}"
            )
    if options.events is not None:
        check_out_file("--events", options.events, EVENT_LOG)
    if options.status_file is not None:
        check_out_file("--status-file", options.status_file, STATUS)
        if options.events is not None and options.events.resolve() == options.status_file.resolve():
            raise HubError(f"--events and --status-file are one file, {options.events}; name two")
    names = [name for name, _ in options.models]
    if len(set(names)) != len(names):
        raise HubError("--model names the same model twice")
    if len(names) > options.limits.models_max:
        raise HubError(f"{len(names)} models are named; at most {options.limits.models_max}")


class HubRun:
    """One run, from the bound port to the end."""

    def __init__(self, options: HubOptions, listener: socket.socket) -> None:
        self._options = options
        self._listener = listener
        self._url = url_of(listener)
        self.service: HubService | None = None  # Once it has started.
        self.status: int | None = None  # Once it has ended.

    async def run(self, stop: asyncio.Event) -> int:
        """Until `stop` is set. Returns the exit status."""
        options = self._options
        token = self._service_token()
        store = self._store()
        try:
            service = self.service = await self._service(store, token)
            relay = embedded_relay(RelayGate(service)) if options.has_relay else None
            app = make_app(
                service,
                options.limits,
                is_exposed=not is_loopback(options.host),
                relay=relay,
            )
            server = HubServer(app, self._listener, options.limits.http)
            serving = asyncio.create_task(server.serve())
            ends = [asyncio.create_task(event.wait()) for event in (stop, service.control.broken)]
            try:
                self._announce(service)
                await asyncio.wait([serving, *ends], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
                if relay is not None:
                    await relay.close()
                app.state.live.close()
                server.stop()
                await serving
                await service.close()
        finally:
            await asyncio.to_thread(store.close)
            if options.status_file is not None:
                options.status_file.unlink(missing_ok=True)
        self.status = EXIT_BROKEN if service.control.broken.is_set() else 0
        return self.status

    def _service_token(self) -> str:
        options = self._options
        if options.service_token is not None:
            return options.service_token
        if TOKEN_VARIABLE not in os.environ:
            create_secret_file(options.state / SERVICE_TOKEN, secrets.token_urlsafe(32))
        token = find_service_token(options.state)
        if len(token) < TOKEN_CHARACTERS_MIN:
            raise HubError(
                f"the service token has {len(token)} characters; it must have at least "
                f"{TOKEN_CHARACTERS_MIN}"
            )
        return token

    def _store(self) -> Store:
        options = self._options
        url = options.database or f"sqlite:///{options.state / DATABASE}"
        limits = options.limits
        store = Store(url, history_max=limits.history_max, identities_max=limits.nodes_max)
        store.open()
        return store

    async def _service(self, store: Store, token: str) -> HubService:
        """The started middle of the hub; closed again if it cannot start."""
        options = self._options
        files = await asyncio.to_thread(_open_models, options.models)
        restored = await asyncio.to_thread(store.load, options.policy.claim_ttl_ns)
        seed = secrets.randbits(32) if options.seed is None else options.seed
        control = Control(
            options.policy,
            random.Random(seed),  # noqa: S311 - Jitter, no secret.
            limits=options.limits,
            record=Record(options.limits.recent_max),
            store=store,
            events=_open_events(options.events, options.policy, seed),
        )
        service = HubService(
            control,
            Registry(control, Dials(options.allowed), options.limits, files),
            Keeper(
                store.hub,
                service_token=token,
                join_token=options.join_token,
                limits=options.limits,
            ),
            SliceStore(
                options.state / "slices",
                options.slices_bytes,
                options.policy.slice_experts_max,
                options.limits,
            ),
            options.limits,
        )
        try:
            service.slices.prepare()
            await control.start(None if restored is None else keep_known(restored, files))
            await service.registry.start()
        except Refused as error:
            raise StoreError(
                f"the kept state contradicts itself: {error}; move {DATABASE} away to start anew"
            ) from None
        return service

    def _announce(self, service: HubService) -> None:
        models = ", ".join(service.registry.files) or "none yet"
        self._write_status(service)
        print(f"{self._url} hub {service.keeper.hub[:12]}, models: {models}", flush=True)
        if TOKEN_VARIABLE not in os.environ and self._options.service_token is None:
            path = self._options.state / SERVICE_TOKEN
            print(f"coordinators need the service token in {path}", file=sys.stderr, flush=True)

    def _write_status(self, service: HubService) -> None:
        path = self._options.status_file
        if path is None:
            return
        host, port = self._listener.getsockname()[:2]
        status = {
            "state": "ready",
            "url": self._url,
            "host": host,
            "port": port,
            "pid": os.getpid(),
            "hub": service.keeper.hub,
        }
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(status) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise AddressError(f"cannot write the status file {path}: {error.strerror}") from None


def keep_known(restored: StateRestored, files: dict[ModelName, ExpertModel]) -> StateRestored:
    """What is kept of an earlier hub's state: not what contradicts today's model files.

    A model whose file changed is another model: its claims and proofs say nothing any more. One
    that has no file and about which nothing is known is forgotten, or renamed models would fill
    the limit.
    """
    busy = {*restored.recruiting}
    busy |= {row.model for row in restored.claims} | {row.model for row in restored.proven}
    models = tuple(
        model
        for model in restored.models
        if (files[model.model].facts == model if model.model in files else model.model in busy)
    )
    names = {model.model for model in models}
    return restored._replace(
        models=models,
        recruiting=tuple(name for name in restored.recruiting if name in names),
        claims=tuple(row for row in restored.claims if row.model in names),
        proven=tuple(row for row in restored.proven if row.model in names),
    )


def _open_models(models: tuple[tuple[str, Path], ...]) -> dict[ModelName, ExpertModel]:
    return {ModelName(name): open_expert_model(ModelName(name), path) for name, path in models}


def _open_events(path: Path | None, policy: SwarmPolicy, seed: int) -> EventLog | None:
    if path is None:
        return None
    with named_output(path):
        return EventLog(path, policy, seed)
