"""Between HTTP and the engine: admission, ids, events onto the loop, deadlines, cancelling.

The engine calls back on its own thread; `Mailbox` carries a lap's events to the loop with one
wake-up. Everything else here runs on the loop.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from kvasir_core.microbatch import FinishReason
from kvasir_core.units import RequestId
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.bridge.generation import Generation, Piece, TokenizerPort
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.meters import Meters
from kvasir_rt.sampling import SamplingParams
from kvasir_rt.snapshot import RingSnapshot
from kvasir_rt.submission import EndEvent, EngineEvent, Submission, TokenEvent

logger = logging.getLogger("kvasir.bridge")

RETRY_AFTER_S_MAX = 60.0
ENDINGS_KEPT = 64  # Over which the rate of endings is taken, for Retry-After.


class EnginePort(Protocol):
    """What the bridge needs of the engine; thread-safe."""

    def submit(self, submission: Submission) -> None: ...
    def cancel(self, request_id: int, reason: FinishReason) -> None: ...
    def snapshot(self) -> RingSnapshot: ...


class Mailbox:
    """Events from the engine's thread to the loop, in order, one wake-up for many."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[EngineEvent], None]
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._events: deque[EngineEvent] = deque()
        self._is_scheduled = False

    def put(self, event: EngineEvent) -> None:
        """Called on the engine's thread."""
        self._events.append(event)
        if self._is_scheduled:
            return
        self._is_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            if not self._loop.is_closed():
                raise  # A closed loop has no clients left; anything else is our fault.

    def _drain(self) -> None:
        self._is_scheduled = False  # First: what is put from now on schedules again.
        while self._events:
            self._deliver(self._events.popleft())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: what to generate, without any HTTP in it."""

    prompts: tuple[list[int], ...]
    choices: int  # Per prompt.
    output_tokens_max: tuple[int, ...]  # Per prompt.
    sampling: SamplingParams
    seed: int | None
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    wants_logprobs: bool
    deadline_s: float

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many choices it has."""
        return sum(map(len, self.prompts))


class Answer:
    """The choices of one job while the ring works on them; leaving the context cancels the rest."""

    def __init__(self, submissions: "Submissions", job: Job, *, is_probe: bool = False) -> None:
        self.job = job
        self.is_probe = is_probe  # Takes no place in the queue's limit and is not counted.
        self.generations: list[Generation] = []
        self.requests: list[RequestId] = []
        self._submissions = submissions
        self._changed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._submissions.start(self)
        self._deadline = asyncio.get_running_loop().call_later(self.job.deadline_s, self._expire)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._submissions.abandon(self.requests, FinishReason.CANCELLED)

    @property
    def output_tokens(self) -> int:
        return sum(generation.output_tokens for generation in self.generations)

    @property
    def is_over(self) -> bool:
        return all(generation.is_over for generation in self.generations)

    @property
    def has_failed(self) -> bool:
        return any(generation.error is not None for generation in self.generations)

    @property
    def has_news(self) -> bool:
        """`take_pieces` has something to give, or to raise."""
        return self.has_failed or any(generation.pieces for generation in self.generations)

    async def changed(self) -> None:
        """Waits until there is something new, or `nudge` was called."""
        await self._changed.wait()
        self._changed.clear()

    def nudge(self) -> None:
        """Wakes who waits in `changed`, though nothing may have changed."""
        self._changed.set()

    def take_pieces(self) -> list[Piece]:
        """All text that has become certain, in order per choice.

        Raises:
            ApiError: A choice has failed and its text has been taken.
        """
        pieces: list[Piece] = []
        for generation in self.generations:
            pieces.extend(generation.pieces)
            generation.pieces.clear()
        if not pieces:
            for generation in self.generations:
                if generation.error is not None:
                    raise generation.error
        return pieces

    async def finished(self) -> list[Piece]:
        """Waits for the end of every choice and gives all the text.

        Raises:
            ApiError: A choice has failed.
        """
        while not self.is_over and not self.has_failed:
            await self.changed()
        for generation in self.generations:
            if generation.error is not None:
                raise generation.error
        return self.take_pieces()

    def fail(self, error: ApiError) -> None:
        for generation in self.generations:
            generation.fail(error)
        self._changed.set()

    def _expire(self) -> None:
        self._submissions.abandon(self.requests, FinishReason.DEADLINE)
        self.fail(
            ApiError(
                504,
                f"The request's deadline of {self.job.deadline_s:g} s has passed "
                f"({self.output_tokens} tokens were generated).",
                code="deadline_exceeded",
            )
        )


@dataclass(slots=True)
class Entry:
    """A submission that the ring has not ended yet."""

    generation: Generation
    answer: Answer
    arrived: float
    last_token: float = 0.0
    is_abandoned: bool = False


