"""A stage that computes nothing: it holds each micro-batch for a fixed time.

What it costs beside the hold is the ring's own overhead. Yet it cannot be fooled: its "hidden
state" is a hash chained over every position, every stage and every token before, so a row that is
lost, doubled, out of order or computed on stale state changes the tokens, and `fixed_tokens` tells
in one line what they must be. Stages keep the chain per request, as a real one keeps KV.
"""

import time
from collections.abc import Iterable, Sequence

import numpy as np

from kvasir_core.plan import Plan
from kvasir_core.units import RequestId
from kvasir_rt import frames, wire
from kvasir_rt.ring_errors import JoinError, WireError

CHAIN_BYTES = 8
MASK = (1 << 64) - 1
MULTIPLIER = 6364136223846793005  # Knuth's MMIX generator; odd, so nothing is lost modulo 2^64.


def first_link(token: int, position: int) -> int:
    """The head's input to the chain for one row."""
    return (token * 0x9E3779B97F4A7C15 + position + 1) & MASK


def next_link(chain: int, value: int) -> int:
    """One stage's chain after a row whose input was `value`."""
    mixed = (chain * MULTIPLIER + value + 1) & MASK
    return mixed ^ (mixed >> 29)


def fixed_tokens(prompt: Sequence[int], count: int, *, stages: int, vocab: int) -> list[int]:
    """The tokens that any undisturbed ring of fixed stages gives for this prompt."""
    chains = [0] * stages
    history = list(prompt)
    tokens: list[int] = []
    position = 0
    while len(tokens) < count:
        value = 0
        while position < len(history):
            value = first_link(history[position], position)
            for stage in range(stages):
                value = chains[stage] = next_link(chains[stage], value)
            position += 1
        tokens.append((value >> 20) % vocab)
        history.append(tokens[-1])
    return tokens


class FixedStage:
    """Holds each micro-batch for `hold_ns`; the chain arithmetic is inside that time."""

    def __init__(self, plan: Plan, stage: int, spec: wire.FixedSpec) -> None:
        """Check that the chain fits into a boundary row.

        Raises:
            JoinError: It does not; both numbers are named.
        """
        row_bytes = plan.hidden * plan.element_bytes
        if row_bytes < CHAIN_BYTES:
            raise JoinError(
                f"a boundary row has {row_bytes} bytes; a fixed stage needs {CHAIN_BYTES}"
            )
        if len(spec.hold_ns) != plan.stages:
            raise JoinError(f"{len(spec.hold_ns)} holds were given for {plan.stages} stages")
        self._row_bytes = row_bytes
        self._stage = stage
        self._is_tail = stage == plan.stages - 1
        self._hold_ns = spec.hold_ns[stage]
        self._vocab = spec.vocab
        self._chains: dict[RequestId, tuple[int, int]] = {}  # Positions done, chain.

    def step(self, lap: wire.Lap, body: memoryview | None) -> wire.Buffer:
        """The boundary, or at the tail the packed result rows, after the hold.

        Raises:
            WireError: A span does not continue where its request stopped (law R3).
        """
        until = time.monotonic_ns() + self._hold_ns
        values = self._inputs(lap, body)
        batch = lap.micro_batch
        done: list[int] = []
        for request, start, rows in zip(batch.requests, batch.starts, batch.rows, strict=True):
            position, chain = self._chains.get(request, (0, 0))
            if start != position:
                raise WireError(
                    f"request {request} comes with position {start}; stage {self._stage} has "
                    f"{position} of it"
                )
            for value in values[len(done) : len(done) + rows]:
                chain = next_link(chain, value)
                done.append(chain)
            self._chains[request] = (start + rows, chain)
        out = self._result(lap, done) if self._is_tail else self._boundary(done)
        time.sleep(max(0, until - time.monotonic_ns()) / 1e9)
        return out

    def _inputs(self, lap: wire.Lap, body: memoryview | None) -> list[int]:
        batch = lap.micro_batch
        if body is not None:
            rows = np.frombuffer(body, np.uint8).reshape(batch.row_count, self._row_bytes)
            chains = np.ascontiguousarray(rows[:, :CHAIN_BYTES]).view(np.uint64)[:, 0]
            return [int(chain) for chain in chains]
        ids = np.frombuffer(lap.ids, np.int32).tolist()
        positions = (
            start + i for start, n in zip(batch.starts, batch.rows, strict=True) for i in range(n)
        )
        return [first_link(token, at) for token, at in zip(ids, positions, strict=True)]

    def _boundary(self, chains: list[int]) -> memoryview:
        out = np.zeros((len(chains), self._row_bytes), np.uint8)
        out[:, :CHAIN_BYTES] = np.array(chains, np.uint64)[:, None].view(np.uint8)
        return out.data.cast("B")

    def _result(self, lap: wire.Lap, chains: list[int]) -> bytes:
        batch = lap.micro_batch
        ends = np.cumsum(batch.rows)
        spans = [*range(batch.decodes), *batch.completing]
        return frames.pack_rows(
            [frames.ResultRow((chains[ends[i] - 1] >> 20) % self._vocab, 0.0) for i in spans]
        )

    def release(self, requests: Iterable[RequestId]) -> None:
        for request in requests:
            self._chains.pop(request, None)

    def reset(self) -> None:
        self._chains.clear()
