"""Pairs (row, expert): the sum over any set of them, and their form on the wire.

A pair carries its final weight, so sums over disjoint sets of pairs add up to the whole. On the
wire each row stands once, however many of its experts are asked for.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvasir_core.swarm.words import Share
from kvasir_rt.model.moe import Experts, feed_forward
from kvasir_rt.swarm.frames import PAIR_BYTES, Buffer, Call, Dtype, FrameError

assert sys.byteorder == "little", "tensors travel as they lie in memory"

TORCH_TYPES: dict[Dtype, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Pairs:
    """Some pairs: parallel columns `int64[pairs]`, `int64[pairs]`, `[pairs]`; experts ascend."""

    rows: Tensor
    experts: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.rows)


class Routing:
    """A router's choice, sorted by expert and then row: the order in which shares count pairs.

    Args:
        chosen: `int64[rows, k]`.
        weights: `[rows, k]`.
    """

    def __init__(self, chosen: Tensor, weights: Tensor) -> None:
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        self.everything = Pairs(order // chosen.shape[1], flat[order], weights.flatten()[order])
        experts, counts = torch.unique_consecutive(self.everything.experts, return_counts=True)
        self.counts: tuple[tuple[int, int], ...] = tuple(
            zip(experts.tolist(), counts.tolist(), strict=True)
        )
        starts = itertools.accumulate((count for _, count in self.counts), initial=0)
        self._starts = dict(zip((expert for expert, _ in self.counts), starts, strict=False))

    def pairs(self, shares: Sequence[Share]) -> Pairs:
        """The pairs that these shares mean."""
        spans = [
            (self._starts[share.expert] + share.first, share.pairs) for share in sorted(shares)
        ]
        if sum(count for _, count in spans) == len(self.everything):
            return self.everything
        where = torch.cat([torch.arange(start, start + count) for start, count in spans])
        where = where.to(self.everything.rows.device)
        return Pairs(
            self.everything.rows[where],
            self.everything.experts[where],
            self.everything.weights[where],
        )


def pair_sum(experts: Experts, x: Tensor, pairs: Pairs) -> Tensor:
    """The sum of `weight * expert(x[row])` over the pairs, by row.

    Args:
        experts: Hold every expert named.
        x: `[rows, hidden]`.
        pairs: Sorted by expert.

    Returns:
        `float32[rows, hidden]`; zero where a row has no pair.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    numbers, counts = torch.unique_consecutive(pairs.experts, return_counts=True)
    stop = 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        start, stop = stop, stop + count
        rows = pairs.rows[start:stop]
        index = number - experts.begin
        mixed = feed_forward(x[rows], experts.gate_up[index], experts.down[index])
        weights = pairs.weights[start:stop].float().unsqueeze(1)
        total.index_add_(0, rows, mixed.float().mul_(weights))
    return total


def to_bytes(values: Tensor, dtype: Dtype) -> bytes:
    """A tensor's numbers as they travel."""
    flat = values.to("cpu", TORCH_TYPES[dtype]).contiguous().view(torch.uint8)
    data: bytes = flat.numpy().tobytes()
    return data


def from_bytes(data: Buffer, dtype: Dtype, rows: int, hidden: int) -> Tensor:
    """`float32[rows, hidden]`; the length has been checked."""
    values = torch.frombuffer(bytearray(data), dtype=TORCH_TYPES[dtype])
    return values.view(rows, hidden).float()


def pack_pairs(x: Tensor, pairs: Pairs, dtype: Dtype) -> bytes:
    """A call's payload: row indexes, expert numbers and weights, then the rows `x`."""
    columns = (
        pairs.rows.cpu().numpy().astype("<u4"),
        pairs.experts.cpu().numpy().astype("<u4"),
        pairs.weights.float().cpu().numpy().astype("<f4"),
    )
    return b"".join([*(column.tobytes() for column in columns), to_bytes(x, dtype)])


def unpack_pairs(call: Call, payload: Buffer) -> tuple[Tensor, Pairs]:
    """A call's rows, `float32[rows, hidden]`, and its pairs sorted by expert.

    Raises:
        FrameError: A row that is not there, or a number that is not finite.
    """
    view = memoryview(payload)
    size = 4 * call.pairs
    rows = np.frombuffer(view[:size], "<u4").astype(np.int64)
    experts = np.frombuffer(view[size : 2 * size], "<u4").astype(np.int64)
    weights = np.frombuffer(view[2 * size : 3 * size], "<f4").copy()
    if rows.max() >= call.rows:
        raise FrameError(f"a pair names row {rows.max()} of {call.rows}")
    x = from_bytes(view[PAIR_BYTES * call.pairs :], call.dtype, call.rows, call.hidden)
    if not np.isfinite(weights).all() or not bool(x.isfinite().all()):
        raise FrameError("a weight or a row is not finite")
    order = np.argsort(experts, kind="stable")
    columns = (torch.from_numpy(column[order]) for column in (rows, experts, weights))
    return x, Pairs(*columns)