class Submissions:
    """All submissions of this process: admits, submits, routes events, cancels.

    Args:
        engine: Runs the ring.
        running_max: The plan's cap on admitted requests.
    """

    def __init__(
        self,
        engine: EnginePort,
        tokenizer: TokenizerPort,
        *,
        running_max: int,
        limits: Limits,
        meters: Meters,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._running_max = running_max
        self._limits = limits
        self._meters = meters
        self._next_request = 0
        self._live: dict[RequestId, Entry] = {}
        self._endings: deque[float] = deque(maxlen=ENDINGS_KEPT)
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._deliver)
        self._refusal: ApiError | None = None
        self.idle = asyncio.Event()  # Set while nothing is live.
        self.idle.set()
        self.last_token = -float("inf")  # time.monotonic() of the last lap that brought a token.

    @property
    def live(self) -> int:
        return len(self._live)

    def refuse_new(self, error: ApiError) -> None:
        """From now on every new job is refused with this error (draining, or the ring is lost)."""
        self._refusal = error

    def fail_all(self, error: ApiError) -> None:
        """Ends every live job with this error and takes it out of the ring."""
        answers = {id(entry.answer): entry.answer for entry in self._live.values()}
        for answer in answers.values():
            answer.fail(error)
            self.abandon(answer.requests, FinishReason.CANCELLED)

    def start(self, answer: Answer) -> None:
        """Submits every choice of the answer, or none.

        Raises:
            ApiError: 429 when the queue is full, 503 when draining.
        """
        job = answer.job
        places = len(job.prompts) * job.choices
        if not answer.is_probe:
            self._admit(places)
            self._meters.prompt_tokens(job.prompt_tokens)
        seed = secrets.randbits(63) if job.seed is None else job.seed
        try:
            for prompt in range(len(job.prompts)):
                for choice in range(job.choices):
                    self._submit(answer, prompt, choice, seed_of_choice(seed, choice))
        except BaseException:
            self.abandon(answer.requests, FinishReason.FAILED)
            raise

    def _submit(self, answer: Answer, prompt: int, choice: int, seed: int) -> None:
        """Hands one generation to the engine; its events are delivered after this returns."""
        job = answer.job
        request = RequestId(self._next_request)
        self._next_request += 1
        self._engine.submit(
            Submission(
                request_id=request,
                prompt_ids=job.prompts[prompt],
                output_tokens_max=job.output_tokens_max[prompt],
                sampling=replace(job.sampling, seed=seed),
                stop_ids=job.stop_ids,
                on_event=self._mailbox.put,
            )
        )
        generation = Generation(
            index=prompt * job.choices + choice,
            tokenizer=self._tokenizer,
            stops=job.stops,
            stop_ids=job.stop_ids,
            wants_logprobs=job.wants_logprobs,
            end_early=lambda: self.abandon([request], FinishReason.STOP),
        )
        answer.generations.append(generation)
        answer.requests.append(request)
        self._live[request] = Entry(generation, answer, time.monotonic())
        self.idle.clear()

    def abandon(self, requests: Iterable[RequestId], reason: FinishReason) -> None:
        """Takes requests out of the ring whose outcome nobody waits for any more."""
        for request in requests:
            entry = self._live.get(request)
            if entry is not None and not entry.is_abandoned:
                entry.is_abandoned = True
                self._engine.cancel(request, reason)

    def _admit(self, places: int) -> None:
        if self._refusal is not None:
            raise self._refusal
        limit = self._running_max + self._limits.waiting_max
        if len(self._live) + places > limit:
            self._meters.rejected()
            raise ApiError(
                429,
                f"The queue is full: {len(self._live)} requests are running or waiting and this "
                f"one needs {places} more; the limit is {limit}. Try again later.",
                code="queue_full",
                retry_after_s=self._retry_after_s(places),
            )

    def _retry_after_s(self, places: int) -> float:
        """When so many places should be free, at the rate of the last endings."""
        if len(self._endings) < 2:
            return 1.0
        span = max(self._endings[-1] - self._endings[0], 1e-3)
        return min(RETRY_AFTER_S_MAX, places * span / (len(self._endings) - 1))

    def _deliver(self, event: EngineEvent) -> None:
        entry = self._live.get(event.request_id)
        assert entry is not None, f"an event for request {event.request_id}, which has ended"
        now = time.monotonic()
        if isinstance(event, TokenEvent):
            self.last_token = now
            if not entry.answer.is_probe:
                self._meters.token(now, entry.arrived, entry.last_token)
            entry.last_token = now
        try:
            entry.generation.take(event)
        except Exception:
            logger.exception("an event could not be taken")
            entry.generation.fail(ApiError(500, "Internal error.", code="internal"))
            self.abandon([event.request_id], FinishReason.FAILED)
        if isinstance(event, EndEvent):
            del self._live[event.request_id]
            if not self._live:
                self.idle.set()
            if not entry.answer.is_probe:
                self._endings.append(now)
                self._meters.ended(event.reason, now - entry.arrived)
        entry.answer.nudge()


def seed_of_choice(seed: int, choice: int) -> int:
    """Choice 0 is what `n: 1` gives; the others differ, and are the same in every run."""
    return (seed + choice * 0x9E3779B97F4A7C15) % (1 << 63)
