"""Sends expert calls to workers and brings the answers, as the core's coordinator decides.

Two threads meet here. The stage's compute thread routes calls and computes; the caller's own
thread runs an event loop with the relay connection, the hub and the timers. `CallControl` stands
between them. Both ends dial out: the caller has no listening socket, and neither has a worker.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from kvasir_core.errors import KvasirError
from kvasir_core.events import TimePassed
from kvasir_core.swarm.decisions import FetchMap, PollSlots, Report
from kvasir_core.swarm.events import AnswerChecked, StageMeasured, WorkerDetached
from kvasir_core.swarm.statistics import CoordinatorStatistics
from kvasir_core.swarm.words import Failure, ModelName, Session, WorkerId
from kvasir_core.units import NANOS_PER_SECOND, Nanos
from kvasir_rt import wire
from kvasir_rt.experts.control import CallControl
from kvasir_rt.experts.hub_link import CallerOptions, HubLink
from kvasir_rt.experts.pairs import pair_sum
from kvasir_rt.experts.records import Flight, relative_error
from kvasir_rt.experts.requests import Encoded, encode, is_sendable, take_reply
from kvasir_rt.logs import log_event
from kvasir_rt.model.moe import Experts
from kvasir_rt.relay.channel import Channel, Watch
from kvasir_rt.relay.dial import DialError, dial, relay_url
from kvasir_rt.relay.limits import RelayLimits
from kvasir_rt.swarm.event_log import EventLog
from kvasir_rt.swarm.frames import Detached, Drop, Fault, Frame, Reply

logger = logging.getLogger("kvasir.experts")

CHECKS_WAITING_MAX = 64  # More are not made; the core forgets them after a while.
SWEEP_S = 0.25
COUNT_EACH = 2  # Sweeps.
DIAL_PAUSE_S, DIAL_PAUSE_S_MAX = 0.2, 5.0
MEASURE_NS = NANOS_PER_SECOND
STOP_S_MAX = 10.0


class CallerError(KvasirError):
    """The caller cannot begin; the message says why."""


class ExpertCaller:
    """A stage's way to remote experts.

    Args:
        options: Whom to ask, as whom, by which policy.
        local: The stage's own experts by layer: fallback, and what answers are checked against.
    """

    def __init__(self, options: CallerOptions, local: dict[int, Experts]) -> None:
        self.options = options
        self.local = local
        self._events = _open_events(options)
        self.control = CallControl(options, self, self._events)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="expert-caller", daemon=True)
        self._stop: asyncio.Event | None = None
        self._hub: HubLink | None = None
        self._channel: Channel | None = None
        self._requests: dict[int, Flight] = {}
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._armed_at: Nanos | None = None
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="expert-check")
        self._checks_waiting = 0
        self._measured_at = time.monotonic_ns()
        self._local_pairs = self._local_ns = self._blocked_ns = 0
        self._pairs_computed = 0  # Since the beginning.
        self.counts = wire.ExpertCounts()
        self.is_closed = False

    def start(self) -> None:
        """Begin to poll, register and dial, in the caller's own thread."""
        started = threading.Event()
        self._loop.call_soon(started.set)
        self._thread.start()
        started.wait()

    def close(self) -> None:
        """Say goodbye and end the thread; open calls end locally."""
        if self.is_closed:
            return
        self.is_closed = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_stop)
        self._thread.join(STOP_S_MAX)
        self._checker.shutdown(wait=True, cancel_futures=True)
        if self._events is not None:
            self._events.close()

    def statistics(self) -> CoordinatorStatistics:
        return self.control.statistics()

    @property
    def is_connected(self) -> bool:
        """Whether the relay connection stands."""
        return self._channel is not None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def measure(self, *, local_pairs: int = 0, local_ns: int = 0, blocked_ns: int = 0) -> None:
        """What the compute thread did with its time; passed on about once a second."""
        self._local_pairs += local_pairs
        self._pairs_computed += local_pairs
        self._local_ns += local_ns
        self._blocked_ns += blocked_ns
        now = time.monotonic_ns()
        if now - self._measured_at >= MEASURE_NS:
            self._measured_at = now
            event = StageMeasured(self._local_pairs, Nanos(self._local_ns), Nanos(self._blocked_ns))
            self._local_pairs = self._local_ns = self._blocked_ns = 0
            self.control.tell(event)

    # ------------------------------------------------------------------ Network, from any thread

    def send(self, flight: Flight) -> None:
        """Encoded where it was ordered, sent by the loop."""
        if not is_sendable(flight, self.options.dtype):
            self._on_loop(self.control.fail, flight, Failure.BUSY)
            return
        model = ModelName(self.options.model)
        frames = encode(flight, model, self.options.dtype, self.control.now, self._numbers)
        self._on_loop(self._send_all, flight, list(frames))

    def check(self, flight: Flight) -> None:
        if self._checks_waiting < CHECKS_WAITING_MAX:
            self._checks_waiting += 1
            self._checker.submit(self._check, flight)

    def ask(self, order: PollSlots | FetchMap | Report) -> None:
        self._on_loop(self._ask, order)

    def wake_at(self, when: Nanos) -> None:
        armed_at = self._armed_at
        if armed_at is None or when < armed_at:
            self._on_loop(self._arm, when)

    # ------------------------------------------------------------------ the checker's thread

    def _check(self, flight: Flight) -> None:
        self._checks_waiting -= 1
        assert flight.values is not None
        with torch.inference_mode():
            right = pair_sum(self.local[flight.layer], flight.x, flight.pairs).cpu()
            error = relative_error(flight.values, right)
        call, part, worker = flight.key
        self.control.tell(AnswerChecked(call, part, worker, flight.session, error))

    # ------------------------------------------------------------------ the loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        except Exception:  # The stage goes on, locally: see `RemoteCall.result`.
            logger.exception("the expert caller ended")
            raise
        finally:
            self._loop.close()

    async def _live(self) -> None:
        self._stop = asyncio.Event()
        self._hub = HubLink(self.options, self.control.tell)
        watch = Watch()
        tasks = [
            asyncio.create_task(self._stay_connected(watch)),
            asyncio.create_task(self._sweep()),
        ]
        self.control.tell(TimePassed())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self._lose_flights()
        await self._hub.close()
        await watch.close()
        for task in ended:
            task.result()  # A loop that ended by itself ended by an exception.

    def _set_stop(self) -> None:
        if self._stop is not None:
            self._stop.set()

    def _ask(self, order: PollSlots | FetchMap | Report) -> None:
        assert self._hub is not None
        match order:
            case PollSlots(poll):
                self._hub.poll_slots(poll)
            case FetchMap(fetch):
                self._hub.fetch_map(fetch)
            case Report(rows):
                self._hub.report(rows)

    def _arm(self, when: Nanos) -> None:
        if self._armed_at is not None and self._armed_at <= when:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_at = when
        delay_s = max(0, when - self.control.now) / NANOS_PER_SECOND
        self._timer = self._loop.call_later(delay_s, self._time_passed)

    def _time_passed(self) -> None:
        self._armed_at = None
        self.control.tell(TimePassed())

    async def _sweep(self) -> None:
        """Tell workers what nobody waits for any more, and the bridge how we do."""
        for turn in itertools.count():
            await asyncio.sleep(SWEEP_S)
            if turn % COUNT_EACH == 0:
                self.counts = self.control.counts(
                    is_connected=self.is_connected, pairs_computed=self._pairs_computed
                )
            for flight in self.control.give_up():
                self._forget_requests(flight)
            self.control.flush()

    async def _stay_connected(self, watch: Watch) -> None:
        url = self.options.relay or relay_url(self.options.hub)
        pause_s = DIAL_PAUSE_S
        while True:
            try:
                socket = await dial(url, self.options.service_token)
            except DialError as error:
                log_event(logger, "no relay", level=logging.WARNING, why=str(error))
            else:
                channel = Channel(socket, RelayLimits())
                watch.add(channel)
                self._channel = channel
                pause_s = DIAL_PAUSE_S
                try:
                    why = await channel.run(self._take)
                finally:
                    self._channel = None
                    watch.remove(channel)
                    self._lose_flights()
                log_event(logger, "relay connection over", level=logging.WARNING, why=why)
            await asyncio.sleep(pause_s)
            pause_s = min(DIAL_PAUSE_S_MAX, 2 * pause_s)

    def _send_all(self, flight: Flight, frames: list[Encoded]) -> None:
        self._requests.update({call.request: flight for call, _ in frames})
        for call, payload in frames:
            if self._channel is None or self._channel.post(call, payload) is None:
                self._forget_requests(flight)
                self.control.fail(flight, Failure.BUSY)  # Our own way out: nobody's fault.
                return

    def _take(self, header: Frame, payload: memoryview) -> None:
        """A frame from the relay."""
        match header:
            case Reply(request):
                flight = self._requests.pop(request, None)
                if flight is not None and take_reply(flight, header, payload, self.options.dtype):
                    self._forget_requests(flight)
                    self.control.arrive(flight)
            case Fault(request, why, _):
                flight = self._requests.pop(request, None)
                if flight is not None:
                    flight.requests.pop(request, None)
                    self._forget_requests(flight)
                    self.control.fail(flight, Failure(why))
            case Detached(worker, session):
                self.control.tell(WorkerDetached(WorkerId(worker), Session(session)))
            case _:
                pass  # Who came is in the hub's next map.

    def _forget_requests(self, flight: Flight) -> None:
        """What is left of a flight is not waited for."""
        for request in flight.requests:
            if self._requests.pop(request, None) is not None and self._channel is not None:
                self._channel.post_urgent(Drop(request))
        flight.requests.clear()

    def _lose_flights(self) -> None:
        """Our connection is over: nobody's fault, and everything in the air is computed here."""
        self._requests.clear()
        for flight in self.control.flights():
            flight.requests.clear()
            self.control.fail(flight, Failure.BUSY)

    def _on_loop(self, work: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # The loop has ended; `RemoteCall.result` sees it.
            self._loop.call_soon_threadsafe(work, *arguments)


def _open_events(options: CallerOptions) -> EventLog | None:
    if options.events is None:
        return None
    try:
        return EventLog(options.events, options.core_policy, options.seed)
    except OSError as error:
        raise CallerError(f"cannot write {options.events}: {error.strerror}") from None
