"""The life of a worker.

    volunteer -> fetch -> load -> heartbeat -> dial the relay -> serve -> released, or drain
        ^--------------------- room for more, or nothing wanted ---------------'

Three loops share one event loop: `_recruit` asks for work, `_beat_on` tells the hub what is served,
`_stay_connected` keeps one connection to the relay. All of it is outgoing: nobody dials a worker.
A hub or relay that is away changes nothing but the next try; what is loaded stays loaded.
"""

import asyncio
import contextlib
import json
import logging
import os
import time
from typing import Any

from kvasir_core.errors import KvasirError
from kvasir_core.swarm.words import Slice
from kvasir_rt.errors import ModelFileError
from kvasir_rt.logs import log_event
from kvasir_rt.relay.channel import Channel, Watch
from kvasir_rt.relay.dial import DialError, dial, relay_url
from kvasir_rt.relay.limits import RelayLimits
from kvasir_rt.swarm import protocol as wire
from kvasir_rt.swarm.frames import HIDDEN_MAX
from kvasir_rt.swarm.hub_http import HubError, HubRefused
from kvasir_rt.swarm.identity import Identity
from kvasir_rt.worker.compute import LoadedSlice, load_slice, slice_sizes
from kvasir_rt.worker.desk import Desk
from kvasir_rt.worker.fetch import fetch
from kvasir_rt.worker.hub_client import HubClient, OtherHub
from kvasir_rt.worker.options import WorkerOptions, memory_of, numerics_of
from kvasir_rt.worker.pause import LONG_S, Pause, heeded
from kvasir_rt.worker.store import SliceName, SliceStore, StoreError

logger = logging.getLogger("kvasir.worker")

HEARTBEAT_S = 15.0  # Until the hub says otherwise.
BEAT_LOOK_S = 0.5
KEY_FILE = "node.key"


class NoSlice(KvasirError):
    """An assigned slice cannot be served; the message says why."""


