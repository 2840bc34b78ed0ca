"""A scenario, its limits and prices, and the questions one can ask of them; answers are documents.

The documents are what `--json` prints: undefined values are null, loads are in `unit`.
"""

from collections.abc import Sequence
from typing import Any

from kvasir_core.errors import ScenarioError
from kvasir_scenario.schema_workload import ClosedWorkload
from kvasir_sim.capacity.cheapest import cheapest_ring, cheapest_workers
from kvasir_sim.capacity.driver import Driver, Row
from kvasir_sim.capacity.gains import Gain, gains_of, runs_expected
from kvasir_sim.capacity.knob import knob_of
from kvasir_sim.capacity.limits import read_limits, read_prices
from kvasir_sim.capacity.resources import one_more
from kvasir_sim.capacity.search import Capacity, LoadSearch
from kvasir_sim.sweep.points import Source

HOUR_S = 3600
SHOWN = (
    "verdict", "verdict_stage", "requests_per_s", "output_tokens_per_s", "ttft_p50_s",
    "ttft_p99_s", "tpot_p50_s", "tpot_p90_s", "tpot_p99_s", "busy_share_max", "window",
    "kv_blocks_peak", "kv_blocks_total", "preemptions",
)  # fmt: skip
PRESSING = ("row_width", "micro_batch_width", "running_cap", "kv")  # Of `kvasir_core.verdict`.


class Study:
    """What can be asked of one scenario; prices given go before the scenario's own.

    Raises:
        ScenarioError: The scenario, a limit or a price is wrong.
    """

    def __init__(
        self,
        source: Source,
        slos: Sequence[str],
        prices: Sequence[str],
        seeds: int,
        precision: float,
    ) -> None:
        self.source = source
        self.scenario = scenario = source.load()
        workers = () if scenario.experts is None else scenario.experts.workers
        own = {name: device.price_per_hour for name, device in scenario.devices.items()}
        own |= {worker.name: worker.price_per_hour for worker in workers}
        known = {name: price for name, price in own.items() if price is not None}
        self.limits = read_limits(slos)
        self.prices = known | read_prices(prices, list(own))
        self.knob = knob_of(scenario)
        if isinstance(scenario.workload, ClosedWorkload) and not self.limits:
            raise scenario.error(
                "workload.kind",
                "found closed: users who wait never overload a ring; give a limit (--slo), or a "
                "workload with a rate",
            )
        first = scenario.run.seed
        self.seeds = tuple(range(first, first + seeds))
        self.precision = precision

    def capacity(self, driver: Driver, *, has_gains: bool) -> dict[str, Any]:
        """The highest load, what breaks beyond it, and the gains."""
        search = self._search(driver)
        capacity = search.capacity(runs_expected(len(self.seeds)) if has_gains else 0)
        runs = driver.runs
        gains: list[Gain] = []
        if has_gains and capacity.index is not None and capacity.at is not None:
            gains = gains_of(search, capacity, one_more(self.scenario, capacity.at))
        return {
            "name": self.scenario.name,
            "found": capacity.load is not None,
            "unit": self.knob.unit,
            "capacity": capacity.load,
            "next_load": capacity.next_load,
            "precision": self.precision,
            "own_load": self.knob.base,
            "limits_s": {limit.name: limit.most_s for limit in self.limits},
            "seeds": len(self.seeds),
            "seeds_holding": capacity.holding,
            "seeds_holding_next": capacity.holding_next,
            "capacity_by_seed": list(capacity.seeds),
            "breaks": capacity.breaks,
            "binding": _binding(capacity),
            "at_capacity": _shown(capacity.at),
            "beyond": _shown(capacity.beyond),
            "cost": self._cost(capacity.at),
            "gains": [self._gain(gain, capacity) for gain in gains],
            "runs": runs,
            "runs_for_gains": driver.runs - runs,
        }

    def cheapest(self, driver: Driver, rate: float, stages_max: int) -> dict[str, Any]:
        """The cheapest ring or number of workers that carries a load."""
        if self.knob.is_whole and rate != int(rate):
            raise ScenarioError(f"--rate {rate:g}: the load is a number of users; give a whole one")
        search = self._search(driver)
        if self.scenario.experts is not None and self.scenario.experts.workers:
            found = cheapest_workers(search, rate, self.prices)
        else:
            found = cheapest_ring(search, rate, self.prices, stages_max)
        return {
            "name": self.scenario.name, "unit": self.knob.unit, "load": rate,
            "limits_s": {limit.name: limit.most_s for limit in self.limits},
            "seeds": len(self.seeds), **found, "runs": driver.runs,
        }  # fmt: skip

    def _search(self, driver: Driver) -> LoadSearch:
        return LoadSearch(driver, self.knob, self.limits, self.seeds, self.precision)

    def _cost(self, row: Row | None) -> dict[str, float] | None:
        """Of the scenario's own ring and workers; null unless every price is known."""
        ring, experts = self.scenario.ring, self.scenario.experts
        stages = ring.stages
        names = (
            [ring.device] * stages
            if isinstance(stages, int)
            else [stage.device or ring.device for stage in stages]
        )
        for worker in () if experts is None else experts.workers:
            names += [worker.name] * worker.count
        if any(name not in self.prices for name in names):
            return None
        usd_per_h = sum(self.prices[name] for name in names if name is not None)
        rate = None if row is None else row["output_tokens_per_s"]
        cost = {"usd_per_h": usd_per_h}
        if rate:
            cost["usd_per_million_output_tokens"] = usd_per_h / (rate * HOUR_S) * 1e6
        return cost

    def _gain(self, gain: Gain, capacity: Capacity) -> dict[str, Any]:
        price = self.prices.get(gain.resource.priced or "")
        load = capacity.load or 0.0
        extra = None if gain.share is None else gain.share * load
        return {
            "resource": gain.resource.name,
            "step": gain.resource.step,
            "gain_share": gain.share,
            "gain_share_least": gain.least,
            "gain_share_most": gain.most,
            "gain_load": extra,
            "seeds": gain.seeds,
            "is_untouched": gain.is_untouched,
            "usd_per_h": price,
            "gain_load_per_usd_per_h": extra / price if price and extra is not None else None,
            "why_not": gain.why_not,
        }


def _shown(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else {name: row[name] for name in SHOWN}


def _binding(capacity: Capacity) -> str | None:
    """The limit that stopped most micro-batches just beyond the capacity."""
    row = capacity.beyond or capacity.at
    if row is None or row["micro_batches"] == 0:
        return None
    return max(PRESSING, key=lambda name: float(row[f"{name}_share"] or 0.0))
