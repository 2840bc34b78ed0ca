"""What must hold at a load: `--slo ttft_p99=1.0`, in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_core.errors import ScenarioError
from kvasir_scenario.named_values import name_and_value, number_of, place_of
from kvasir_scenario.schema_types import PRICE_MAX, SECONDS_MAX, did_you_mean
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
        name, value = name_and_value("--slo", text, "NAME=SECONDS", "1.0")
        if name not in NAMES:
            raise ScenarioError(
                f"{place_of('--slo', text)}: {name[:80]} is no latency; {did_you_mean(name, NAMES)}"
            )
        most_s = number_of("--slo", text, value, "seconds above 0", SECONDS_MAX)
        if not most_s:
            raise ScenarioError(f"{place_of('--slo', text)}: found 0; it must be seconds above 0")
        if any(limit.name == name for limit in limits):
            raise ScenarioError(f"{place_of('--slo', text)}: {name} is limited twice")
        limits.append(Limit(name, most_s))
    return tuple(limits)


def read_prices(texts: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    """What `--price` says: US dollars per hour of a device or a worker, by name.

    Raises:
        ScenarioError: Not NAME=PRICE, or a name that the scenario does not have.
    """
    prices: dict[str, float] = {}
    for text in texts:
        name, value = name_and_value("--price", text, "NAME=USD_PER_HOUR", "1.8")
        if name not in known:
            raise ScenarioError(
                f"{place_of('--price', text)}: {name[:80]} is no device or worker of the "
                f"scenario; {did_you_mean(name, known)}"
            )
        if name in prices:
            raise ScenarioError(f"{place_of('--price', text)}: {name} has a price twice")
        prices[name] = number_of("--price", text, value, "US dollars per hour", PRICE_MAX)
    return prices
