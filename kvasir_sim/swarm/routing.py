"""Which experts a micro-batch's rows choose: uniform, Zipf, or shares measured elsewhere.

Each row chooses `top_k` different experts; expert e is chosen by a row with probability
`min(1, top_k * share[e])` (what is cut off is spread over the others). The choice of one row is a
systematic sample: a random start, then every whole step along the summed probabilities. So each
expert's count over n rows is binomial with exactly its probability, which is what the number of
*distinct* experts depends on; which experts one row combines is not modelled.

Skew is the layer's own: ranks are shuffled per layer (of PATTERNS patterns), or popular experts of
all layers would fall into the same slices. Drawn counts are kept and used again, SAMPLES for each
number of rows, because drawing costs more than all decisions about them.
"""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np

from kvasir_core.errors import ScenarioError
from kvasir_scenario.data_paths import existing_file
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_experts import Routing as RoutingSection
from kvasir_scenario.tables import Floats
from kvasir_sim.costs.routing import zipf_shares

Pairs = tuple[tuple[int, int], ...]
"""`(expert, rows that chose it)`, experts ascending, as `ExpertsRouted` wants them."""

PATTERNS = 8  # Different skews; layer k has pattern k mod 8.
SAMPLES = 8  # Draws kept for each number of rows and pattern.
KEPT_MAX = 512  # Numbers of rows times patterns kept: about 50 MB at 256 experts.
FILE_BYTES_MAX = 64 << 20


class Routing:
    """Draws `Pairs`; seeded."""

    def __init__(self, chances: Floats, top_k: int, rng: np.random.Generator) -> None:
        """`chances[pattern, expert]`: the probability that a row chooses the expert."""
        self.top_k = top_k
        self._chances = chances
        self._sums = np.cumsum(chances, axis=1)
        self._sums[:, -1] = top_k
        self._rng = rng
        self._kept: OrderedDict[tuple[int, int], list[Pairs]] = OrderedDict()
        self._distinct: dict[int, float] = {}
        self._turn = 0

    def draw(self, layer: int, rows: int) -> Pairs:
        """Counts of one layer for a micro-batch of so many rows."""
        key = layer % len(self._chances), rows
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = []
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        if len(kept) < SAMPLES:
            kept.append(self._sample(*key))
            return kept[-1]
        self._turn += 1
        return kept[self._turn % SAMPLES]

    def distinct(self, rows: int) -> float:
        """Expected number of distinct experts that so many rows choose, mean over the patterns."""
        known = self._distinct.get(rows)
        if known is None:
            each = (1.0 - (1.0 - self._chances) ** rows).sum(axis=1)
            known = self._distinct[rows] = float(each.mean())
        return known

    def rows_of(self, pairs: int, rows: int) -> int:
        """Expected number of rows that own at least one of `pairs` pairs of a call."""
        missing = (1.0 - pairs / (rows * self.top_k)) ** self.top_k
        return min(rows, pairs, max(1, round(rows * (1.0 - missing))))

    def _sample(self, pattern: int, rows: int) -> Pairs:
        starts = self._rng.random(rows)
        points = starts[:, None] + np.arange(self.top_k)
        chosen = np.searchsorted(self._sums[pattern], points.ravel(), side="right")
        experts = self._chances.shape[1]
        counts = np.bincount(np.minimum(chosen, experts - 1), minlength=experts)
        touched = np.flatnonzero(counts)
        return tuple(zip(touched.tolist(), counts[touched].tolist(), strict=True))


def routing_of(
    scenario: Scenario,
    section: RoutingSection,
    experts: int,
    top_k: int,
    rng: np.random.Generator,
) -> Routing:
    """The scenario's routing.

    Raises:
        ScenarioError: The file of measured shares is missing, wrong, or of another model.
    """
    if section.kind == "measured":
        assert section.file is not None
        path = existing_file(scenario, "experts.routing.file", section.file)
        try:
            shares = read_shares(path, experts)
        except ScenarioError as error:
            raise scenario.error("experts.routing.file", str(error)) from error
    else:
        exponent = section.exponent if section.kind == "zipf" else 0.0
        ranks = np.array(zipf_shares(experts, exponent))
        shares = np.stack([rng.permutation(ranks) for _ in range(PATTERNS)])
    return Routing(inclusion(shares, top_k), top_k, rng)


def inclusion(shares: Floats, top_k: int) -> Floats:
    """Per expert the probability of being among a row's `top_k`: capped at 1, summing to top_k."""
    chances = shares * top_k / shares.sum(axis=1, keepdims=True)
    for _ in range(shares.shape[1]):  # Each round caps at least one more expert, or ends.
        over = chances > 1.0
        excess = top_k - np.minimum(chances, 1.0).sum(axis=1, keepdims=True)
        if not (excess > 1e-12).any():
            break
        free = np.where(over | (chances >= 1.0), 0.0, chances)
        total = free.sum(axis=1, keepdims=True)
        scale = 1.0 + np.divide(excess, total, out=np.zeros_like(total), where=total > 0)
        chances = np.where(free > 0, free * scale, np.minimum(chances, 1.0))
    capped: Floats = np.minimum(chances, 1.0)
    return capped


def read_shares(path: Path, experts: int) -> Floats:
    """Measured shares by layer: the mean over the file's data sets, weighted by their tokens.

    The file is JSON: `data.NAME.{tokens, expert_share_by_layer: [[share per expert] per layer]}`.

    Raises:
        ScenarioError: It is no such file, or its layers have another number of experts.
    """
    if path.stat().st_size > FILE_BYTES_MAX:
        raise ScenarioError(f"{path}: has more than {FILE_BYTES_MAX} bytes")
    try:
        sets = json.loads(path.read_text(encoding="utf-8"))["data"].values()
        weighted = [
            (part["tokens"], np.array(part["expert_share_by_layer"], float)) for part in sets
        ]
        if not all(tokens > 0 for tokens, _ in weighted):
            raise ValueError("tokens must be above 0")
        total = sum(tokens * shares for tokens, shares in weighted)
        mean = np.asarray(total / sum(tokens for tokens, _ in weighted))
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ScenarioError(
            f"{path}: must be JSON with data.NAME.tokens and data.NAME.expert_share_by_layer "
            f"({type(error).__name__}: {error})"
        ) from error
    if mean.ndim != 2 or mean.shape[1] != experts:
        found = mean.shape[1] if mean.ndim == 2 else "no"
        raise ScenarioError(f"{path}: has shares of {found} experts; the model has {experts}")
    if not (np.isfinite(mean).all() and (mean >= 0).all() and (mean.sum(axis=1) > 0).all()):
        raise ScenarioError(f"{path}: shares must be at least 0, and not all 0 in a layer")
    return mean
