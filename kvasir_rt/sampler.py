"""The tail's sampler: greedy or drawn, the same whoever shares the micro-batch.

Every draw comes from numbers, one a token, that depend on (seed, position) alone: neither on the
batch nor on what was drawn before. A replay after a failure computes the same logits but for
rounding, and draws the same tokens: each token races for itself, so a logit that moves by 1e-5
changes the winner once in some 100,000 draws. (One number and a walk along the sums of all shares
would change it once in 200: small errors add up to more than an unlikely token's share.)
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_rt.sampling import SamplingParams

LIKELY = 1024  # Tokens sorted at first for top-p; nearly always enough, and 10 times quicker.


class TokenHistory:
    """The tokens of one request so far, counted; for penalties."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._counts = Counter(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        self._counts.update(tokens)

    def counted(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Distinct tokens and how often each was seen."""
        count = len(self._counts)
        return (
            np.fromiter(self._counts.keys(), np.int64, count),
            np.fromiter(self._counts.values(), np.float32, count),
        )


class SampledRow(NamedTuple):
    """A picked token; `logprob` and `top` (token, log-probability) only where asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None],
) -> list[SampledRow | None]:
    """Pick one token per row.

    Args:
        logits: `float32[rows, vocab]`, on any device.
        params: Per row.
        positions: Per row, the position that the picked token will have in its request.
        histories: Per row; needed where `params.needs_history`, else None.

    Returns:
        Per row the pick, or None where the logits are not finite (the model's fault, and that
        request's alone).
    """
    best, likeliest = logits.max(dim=-1)
    is_finite = torch.isfinite(best).tolist()
    greedy = likeliest.tolist()
    picked: list[SampledRow | None] = []
    for row, each in enumerate(params):
        if not is_finite[row]:
            picked.append(None)
            continue
        if each.is_plain_greedy and each.logprobs is None:
            picked.append(SampledRow(greedy[row], 0.0, ()))
            continue
        values = logits[row].cpu().numpy()
        token = greedy[row]
        if not each.is_plain_greedy:
            token = _pick(_adjusted(values, each, histories[row]), each, positions[row])
        picked.append(_reported(values, token, each.logprobs))
    return picked


def uniform(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """Numbers between 0 and 1, both impossible, that depend on nothing but seed and position."""
    text = (seed % (1 << 64)).to_bytes(8, "little") + position.to_bytes(8, "little")
    key = hashlib.blake2b(text, digest_size=16, person=b"kvasir").digest()
    raw = np.random.PCG64(int.from_bytes(key, "little")).random_raw(count)
    return ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _adjusted(
    logits: NDArray[np.float32], params: SamplingParams, history: TokenHistory | None
) -> NDArray[np.float32]:
    """The logits after bias and penalties; the argument is left alone."""
    if not params.logit_bias and not params.needs_history:
        return logits
    logits = logits.copy()
    if params.needs_history:
        assert history is not None
        tokens, counts = history.counted()
        seen = logits[tokens]
        factor = np.float32(params.repetition_penalty)
        seen = np.where(seen > 0, seen / factor, seen * factor)
        seen -= counts * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
        logits[tokens] = seen
    for token, bias in params.logit_bias:
        if token < len(logits):
            logits[token] += np.float32(bias)
    return logits


def _pick(logits: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore", under="ignore"):  # A tiny temperature: 0 or -inf, as meant.
        weights = np.exp((logits - logits.max()).astype(np.float64) / params.temperature)
    if 0 < params.top_k < len(weights):
        _keep_top_k(weights, params.top_k)
    if params.top_p < 1:
        _keep_top_p(weights, params.top_p)
    if params.min_p > 0:
        weights[weights < params.min_p * weights.max()] = 0
    return _first(weights, uniform(params.seed, position, len(weights)))


def _first(weights: NDArray[np.float64], numbers: NDArray[np.float64]) -> int:
    """Who is first when each arrives after -log(1 - number) / weight: as often as its share."""
    most = weights / numbers  # -log(1 - number) is at least the number: few need their logarithm.
    best = int(most.argmax())
    least = weights[best] / -math.log1p(-numbers[best])
    likely = np.flatnonzero(most >= least * (1 - 1e-9))
    return int(likely[(weights[likely] / -np.log1p(-numbers[likely])).argmax()])


def _keep_top_k(weights: NDArray[np.float64], count: int) -> None:
    """Zero all but the largest `count`; of equals at the edge the lower ids stay."""
    edge = np.partition(weights, -count)[-count]
    equal = np.flatnonzero(weights == edge)
    spare = np.count_nonzero(weights >= edge) - count
    weights[weights < edge] = 0
    weights[equal[len(equal) - spare :]] = 0


def _keep_top_p(weights: NDArray[np.float64], share: float) -> None:
    """Zero all but the fewest largest that hold `share` of the whole; at least one stays."""
    wanted = share * weights.sum()
    count = min(LIKELY, len(weights))
    while True:
        largest = np.argpartition(-weights, count - 1)[:count]
        largest = largest[np.lexsort((largest, -weights[largest]))]
        sums = weights[largest].cumsum()
        if sums[-1] >= wanted or count == len(weights):
            break
        count = len(weights)
    kept = largest[: int(sums.searchsorted(wanted, side="left")) + 1]
    values = weights[kept]
    weights[:] = 0
    weights[kept] = values


def _reported(logits: NDArray[np.float32], token: int, alternatives: int | None) -> SampledRow:
    if alternatives is None:
        return SampledRow(token, 0.0, ())
    wide = logits.astype(np.float64)
    total = wide.max() + math.log(np.exp(wide - wide.max()).sum())
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        count = min(alternatives, len(logits))
        largest = np.argpartition(-logits, count - 1)[:count]
        largest = largest[np.lexsort((largest, -logits[largest]))]
        top = tuple((int(each), float(wide[each] - total)) for each in largest)
    return SampledRow(token, float(wide[token] - total), top)
