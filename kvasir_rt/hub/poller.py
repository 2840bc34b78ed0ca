"""Asks coordinators for their slots: in parallel, with one total time limit and a body cap each.

A coordinator that hangs, drips or floods costs its own reading and nobody else's.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import msgspec

from kvasir_core.swarm.events import SlotsPolled, SlotsPollFailed
from kvasir_core.swarm.words import CoordinatorId, PollId
from kvasir_rt.hub.dials import Origin
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.logs import log_event

logger = logging.getLogger("kvasir.hub")

Answered = Callable[[SlotsPolled | SlotsPollFailed], None]


class Slot(msgspec.Struct):
    """What is read of a slot; llama.cpp's server says more."""

    id: int
    is_processing: bool


class SlotsError(Exception):
    """What came back was no list of slots, and why."""


@dataclass(slots=True)
class Target:
    """Where a coordinator is polled, and how the last poll went."""

    origin: Origin
    key: str | None
    problem: str = ""  # Empty after a good reading.

    def __repr__(self) -> str:
        return f"Target({self.origin})"


class SlotsPoller:
    """Polls on demand.

    Args:
        limits: Body cap and slots.
        total_s: Time limit of one poll, from dialling to the last byte.
        answered: Takes the event, on the loop, exactly once per poll.
    """

    def __init__(self, limits: HubLimits, total_s: float, answered: Answered) -> None:
        self._limits = limits
        self._total_s = total_s
        self._answered = answered
        self._tasks: set[asyncio.Task[None]] = set()
        self._client = httpx.AsyncClient(
            trust_env=False,  # No proxy: it would be dialled in the coordinator's place.
            follow_redirects=False,
            timeout=total_s,  # Of each step; over everything it is asked again below.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        )

    def ask(self, poll: PollId, coordinator: CoordinatorId, target: Target) -> None:
        """Begin one poll; never waits."""
        task = asyncio.get_running_loop().create_task(
            self._poll(poll, coordinator, target), context=contextvars.Context()
        )  # A context of its own: its log lines are not those of a request.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _poll(self, poll: PollId, coordinator: CoordinatorId, target: Target) -> None:
        event: SlotsPolled | SlotsPollFailed
        try:
            async with asyncio.timeout(self._total_s):
                slots = parse_slots(await self._fetch(target), self._limits)
        except TimeoutError:
            problem = f"no answer within {self._total_s:g} s"
            event = SlotsPollFailed(poll)
        except (httpx.HTTPError, httpx.InvalidURL, SlotsError, OSError) as error:
            problem = str(error)[:200] or type(error).__name__
            event = SlotsPollFailed(poll)
        else:
            problem = ""
            event = SlotsPolled(poll, sum(slot.is_processing for slot in slots), len(slots))
        if problem != target.problem:
            target.problem = problem
            log_event(
                logger,
                "coordinator does not answer" if problem else "coordinator answers",
                level=logging.WARNING if problem else logging.INFO,
                coordinator=coordinator,
                address=str(target.origin),
                why=problem or None,
            )
        self._answered(event)

    async def _fetch(self, target: Target) -> bytes:
        headers = {} if target.key is None else {"Authorization": f"Bearer {target.key}"}
        limit = self._limits.slots_bytes_max
        async with self._client.stream("GET", f"{target.origin}/slots", headers=headers) as answer:
            if answer.status_code != httpx.codes.OK:
                raise SlotsError(f"GET /slots answered {answer.status_code}")
            body = bytearray()
            async for piece in answer.aiter_raw():  # As sent: nothing is unpacked.
                body += piece
                if len(body) > limit:
                    raise SlotsError(f"GET /slots answered more than {limit} bytes")
        return bytes(body)


def parse_slots(body: bytes, limits: HubLimits) -> list[Slot]:
    """The list of slots.

    Raises:
        SlotsError: It is none, or too long.
    """
    try:
        slots = msgspec.json.decode(body, type=list[Slot])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SlotsError(f"GET /slots answered no list of slots: {error}") from None
    if len(slots) > limits.slots_max:
        raise SlotsError(f"GET /slots lists {len(slots)} slots; at most {limits.slots_max}")
    return slots
