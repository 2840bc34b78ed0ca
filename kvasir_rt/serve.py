"""`kvasir-rt serve`: from a model's name to a served port, and back to nothing.

The order: the model's header is read and the plan made (a wrong file opens no port), the port is
bound (a taken one costs no loading), HTTP answers "loading", the stages are spawned and load, and
then one line says what is served. SIGTERM drains; Ctrl-C and SIGHUP end at once; none leaves a
process.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir_core.plan import Plan
from kvasir_rt import wire
from kvasir_rt.api_key import API_KEY_VARIABLE
from kvasir_rt.bridge.app import Bridge
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.bridge.jobs import Served
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.queue_clock import QueueClock
from kvasir_rt.bridge.server import (
    AddressError,
    BridgeServer,
    allow_descriptors,
    is_loopback,
    listen,
    url_of,
)
from kvasir_rt.engine import Engine, EngineOptions
from kvasir_rt.errors import ServeError
from kvasir_rt.gguf_file import GgufFile, open_gguf
from kvasir_rt.join import RingKeys, tcp_endpoint
from kvasir_rt.logs import log_event
from kvasir_rt.measure_split import measure_apart
from kvasir_rt.member import CrewOptions
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model_files import find_model, model_name
from kvasir_rt.ring_errors import RingDown
from kvasir_rt.serve_experts import ExpertOptions, check_experts, experts_spec
from kvasir_rt.serve_plan import AUTO, RingOptions, check_devices, plan_for
from kvasir_rt.switchboard import LineOptions, threads_of
from kvasir_scenario.ending import heeded_stops
from kvasir_scenario.out_file import EVENT_LOG, STATUS, check_out_file

if TYPE_CHECKING:
    from kvasir_rt.tokenizer import Tokenizer

logger = logging.getLogger("kvasir.serve")

PROGRESS_S = 0.1
WATCH_S = 1.0  # How often a ring that has given up is looked for.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command line asks for.

    Attributes:
        model: A path, or the short name of a packaged model.
        name: What clients call it; None takes it from `model`.
        ring: The ring's numbers.
        api_key: None on loopback only.
        status_file: Where the address and state are written, for programs.
        drain_s: How long requests may go on after SIGTERM.
        pin: Each stage on its own core.
        remote: Indexes of stages that join from other machines.
        ring_listen: `HOST:PORT` where they join.
        ring_keys: Where the ring's keys are kept, so that its token survives a restart.
        events: Where to write the core's event log.
        experts: How routed experts are shared; None computes them in the stages.
    """

    model: str
    name: str | None = None
    ring: RingOptions = field(default_factory=RingOptions)
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    status_file: Path | None = None
    limits: Limits = field(default_factory=Limits)
    drain_s: float = 30.0
    pin: bool = False
    remote: frozenset[int] = frozenset()
    ring_listen: str | None = None
    ring_keys: Path | None = None
    events: Path | None = None
    experts: ExpertOptions | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before any weight is read."""

    gguf: GgufFile
    shape: ModelShape
    plan: Plan
    name: str


def prepare(options: ServeOptions) -> Prepared:
    """Reads the model's header and makes the plan; no weight is read, nothing is started.

    Raises:
        KvasirError: The file, the plan or the address cannot be used.
    """
    if not is_loopback(options.host) and options.api_key is None:
        raise ServeError(
            f"--host {options.host} can be reached from other machines, so an API key is needed: "
            f"set {API_KEY_VARIABLE} or give --api-key-file"
        )
    if options.name is not None and not options.name.strip():
        raise ServeError("--name is empty; leave it out to take the model's")
    if options.name is not None and not options.name.isprintable():
        raise ServeError(
            f"--name is {options.name[:40]!r}; it must be one line that can be printed"
        )
    if not options.remote and (options.ring_listen or options.ring_keys):
        raise ServeError(
            "--ring-listen and --ring-keys are for stages that join; say which: --remote 1,2"
        )
    gguf = open_gguf(find_model(options.model))
    shape = ModelShape.of(gguf)
    name = options.name or model_name(options.model)
    if options.experts is not None:
        number_format, has_remote = options.ring.number_format, bool(options.remote)
        check_experts(options.experts, shape, name, number_format, has_remote, say)
    plan = plan_for(shape, options.ring)
    if options.events is not None:
        check_out_file("--events", options.events, EVENT_LOG)
    if options.status_file is not None:
        check_out_file("--status-file", options.status_file, STATUS)
    here = [
        device
        for stage, device in enumerate(options.ring.devices_of(plan.stages))
        if stage not in options.remote
    ]
    check_devices(here)
    if options.remote and options.ring_listen is None:
        raise ServeError("--remote needs --ring-listen HOST:PORT, where those stages join")
    if options.remote and max(options.remote) >= plan.stages:
        raise ServeError(f"--remote names stage {max(options.remote)} of {plan.stages} stages")
    return Prepared(gguf, shape, plan, name)


def measured_plan(options: ServeOptions, prepared: Prepared) -> Plan:
    """The plan with layers split by measured time.

    Raises:
        RingDown: The measurement failed.
    """
    plan = prepared.plan
    say("measuring layers, head and tail")
    beside = measure_apart(
        prepared.gguf.path,
        device=options.ring.devices_of(plan.stages)[0],
        dtype=options.ring.number_format,
        threads=1 if options.pin else threads_of(plan),
        width=plan.micro_batch_width,
    )
    return plan_for(prepared.shape, options.ring, beside)


def make_engine(options: ServeOptions, prepared: Prepared, url: str) -> Engine:
    """The engine, its sockets bound; no stage is started. `url` is the bridge's.

    Raises:
        JoinError: The ring's own address is taken.
    """
    plan = prepared.plan
    keys = None
    if options.remote:
        keys = RingKeys.load_or_create(options.ring_keys) if options.ring_keys else RingKeys.fresh()
    number_format, key = options.ring.number_format, options.api_key
    experts = experts_spec(options.experts, prepared.name, url, key, number_format)
    crew = CrewOptions(
        plan=plan,
        dtype=number_format,
        compute=wire.ModelSpec(
            path=str(prepared.gguf.path),
            sha256=prepared.gguf.digest() if options.remote else "",
            devices=options.ring.devices_of(plan.stages),
            experts=experts,
        ),
        remote=options.remote,
        secret=keys.secret if keys else secrets.token_hex(32),
    )
    lines = LineOptions(
        crew=crew,
        listen=tcp_endpoint(options.ring_listen or "", may_be_any=True) if keys else None,
        keys=keys.bridge if keys else None,
        pin=options.pin,
    )
    engine = Engine(
        EngineOptions(lines=lines, events=options.events, vocabulary=prepared.shape.vocab)
    )
    if keys is not None:
        say(f"stages join at {engine.endpoint.removeprefix('tcp://')} with the token {keys.token}")
    return engine


def say(text: str) -> None:
    """For people, beside what programs read on standard output."""
    print(text, file=sys.stderr, flush=True)


def serve(options: ServeOptions) -> int:
    """Serves until a signal. Returns the exit status.

    Raises:
        KvasirError: It could not begin; nothing is left running.
    """
    prepared = prepare(options)
    allow_descriptors(options.limits.connections_max)
    listener = listen(options.host, options.port)
    with prepared.gguf:
        return asyncio.run(
            ServeRun(
                options,
                prepared,
                BridgeServer(Bridge(options.limits, api_key=options.api_key), listener),
                url_of(listener),
            ).run()
        )


class ServeRun:
    """One run of the server, from the bound port to the end."""

    def __init__(
        self, options: ServeOptions, prepared: Prepared, server: BridgeServer, url: str
    ) -> None:
        self._options = options
        self._prepared = prepared
        self._server = server
        self._url = url
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._engine: Engine | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        loop.add_signal_handler(signal.SIGINT, self._on_sigint)
        if signal.SIGHUP in heeded_stops():
            loop.add_signal_handler(signal.SIGHUP, self._on_sigint)
        self._write_status("loading")
        serving = asyncio.create_task(self._server.serve())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            loading = asyncio.create_task(self._load())
            await asyncio.wait([loading, stopped, serving], return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                await self._close_engine()
            served = await loading
            if not self._stop.is_set():
                self._server.bridge.open(served)
                self._write_status("ready")
                print(self._line(), flush=True)
                watching = asyncio.create_task(self._watch())
                await asyncio.wait([stopped, serving], return_when=asyncio.FIRST_COMPLETED)
                watching.cancel()
                log_event(logger, "shutting down", live=self._server.bridge.live)
            drain_s = 0.0 if self._hurry.is_set() else self._options.drain_s
            await self._server.stop(drain_s, self._hurry)
        except BaseException:
            await self._server.stop(0.0)
            raise
        finally:
            stopped.cancel()
            await serving
            await self._close_engine()
            if self._options.status_file is not None:
                self._options.status_file.unlink(missing_ok=True)
        say("stopped")
        return 0

    def _on_sigterm(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _on_sigint(self) -> None:
        self._hurry.set()
        self._stop.set()

    async def _load(self) -> Served:
        """Starts the stages and reads the tokenizer beside them."""
        if self._options.ring.layers == AUTO:
            plan = await asyncio.to_thread(measured_plan, self._options, self._prepared)
            self._prepared = replace(self._prepared, plan=plan)
        engine = self._engine = make_engine(self._options, self._prepared, self._url)
        engine.recorder = QueueClock(self._server.bridge.meters.admitted, engine.ring.causes)
        tokenizer, _ = await asyncio.gather(
            asyncio.to_thread(self._read_tokenizer), self._start_stages(engine)
        )
        return Served(
            model=self._prepared.name,
            engine=engine,
            tokenizer=tokenizer,
            plan=self._prepared.plan,
            vocabulary=min(self._prepared.shape.vocab, len(tokenizer)),
            created=int(time.time()),
        )

    def _read_tokenizer(self) -> "Tokenizer":
        from kvasir_rt.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self._prepared.gguf)
        assert tokenizer.token_bytes_max  # Computed now, not under the first request.
        return tokenizer

    async def _start_stages(self, engine: Engine) -> None:
        from kvasir_rt.loading import LoadingBar

        starting = asyncio.create_task(asyncio.to_thread(engine.start))
        with LoadingBar(self._prepared.plan.stages) as bar:
            while not starting.done():
                await asyncio.wait([starting], timeout=PROGRESS_S)
                try:
                    snapshot = await asyncio.to_thread(engine.snapshot)
                except RingDown:
                    continue  # `start` says why.
                bar.show([(stage.state, stage.resident_bytes) for stage in snapshot.stages])
        await starting

    async def _watch(self) -> None:
        """When the ring has given up for good, every client is told why."""
        assert self._engine is not None
        while True:
            await asyncio.sleep(WATCH_S)
            why = await asyncio.to_thread(self._down_why)
            if why:
                log_event(logger, "the ring has given up", level=logging.ERROR, why=why)
                error = ApiError(503, f"The ring has given up: {why}", code="ring_down")
                self._server.bridge.close(error)
                self._server.bridge.fail_all(error)  # Some may have come after its end.
                return

    def _down_why(self) -> str:
        assert self._engine is not None
        try:
            return self._engine.snapshot().down_why
        except RingDown as error:
            return str(error)

    async def _close_engine(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    def _line(self) -> str:
        plan = self._prepared.plan
        layers = "+".join(str(stop - start) for start, stop in plan.layers)
        window = f"auto (to {plan.window_max})" if plan.window_auto else str(plan.window)
        devices = ",".join(dict.fromkeys(self._options.ring.devices_of(plan.stages)))
        return (
            f"{self._url} model {self._prepared.name}, {plan.stages} stages of {layers} layers "
            f"({devices}, {self._options.ring.number_format}), window {window}"
        )

    def _write_status(self, state: str) -> None:
        path = self._options.status_file
        if path is None:
            return
        host, _, port = self._url.removeprefix("http://").rpartition(":")
        status = {
            "state": state,
            "url": self._url,
            "host": host.strip("[]"),
            "port": int(port),
            "pid": os.getpid(),
            "model": self._prepared.name,
        }
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(status) + "\n")
            part.replace(path)
        except OSError as error:
            raise AddressError(f"cannot write the status file {path}: {error.strerror}") from None
