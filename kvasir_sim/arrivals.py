"""Slow actors that bring requests: a trace's pump, users in a closed loop, clients that leave."""

from collections.abc import Callable, Sequence

import numpy as np
import simpy
from simpy.events import URGENT

from kvasir_core import FinishReason, RequestArrived, RequestId
from kvasir_scenario.workload import NEVER_NS, ClosedLoop, Requests
from kvasir_sim.pipeline import Recurring
from kvasir_sim.shell import Shell


class OpenLoop:
    """Offers requests at their times, whatever becomes of them; arrivals come before returns."""

    def __init__(
        self,
        shell: Shell,
        requests: Requests,
        horizon_ns: int | None,
        cached: Sequence[int] | None = None,
    ) -> None:
        """Offer `requests` up to the horizon; `cached` rows of each are in a prefix cache."""
        if horizon_ns is not None:
            requests = requests.take(np.flatnonzero(requests.arrival_ns <= horizon_ns))
        shell.recorder.offered_many(requests)
        self.count = len(requests)
        self._shell = shell
        self._next = 0
        self._ids = requests.request_id.tolist()
        self._arrivals = requests.arrival_ns.tolist()
        self._prompts = requests.prompt_tokens.tolist()
        self._outputs = requests.output_tokens.tolist()
        self._cached = cached
        cancels = requests.cancel_ns
        self._cancels = None if cancels is None else cancels.tolist()
        self._deadline = requests.deadline_ns
        self._event = Recurring(shell.env, self._arrived)
        if self.count:
            self._event.again(self._arrivals[0], URGENT)

    @staticmethod
    def record_failed(shell: Shell, failed: Requests, horizon_ns: int | None) -> None:
        """Requests that failed where their trace was taken are offered and never run."""
        if horizon_ns is not None:
            failed = failed.take(np.flatnonzero(failed.arrival_ns <= horizon_ns))
        shell.recorder.offered_many(failed)

    @property
    def is_exhausted(self) -> bool:
        """Nobody will arrive any more."""
        return self._next == self.count

    def stop(self) -> None:
        """Nobody arrives from now on."""
        self.count = self._next
        self._shell.recorder.withdraw(self._shell.env.now)

    def _arrived(self, _: simpy.Event) -> None:
        shell, arrivals, index = self._shell, self._arrivals, self._next
        now = arrivals[index]
        while index < self.count and arrivals[index] == now:
            request = RequestId(self._ids[index])
            if self._cancels is not None and self._cancels[index] != NEVER_NS:
                leave_at(shell, request, self._cancels[index] - now, FinishReason.CANCELLED)
            if self._deadline is not None:
                leave_at(shell, request, self._deadline, FinishReason.DEADLINE)
            cached = 0 if self._cached is None else self._cached[index]
            prompt, output = self._prompts[index], self._outputs[index]
            shell.tell(RequestArrived(request, prompt, output, cached))
            index += 1
            self._next = index
        if index < self.count:
            self._event.again(arrivals[index] - now, URGENT)


class ClosedUsers:
    """Users who each send, wait for the answer, think, and send again."""

    def __init__(self, shell: Shell, loop: ClosedLoop) -> None:
        self._shell = shell
        self._loop = loop
        self._sent = 0
        self._thinking = 0
        shell.on_finish = self._answered
        self._think(loop.users, lambda: 0)

    @property
    def is_exhausted(self) -> bool:
        """Nobody will send any more."""
        return self._thinking == 0

    def _think(self, users: int, delay: Callable[[], int]) -> None:
        for _ in range(users):
            self._thinking += 1
            Recurring(self._shell.env, self._send).again(delay(), URGENT)

    def _send(self, _: simpy.Event) -> None:
        shell, loop = self._shell, self._loop
        now = shell.env.now
        self._thinking -= 1
        if loop.requests is not None and self._sent >= loop.requests:
            return
        if loop.duration_ns is not None and now >= loop.duration_ns:
            return
        request = RequestId(self._sent)
        self._sent += 1
        prompt, output = loop.next_lengths()
        leaves = loop.next_cancel_ns()
        if leaves is not None:
            leave_at(shell, request, leaves, FinishReason.CANCELLED)
        if loop.deadline_ns is not None:
            leave_at(shell, request, loop.deadline_ns, FinishReason.DEADLINE)
        shell.recorder.offered(request, now, prompt)
        shell.tell(RequestArrived(request, prompt, output))

    def _answered(self, request: RequestId, reason: FinishReason) -> None:
        del request, reason  # Whatever the answer was, the user thinks and sends again.
        self._think(1, self._loop.next_think_ns)


def leave_at(shell: Shell, request: RequestId, delay_ns: int, reason: FinishReason) -> None:
    """The client leaves after a delay, unless its request has ended by then."""

    def leave(_: simpy.Event) -> None:
        if shell.ring.is_live(request):
            shell.cancel(request, reason)

    Recurring(shell.env, leave).again(delay_ns)
