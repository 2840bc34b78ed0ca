"""What must hold at a load: `--slo ttft_p99=1.0`, in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_core.errors import ScenarioError
from kvasir_scenario.schema_types import SECONDS_MAX, did_you_mean
from kvasir_sim.sweep.figures import LATENCIES, STATISTICS

NAMES = tuple(f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS)


@dataclass(frozen=True, slots=True)
class Limit:
    """A latency that must not be passed."""

    name: str
    most_s: float

    @property
    def figure(self) -> str:
        """Its column among the figures of a run."""
        return f"{self.name}_s"


def read_limits(texts: Sequence[str]) -> tuple[Limit, ...]:
    """What `--slo` says.

    Raises:
        ScenarioError: Not NAME=SECONDS, or a name twice.
    """
    limits: list[Limit] = []
    for text in texts:
        place = f"--slo {' '.join(text.split())[:80]}"
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or name not in NAMES:
            hint = did_you_mean(name, NAMES)
            raise ScenarioError(f"{place}: it must be NAME=SECONDS; {hint}")
        try:
            most_s = float(value)
        except ValueError:
            most_s = -1.0
        if not 0 < most_s <= SECONDS_MAX:
            raise ScenarioError(f"{place}: found {value!r}; it must be seconds above 0")
        if any(limit.name == name for limit in limits):
            raise ScenarioError(f"{place}: {name} is limited twice")
        limits.append(Limit(name, most_s))
    return tuple(limits)


def read_prices(texts: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    """What `--price` says: US dollars per hour of a device or a worker, by name.

    Raises:
        ScenarioError: Not NAME=PRICE, or a name that the scenario does not have.
    """
    prices: dict[str, float] = {}
    for text in texts:
        place = f"--price {' '.join(text.split())[:80]}"
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or name not in known:
            hint = did_you_mean(name, known)
            raise ScenarioError(f"{place}: it must be NAME=USD_PER_HOUR of a device; {hint}")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if not 0 <= price <= 1e6:
            raise ScenarioError(f"{place}: found {value!r}; it must be US dollars per hour")
        if name in prices:
            raise ScenarioError(f"{place}: {name} has a price twice")
        prices[name] = price
    return prices
