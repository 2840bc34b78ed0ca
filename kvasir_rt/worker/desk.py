"""Takes calls, computes them one after another in a thread, answers. Survives any frame.

What cannot be answered is told why: `busy` when the queue is full, `error` when the call asks for
what is not served here. A call that nobody waits for any more is not computed.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvasir_core.swarm.words import Slice
from kvasir_rt.experts.pairs import Pairs, to_bytes, unpack_pairs
from kvasir_rt.logs import log_event
from kvasir_rt.model.linear import Numerics
from kvasir_rt.relay.channel import Channel
from kvasir_rt.swarm.frames import Call, Drop, Fault, Frame, FrameError, Reply
from kvasir_rt.worker.compute import LoadedSlice

logger = logging.getLogger("kvasir.worker")

CALLS_MAX = 64  # Waiting; a coordinator sends 32 at most.
CALLS_BYTES_MAX = 64 << 20


class CannotServe(Exception):
    """This call is not for us; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    call: Call
    payload: memoryview
    channel: Channel
    expires_at: float


@dataclass(slots=True)
class DeskCounts:
    """Since the start."""

    computed: int = 0
    pairs: int = 0
    busy: int = 0
    errors: int = 0
    expired: int = 0
    compute_s: float = 0.0


class Desk:
    """One thread that computes.

    Args:
        numerics: Device and number formats.
        delay_s: Every answer waits so long before it is sent, for experiments with distance.
        clock: Seconds, never going back.
    """

    def __init__(
        self,
        numerics: Numerics,
        delay_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._numerics = numerics
        self._delay_s = delay_s
        self._slices: dict[Slice, LoadedSlice] = {}
        self._jobs: OrderedDict[tuple[int, int], Job] = OrderedDict()
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_computing = False
        self._loop = asyncio.get_running_loop()
        self.counts = DeskCounts()
        self.asked_at = clock()  # Of the last call.
        self._thread = threading.Thread(target=self._compute_all, name="experts", daemon=True)
        self._thread.start()

    @property
    def slices(self) -> list[Slice]:
        return sorted(self._slices)

    @property
    def loaded(self) -> list[LoadedSlice]:
        return list(self._slices.values())

    @property
    def is_idle(self) -> bool:
        return not self._jobs and not self._is_computing

    def add(self, loaded: LoadedSlice) -> None:
        with self._changed:
            self._slices[loaded.name.slice] = loaded

    def remove(self, slice_: Slice) -> None:
        """Its calls under way are computed still."""
        with self._changed:
            self._slices.pop(slice_, None)

    def close(self) -> None:
        """Forget what waits and end the thread, once it has computed what it computes."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify()
        self._thread.join()

    def take(self, channel: Channel, worker: str, session: int, model: str) -> Callable[
        [Frame, memoryview], None
    ]:  # fmt: skip
        """What to do with each frame of a connection."""

        def on_frame(header: Frame, payload: memoryview) -> None:
            match header:
                case Call():
                    is_ours = (header.worker, header.session, header.model) == (
                        worker, session, model,
                    )  # fmt: skip
                    if not is_ours:
                        self._fault(channel, header, "closed", "meant for another worker")
                    else:
                        self._queue(Job(header, payload, channel, self._expiry(header)))
                case Drop(request):
                    self._forget((id(channel), request))
                case _:
                    pass  # Nothing else concerns a worker.

        return on_frame

    def _expiry(self, call: Call) -> float:
        self.asked_at = self._clock()
        return self.asked_at + call.deadline_ms / 1000

    def _queue(self, job: Job) -> None:
        key = id(job.channel), job.call.request
        size = len(job.payload)
        with self._changed:
            is_full = len(self._jobs) >= CALLS_MAX or self._bytes + size > CALLS_BYTES_MAX
            if not is_full and key not in self._jobs:
                self._jobs[key] = job
                self._bytes += size
                self._changed.notify()
                return
        if is_full:
            self.counts.busy += 1
            self._fault(job.channel, job.call, "busy", "the worker's queue is full")

    def _forget(self, key: tuple[int, int]) -> None:
        with self._changed:
            job = self._jobs.pop(key, None)
            if job is not None:
                self._bytes -= len(job.payload)

    def _compute_all(self) -> None:
        while True:
            with self._changed:
                self._is_computing = False
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                _, job = self._jobs.popitem(last=False)
                self._bytes -= len(job.payload)
                self._is_computing = True
            if self._clock() >= job.expires_at:
                self.counts.expired += 1
            else:
                answer = self._compute(job)
                with contextlib.suppress(RuntimeError):  # The loop has ended: nobody to tell.
                    self._loop.call_soon_threadsafe(self._answer, job, *answer)

    def _compute(self, job: Job) -> tuple[Reply | Fault, bytes]:
        """The answer. Whatever a call holds, the thread lives on."""
        call = job.call
        started = time.perf_counter()
        try:
            x, pairs = unpack_pairs(call, job.payload)
            total = self._sum(call, x, pairs)
            data = self._encode(total, call)
        except (CannotServe, FrameError) as error:
            self.counts.errors += 1
            return Fault(call.request, "error", str(error)[:500]), b""
        except OverflowError as error:
            self.counts.busy += 1
            return Fault(call.request, "busy", str(error)), b""
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            self.counts.errors += 1
            log_event(logger, "a call failed", level=logging.ERROR, why=repr(error))
            return Fault(call.request, "error", f"it failed: {type(error).__name__}"), b""
        elapsed = time.perf_counter() - started
        self.counts.computed += 1
        self.counts.pairs += len(pairs)
        self.counts.compute_s += elapsed
        compute_us = min(round(elapsed * 1e6), (1 << 32) - 1)
        return Reply(call.request, call.dtype, call.rows, call.hidden, compute_us), data

    def _sum(self, call: Call, x: Tensor, pairs: Pairs) -> Tensor:
        first, last = int(pairs.experts[0]), int(pairs.experts[-1])
        for slice_, loaded in list(self._slices.items()):
            layer, begin, end = slice_
            if layer == call.layer and begin <= first and last < end:
                if loaded.hidden != call.hidden:
                    raise CannotServe(f"rows have {call.hidden} numbers, not {loaded.hidden}")
                return loaded.compute(x, pairs, self._numerics)
        raise CannotServe(
            f"experts [{first}, {last + 1}) of layer {call.layer} are not all served in one slice"
        )

    def _encode(self, total: Tensor, call: Call) -> bytes:
        if call.dtype == "f16" and not bool(total.half().isfinite().all()):
            raise OverflowError("the result does not fit f16")
        return to_bytes(total, call.dtype)

    def _answer(self, job: Job, header: Reply | Fault, data: bytes) -> None:
        """On the loop."""
        if self._delay_s:
            self._loop.call_later(self._delay_s, self._send, job, header, data)
        else:
            self._send(job, header, data)

    def _send(self, job: Job, header: Reply | Fault, data: bytes) -> None:
        if isinstance(header, Fault):
            job.channel.post_urgent(header)
        elif job.channel.post(header, data) is None:
            self._fault(job.channel, job.call, "busy", "the way back is full")

    def _fault(self, channel: Channel, call: Call, why: str, detail: str) -> None:
        assert why in ("busy", "closed", "error")
        channel.post_urgent(Fault(call.request, why, detail))  # type: ignore[arg-type]