class Worker:
    """One worker; made inside a running event loop.

    Args:
        options: What to do.

    Raises:
        WorkerError, StoreError, IdentityError: It cannot be done here.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._numerics = numerics_of(options)
        self._memory_bytes = memory_of(options, self._numerics)
        self._store = SliceStore(options.store, options.store_bytes)
        self.identity = Identity.load_or_create(options.store / KEY_FILE)
        self.node = self.identity.node
        self._client = HubClient(options.hub, self.identity, options.store, options.join_token)
        self._relay = options.relay or relay_url(options.hub)
        self.desk = Desk(self._numerics, options.delay_s)
        self._watch = Watch()
        self._limits = RelayLimits()
        self._model: str | None = None  # Of the slices in memory.
        self._claim: int | None = None
        self._session = 0  # The relay's, of the last heartbeat.
        self._dialled = 0  # The session of...
        self._channel: Channel | None = None
        self._heartbeat_s = HEARTBEAT_S
        self._beat_at = 0.0  # Of the last one that was heard.
        self._beating = asyncio.Lock()
        self._served = asyncio.Event()  # There are slices.
        self._room = asyncio.Event()
        self._fits = options.experts_max  # As many as memory has shown to have room for.
        self._is_draining = False
        self._problem = ""  # Why there was no slice the last time.
        self._status_problem = ""  # Why there was no status file the last time.

    @property
    def is_connected(self) -> bool:
        """Whether the relay connection stands."""
        return self._channel is not None

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event | None = None) -> None:
        """Until `stop` is set and what was under way is done.

        Raises:
            OtherHub: The hub is not the one that was known at its address.
        """
        loops = [
            asyncio.create_task(self._recruit()),
            asyncio.create_task(self._beat_on()),
            asyncio.create_task(self._stay_connected()),
        ]
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([*loops, stopped], return_when=asyncio.FIRST_COMPLETED)
            for loop in loops:
                if loop.done():
                    loop.result()  # Loops end by an exception only.
            loops[0].cancel()
            await self._drain(hurry or asyncio.Event())
        finally:
            for task in [*loops, stopped]:
                task.cancel()
            await asyncio.gather(*loops, stopped, return_exceptions=True)
            if self._channel is not None:
                self._channel.end("the worker stops")
            await self._watch.close()
            await self._client.close()
            self.desk.close()
            self._store.close()
            self._write_status("stopped")

    # ------------------------------------------------------------------ finding work

    async def _recruit(self) -> None:
        """Ask for slices as long as there is room."""
        pause = Pause()
        while True:
            room = self._room_left()
            if room < 1:
                self._room.clear()
                await self._room.wait()
                continue
            try:
                answer = await self._client.volunteer(self._offer(room))
                self._note_problem("")
                if isinstance(answer, wire.Declined):
                    self._write_status("idle")
                    pause.reset()
                    await asyncio.sleep(heeded(answer.retry_after_s))
                    continue
                await self._take(answer)
                pause.reset()
            except OtherHub:
                raise
            except (HubError, StoreError, NoSlice, ModelFileError, TimeoutError) as error:
                self._note_problem(str(error) or "the lease ended before the slice was here")
                retry_s = error.retry_after_s if isinstance(error, HubRefused) else None
                await pause.wait(retry_s or 0.0)

    def _note_problem(self, why: str) -> None:
        """Say it once, not at every try."""
        if why and why != self._problem:
            log_event(logger, "no slice", level=logging.WARNING, why=why)
        self._problem = why

    def _offer(self, room: int) -> wire.VolunteerRequest:
        served = {loaded.name for loaded in self.desk.loaded}
        holds = [
            wire.HeldSlice(
                model=name.model,
                layer=name.slice.layer,
                experts=[name.slice.begin, name.slice.end],
            )
            for name in self._store.held()
            if name not in served
        ]
        model = self._model or self._options.model
        return wire.VolunteerRequest(max_experts=room, model=model, holds=holds)

    def _room_left(self) -> int:
        held = sum(slice_.end - slice_.begin for slice_ in self.desk.slices)
        return min(self._options.experts_max, self._fits) - held

    async def _take(self, given: wire.Assigned) -> None:
        """Fetch, load and offer an assigned slice; raises if that cannot be."""
        name = self._check(given)
        self._write_status("fetching")
        log_event(logger, "assigned", slice=str(name), scarcity=given.scarcity)
        keep = {loaded.name for loaded in self.desk.loaded}
        async with asyncio.timeout(given.lease_s):
            path = await fetch(self._client, self._store, name, keep)
            try:
                sizes = await asyncio.to_thread(slice_sizes, path, name, given.hidden_size)
                self._check_memory(sizes.weight_bytes(self._numerics), sizes.experts)
                loaded = await asyncio.to_thread(
                    load_slice, path, name, given.hidden_size, self._numerics
                )
            except ModelFileError:
                self._store.remove(name)  # It came as announced, and is no slice all the same.
                raise
        self._serve(loaded, given.claim)
        await self._beat()

    def _check(self, given: wire.Assigned) -> SliceName:
        """The hub's word is checked like anyone's."""
        begin, end = given.experts
        if not 0 <= begin < end <= given.expert_count or end - begin > self._room_left():
            raise NoSlice(
                f"the hub assigned experts [{begin}, {end}) of {given.expert_count}; there is room "
                f"for {self._room_left()}"
            )
        if not 1 <= given.hidden_size <= HIDDEN_MAX:
            raise NoSlice(f"hidden size {given.hidden_size}; at most {HIDDEN_MAX} can be served")
        if self._model not in (None, given.model):
            raise NoSlice(f"the hub assigned {given.model!r} to a worker of {self._model!r}")
        slice_ = Slice(given.layer, begin, end)
        for own in self.desk.slices:
            if own.layer == slice_.layer and own.begin < end and begin < own.end:
                raise NoSlice(f"the hub assigned {slice_!r}, which overlaps {own!r}")
        return SliceName(given.model, slice_)

    def _check_memory(self, needed: int, experts: int) -> None:
        """Before anything is loaded: does it fit? If not, fewer are asked for from now on."""
        used = sum(loaded.weight_bytes for loaded in self.desk.loaded)
        if used + needed <= self._memory_bytes:
            return
        held = sum(slice_.end - slice_.begin for slice_ in self.desk.slices)
        self._fits = held + (self._memory_bytes - used) * experts // needed
        raise NoSlice(
            f"{experts} experts take {needed} bytes beside {used} in use; the limit is "
            f"{self._memory_bytes}: asking for {self._fits - held} from now on (--memory)"
        )

    def _serve(self, loaded: LoadedSlice, claim: int) -> None:
        self.desk.add(loaded)
        self._model = loaded.name.model
        self._claim = claim
        self._served.set()
        log_event(logger, "serving", slice=str(loaded.name), bytes=loaded.weight_bytes)

    # ------------------------------------------------------------------ heartbeats

    async def _beat_on(self) -> None:
        """A heartbeat when it is due, as long as something is served."""
        pause = Pause()
        while True:
            await self._served.wait()
            due_in_s = self._beat_at + self._heartbeat_s * 0.95 - time.monotonic()
            if due_in_s > 0:
                await asyncio.sleep(min(due_in_s, BEAT_LOOK_S))  # It may be due earlier by then.
            elif await self._beat():
                pause.reset()
            else:
                await pause.wait()

    async def _beat(self) -> bool:
        """Tell the hub what is served now; False if it was not heard."""
        async with self._beating:
            while self.desk.slices:  # Once more after every release.
                reply = await self._report()
                if reply is None:
                    return False
                self._claim = None
                self._beat_at = time.monotonic()
                self._heartbeat_s = heeded(reply.heartbeat_s)
                self._session = reply.relay_session
                if self._channel is not None and self._session != self._dialled:
                    self._channel.end("the hub gave another generation")
                released = {Slice(*segment) for segment in reply.release} & {*self.desk.slices}
                if not released:
                    self._write_status("serving")
                    break
                await self._release(released)
        return True

    async def _report(self) -> wire.CoverageReply | None:
        assert self._model is not None
        report = wire.CoverageReport(
            worker=self.node,
            model=self._model,
            segments=[list(slice_) for slice_ in self.desk.slices],
            claim=self._claim,
            draining=self._is_draining,
        )
        try:
            return await self._client.cover(report)
        except OtherHub:
            raise
        except HubError as error:
            log_event(logger, "heartbeat failed", level=logging.WARNING, why=str(error))
            return None

    async def _release(self, released: set[Slice]) -> None:
        """Stop serving these; they stay on disk."""
        for slice_ in sorted(released):
            self.desk.remove(slice_)
            log_event(logger, "released", layer=slice_.layer, begin=slice_.begin, end=slice_.end)
        self._fits = self._options.experts_max
        self._room.set()
        if not self.desk.slices:
            await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        """Nothing is served any more."""
        self._served.clear()
        model, self._model, self._session, self._claim = self._model, None, 0, None
        if model is not None:
            report = wire.CoverageReport(worker=self.node, model=model, segments=[])
            with contextlib.suppress(HubError):  # Then the coverage ends by its time to live.
                await self._client.cover(report)
        if self._channel is not None:
            self._channel.end("nothing is served any more")
        self._write_status("idle")

    # ------------------------------------------------------------------ the relay

    async def _stay_connected(self) -> None:
        """One connection, under the generation of the last heartbeat."""
        pause = Pause()
        while True:
            await self._served.wait()
            if not self._session or self._model is None:
                await asyncio.sleep(0.05)
                continue
            started = time.monotonic()
            try:
                await self._connect(self._session, self._model)
            except DialError as error:
                log_event(logger, "relay", level=logging.WARNING, why=str(error))
                if error.status == 401:
                    self._client.forget_token()
            except OtherHub:
                raise
            except HubError as error:
                log_event(logger, "relay", level=logging.WARNING, why=str(error))
            if time.monotonic() - started > LONG_S:
                pause.reset()
            if self._served.is_set():
                await pause.wait()
                await self._beat()  # The next generation.

    async def _connect(self, session: int, model: str) -> None:
        """Dial and serve until the connection is over."""
        socket = await dial(self._relay, await self._client.token(), session)
        channel = self._channel = Channel(socket, self._limits)
        self._dialled = session
        self._watch.add(channel)
        self._write_status("serving")
        try:
            why = await channel.run(self.desk.take(channel, self.node, session, model))
        finally:
            self._channel = None
            self._watch.remove(channel)
        log_event(logger, "relay connection over", why=why)

    # ------------------------------------------------------------------ the end

    async def _drain(self, hurry: asyncio.Event) -> None:
        """Leave the offer first, serve what still comes, then go."""
        self._is_draining = True
        if not self.desk.slices:
            return
        self._write_status("draining")
        await self._beat()
        until = time.monotonic() + self._options.drain_s
        quiet_from = time.monotonic()
        while time.monotonic() < until and not hurry.is_set() and self.desk.slices:
            asked_at = max(quiet_from, self.desk.asked_at)
            if self.desk.is_idle and time.monotonic() - asked_at >= self._options.quiet_s:
                break
            await asyncio.sleep(0.05)
        for slice_ in self.desk.slices:
            self.desk.remove(slice_)
        await self._say_goodbye()

    def _write_status(self, state: str) -> None:
        """For scripts and people: what this worker does now."""
        path = self._options.status_file
        if path is None:
            return
        status: dict[str, Any] = {
            "state": state,
            "node": self.node,
            "pid": os.getpid(),
            "model": self._model,
            "segments": [list(slice_) for slice_ in self.desk.slices],
            "connected": self._channel is not None,
            "computed": self.desk.counts.computed,
            "pairs": self.desk.counts.pairs,
        }
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(status) + "\n", encoding="utf-8")
            part.replace(path)
            self._status_problem = ""
        except OSError as error:
            if str(error) != self._status_problem:  # Said once, not at every heartbeat.
                self._status_problem = str(error)
                log_event(logger, "no status file", level=logging.WARNING, why=str(error))
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
