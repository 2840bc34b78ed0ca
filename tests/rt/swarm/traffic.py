"""Expert calls through a backend, each compared with the local result."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvasir_rt.experts.backend import RemoteExpertBackend
from kvasir_rt.experts.caller import ExpertCaller
from kvasir_rt.experts.records import relative_error
from kvasir_rt.model.moe import expert_sum
from tests.rt.swarm.swarms import TINY

LIMIT_S = 60.0


@dataclass
class Traffic:
    """Random routings with a seed; remembers the worst error and every call's time."""

    caller: ExpertCaller
    rows: int = 8
    seed: int = 1
    worst: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        self._backend = RemoteExpertBackend(self.caller)

    def call(self, layer: int) -> None:
        generator = self._generator
        x = torch.randn(self.rows, TINY.hidden, generator=generator)
        order = [torch.randperm(TINY.experts, generator=generator) for _ in range(self.rows)]
        chosen = torch.stack(order)[:, : TINY.experts_used]
        weights = torch.rand(self.rows, TINY.experts_used, generator=generator)
        weights /= weights.sum(dim=1, keepdim=True)
        right = expert_sum(self.caller.local[layer], x, chosen, weights)
        started = time.monotonic()
        with torch.inference_mode():
            found = self._backend.start(layer, x, chosen, weights, None).result()  # type: ignore[arg-type]
        self.seconds.append(time.monotonic() - started)
        self.worst = max(self.worst, relative_error(found, right))

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for layer in range(TINY.layers):
                self.call(layer)

    def run_until(self, what: str, is_so: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Calls, one after the other, until something has come about."""
        until = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < until, f"not within {limit_s:g} s: {what}"
            self.run(1)

    def run_until_accepted(self, more: int = 200) -> None:
        """Until so many pairs more came from workers."""
        counts = self.caller.statistics().calls
        self.run_until(
            f"{more} pairs from workers",
            lambda: self.caller.statistics().calls.pairs_accepted >= counts.pairs_accepted + more,
        )
