"""Health is a lap, not a process: a recent token, or a probe that goes round the ring.

A probe is one prompt token and one output token; all who ask while it runs share it.
"""

import asyncio
import time
from dataclasses import dataclass

from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.bridge.jobs import Served
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.submissions import Answer, Job, Submissions
from kvasir_rt.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Proof:
    """The lap that proves the ring: how long ago it ended, and whether it was a probe's."""

    lap_age_s: float
    by_probe: bool


class Health:
    def __init__(self, served: Served, submissions: Submissions, limits: Limits) -> None:
        self._served = served
        self._submissions = submissions
        self._limits = limits
        self._probe: asyncio.Task[None] | None = None

    async def prove(self) -> Proof:
        """Raises ApiError (503) if no lap ends within the probe's limit."""
        age = time.monotonic() - self._submissions.last_token
        if age <= self._limits.lap_age_s_max:
            return Proof(age, by_probe=False)
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._go_round())
        await asyncio.shield(self._probe)
        return Proof(time.monotonic() - self._submissions.last_token, by_probe=True)

    async def _go_round(self) -> None:
        job = Job(
            prompts=([0],),
            choices=1,
            output_tokens_max=(1,),
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            stops=(),
            stop_ids=frozenset(),
            wants_logprobs=False,
            deadline_s=self._limits.probe_s_max,
        )
        started = time.monotonic()
        try:
            with Answer(self._submissions, job, is_probe=True) as answer:
                await answer.finished()
        except ApiError as error:
            if self._submissions.last_token >= started:
                return  # The queue was full or slow, but the ring turned meanwhile.
            raise ApiError(
                503, f"No lap of the ring has ended: {error.message}", code="no_lap"
            ) from error
