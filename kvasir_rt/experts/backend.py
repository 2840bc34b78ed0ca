"""Routed experts of a stage, some of them elsewhere: `RemoteExpertBackend` plugs into `MoeBlock`.

    call = backend.start(layer, x, chosen, weights, mb)    # remote pairs leave, local ones compute
    call.is_done                                           # nothing is awaited any more
    call.result()                                          # [rows, hidden]

Every pair enters the sum exactly once: from the worker whose answer the core accepted, or computed
here. What a worker does not answer in time is computed here; nothing is dropped or renormalised.
"""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvasir_core.microbatch import MicroBatch
from kvasir_core.swarm.events import AnswerChecked
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_rt.experts.caller import ExpertCaller
from kvasir_rt.experts.pairs import Routing, pair_sum
from kvasir_rt.experts.records import RoutedCall, relative_error
from kvasir_rt.gguf_file import GgufFile
from kvasir_rt.logs import log_event
from kvasir_rt.model.linear import Numerics, Packer
from kvasir_rt.model.moe import DoneCall, ExpertCall, Experts, expert_sum
from kvasir_rt.model.shape import ModelShape
from kvasir_rt.model.weights import load_experts

logger = logging.getLogger("kvasir.experts")

BESIDE_DEADLINE_S = 5.0  # Past the core's own deadline; then its thread has failed.
LOOK_S = 0.5


def load_local(gguf: GgufFile, layers: tuple[int, int], numerics: Numerics) -> dict[int, Experts]:
    """All experts of a stage's layers `[start, stop)`: its own path, and what checks use.

    Raises:
        ModelFileError: A tensor is missing or misshapen.
    """
    shape, packer = ModelShape.of(gguf), Packer(numerics)
    with torch.inference_mode():
        return {
            layer: load_experts(gguf, shape, packer, layer, 0, shape.experts)
            for layer in range(*layers)
        }


class RemoteExpertBackend:
    """Local experts, and workers' where the coordinator says so. Satisfies `ExpertBackend`."""

    def __init__(self, caller: ExpertCaller) -> None:
        self._caller = caller

    def start(
        self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor, mb: MicroBatch
    ) -> ExpertCall:
        """See `ExpertBackend.start`."""
        del mb
        caller = self._caller
        if not caller.control.has_workers(layer) or not caller.is_alive:
            started = time.perf_counter_ns()
            value = expert_sum(caller.local[layer], x, chosen, weights)
            elapsed = time.perf_counter_ns() - started
            caller.measure(local_pairs=chosen.numel(), local_ns=elapsed)
            return DoneCall(value)
        call = RemoteCall(caller, caller.control.route(layer, x, Routing(chosen, weights)))
        call.compute_waiting()
        return call


class RemoteCall:
    """A call under way. Satisfies `ExpertCall`; used by the compute thread alone."""

    def __init__(self, caller: ExpertCaller, call: RoutedCall) -> None:
        self._caller = caller
        self._call = call
        self._computed: dict[int, Tensor] = {}
        self._sum: Tensor | None = None
        patience_s = caller.options.policy.call_deadline_ns / NANOS_PER_SECOND + BESIDE_DEADLINE_S
        self._until = time.monotonic() + patience_s

    @property
    def is_done(self) -> bool:
        """Nothing is awaited: `result` computes what is left, if anything, and returns."""
        return self._call.is_concluded or self._is_forsaken

    @property
    def is_due(self) -> bool:
        """It is done, or `compute_waiting` has something to compute."""
        return self.is_done or bool(self._call.local)

    @property
    def _is_forsaken(self) -> bool:
        """The caller's thread has failed, so it never will be over."""
        return time.monotonic() > self._until or not self._caller.is_alive

    def on_news(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on whatever thread, each time that `is_due` becomes true."""
        with self._call.changed:
            self._call.on_news.append(wake)
        if self.is_due:
            wake()

    def result(self) -> Tensor:
        """`[rows, hidden]` in the dtype of the rows, waiting for workers if need be."""
        if self._sum is None:
            self._sum = self._gather()
        return self._sum

    def compute_waiting(self) -> None:
        """Compute the parts that are ours so far; check workers' answers against them."""
        call = self._call
        while True:
            with call.changed:
                if not call.local:
                    return
                part, shares = call.local.popleft()
                suspects = call.suspects.pop(part, [])
            pairs = call.routing.pairs(shares)
            started = time.perf_counter_ns()
            value = pair_sum(self._caller.local[call.layer], call.x, pairs)
            elapsed = time.perf_counter_ns() - started
            self._caller.measure(local_pairs=len(pairs), local_ns=elapsed)
            self._computed[part] = value
            for answer in suspects:
                error = relative_error(answer.values, value[answer.rows].cpu())
                self._caller.control.tell(
                    AnswerChecked(call.id, part, answer.worker, answer.session, error)
                )

    def _gather(self) -> Tensor:
        call = self._call
        waited_ns = self._wait()
        if waited_ns is None:
            return self._all_locally()
        self._caller.measure(blocked_ns=waited_ns)
        total = torch.zeros(call.x.shape, dtype=torch.float32, device=call.x.device)
        for part in sorted({*self._computed, *call.accepted}):  # Whatever the order of arrival.
            answer = call.accepted.get(part)
            if answer is None:
                total += self._computed[part]
            else:
                total.index_add_(0, answer.rows, answer.values.to(total.device))
        return total.to(call.x.dtype)

    def _wait(self) -> int | None:
        """Compute and wait until the call is over; nanoseconds waited. None: it never will be."""
        call, waited_ns = self._call, 0
        while True:
            self.compute_waiting()
            started = time.perf_counter_ns()
            with call.changed:
                while not call.local and not call.is_concluded:
                    if self._is_forsaken:
                        return None
                    call.changed.wait(LOOK_S)
                is_over = call.is_concluded and not call.local
            waited_ns += time.perf_counter_ns() - started
            if is_over:
                return waited_ns

    def _all_locally(self) -> Tensor:
        """The caller's thread has ended: nothing of it is trusted to be complete."""
        call = self._call
        log_event(logger, "the caller is gone; computed locally", level=logging.ERROR)
        everything = call.routing.everything
        return pair_sum(self._caller.local[call.layer], call.x, everything).to(call.x.dtype)
