"""The market, written again from its rules, without any state that is kept up to date.

Everything is recomputed from three lists: coverage, claims, and what nodes hold. It is slow, short,
and was written from the description, not from the code; the real market must agree with it.
"""

from dataclasses import dataclass, field
from math import ceil

Range = tuple[int, int, int]  # Layer, begin, end.


@dataclass
class NaiveMarket:
    layers: tuple[int, ...]
    experts: int
    slice_max: int
    grain: int
    claim_ttl: int
    coverage_ttl: int
    target: int = 0
    coverage: dict[str, tuple[tuple[Range, ...], int]] = field(default_factory=dict)  # And when.
    claims: dict[str, tuple[Range, int]] = field(default_factory=dict)  # And when granted.
    lapses: dict[str, tuple[int, int]] = field(default_factory=dict)  # How many, wait until.
    doubted: set[tuple[str, Range]] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)

    def pass_time(self, now: int) -> None:
        """Claims lapse at their TTL; coverage is gone after its own."""
        for node, (_, granted) in list(self.claims.items()):
            if now >= granted + self.claim_ttl:
                del self.claims[node]
                times = min(10, self.lapses.get(node, (0, 0))[0] + 1)
                wait = self.claim_ttl * 2 ** (times - 1)
                self.lapses[node] = (times, granted + self.claim_ttl + wait)
        for node, (_, heard) in list(self.coverage.items()):
            if now > heard + self.coverage_ttl:
                self.forget(node)

    def forget(self, node: str) -> None:
        self.coverage.pop(node, None)
        self.doubted = {entry for entry in self.doubted if entry[0] != node}
        self.draining.discard(node)

    def report(self, node: str, ranges: tuple[Range, ...], now: int, *, draining: bool) -> None:
        if not ranges:
            self.forget(node)
            return
        self.coverage[node] = ranges, now
        self.doubted = {(n, r) for n, r in self.doubted if n != node or r in ranges}
        (self.draining.add if draining else self.draining.discard)(node)
        claim = self.claims.get(node)
        if claim:
            layer, begin, end = claim[0]
            if any(x == layer and b <= begin and end <= e for x, b, e in ranges):
                del self.claims[node]
                self.lapses.pop(node, None)

    def replicas(self, layer: int, expert: int) -> int:
        return sum(
            x == layer and b <= expert < e
            for node, (ranges, _) in self.coverage.items() if node not in self.draining
            for x, b, e in ranges if (node, (x, b, e)) not in self.doubted
        )  # fmt: skip

    def claimed(self, layer: int, expert: int) -> int:
        return sum(x == layer and b <= expert < e for (x, b, e), _ in self.claims.values())

    def demand(self) -> dict[int, list[tuple[int, int, int, int, float]]]:
        """By layer: maximal runs `(begin, end, replicas, claimed, scarcity)`."""
        shown: dict[int, list[tuple[int, int, int, int, float]]] = {}
        for layer in self.layers:
            runs = self.runs(layer, range(self.experts))
            shown[layer] = [(b, e, r, c, self.scarcity(r + c)) for b, e, r, c in runs]
        return shown

    def scarcity(self, supply: int) -> float:
        if self.target == 0 or supply >= self.target:
            return 0.0
        return (self.target - supply) / self.target

    def runs(self, layer: int, experts: "range | list[int]") -> list[tuple[int, int, int, int]]:
        runs: list[tuple[int, int, int, int]] = []
        for e in experts:
            counts = self.replicas(layer, e), self.claimed(layer, e)
            if runs and runs[-1][1] == e and runs[-1][2:] == counts:
                runs[-1] = (runs[-1][0], e + 1, *counts)
            else:
                runs.append((e, e + 1, *counts))
        return runs

    def volunteer(
        self, node: str, budget: int, held: tuple[Range, ...], now: int
    ) -> tuple[Range, int] | str:
        """The range to serve and when it was claimed, or why not."""
        if node in self.draining:
            return "draining"
        if node in self.claims:
            (layer, begin, end), granted = self.claims[node]
            if end - begin <= budget:
                return (layer, begin, end), granted
            del self.claims[node]
        if self.lapses.get(node, (0, now))[1] > now:
            return "its claims lapsed"
        budget = min(budget, self.slice_max)
        own = {(x, i) for x, b, e in self.coverage.get(node, ((), 0))[0] for i in range(b, e)}
        free = {x: [i for i in range(self.experts) if (x, i) not in own] for x in self.layers}
        candidates = []
        for layer, begin, end in held:
            for run in self.runs(layer, free[layer]):
                low, high = max(begin, run[0]), min(end, run[1])
                if low < high and run[2] + run[3] < self.target:
                    candidates.append((run[2] + run[3], -min(high - low, budget), layer, low, high))
        if not candidates:
            for layer in self.layers:
                for b, e, r, c in self.runs(layer, free[layer]):
                    if r + c < self.target:
                        candidates.append((r + c, -min(e - b, budget), layer, b, e))
        if not candidates:
            return "no demand"
        _, _, layer, begin, end = min(candidates)
        found = layer, begin, self.cut(begin, end, budget)
        self.claims[node] = found, now
        return found, now

    def cut(self, begin: int, end: int, budget: int) -> int:
        """Whole if it fits; else even pieces whose ends fall on the grain where they can."""
        if end - begin <= budget:
            return end
        even = begin + ceil((end - begin) / ceil((end - begin) / budget))
        for cut in (ceil(even / self.grain) * self.grain, even // self.grain * self.grain):
            if begin < cut < end and cut - begin <= budget:
                return cut
        return even
