"""How many distinct experts a micro-batch touches: what a mixture of experts costs at decode.

If each token chooses its `used` of `experts` with shares `p`, expert e is missed by one token with
probability 1 - used * p[e] and by n independent tokens with that to the power n. The expected
number touched is the sum over experts of 1 - (1 - used * p[e])^n. For Mixtral-8x7B's measured
shares this gives 2.0, 3.5, 5.3, 6.9, 7.7 of 8 at 1, 2, 4, 8, 16 tokens; counted were 2.0, 3.4,
5.3, 6.9, 7.8. Shares follow a Zipf law here: rank^-exponent, normalised.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario

ROUTING_EXPONENT = 0.45  # Fitted to Mixtral-8x7B's shares (rank 1 against rank 8: 2.6 times).


def zipf_shares(experts: int, exponent: float) -> tuple[float, ...]:
    """Shares of all choices by rank; 0 is uniform."""
    weights = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    return tuple((weights / weights.sum()).tolist())


def distinct_experts(rows: int, used: int, shares: tuple[float, ...]) -> float:
    """Expected number of distinct experts that `rows` independent tokens touch."""
    chosen = np.minimum(used * np.asarray(shares), 1.0)
    return max(float(used), float((1.0 - (1.0 - chosen) ** rows).sum()))


def shares_of(scenario: "Scenario", experts: int, costs: str) -> tuple[float, ...]:
    """The scenario's skew of the routing, or that of Mixtral.

    Args:
        scenario: A valid scenario.
        experts: Of one layer.
        costs: Kind of costs that ask.

    Raises:
        ScenarioError: The shares are measured ones, which differ from layer to layer.
    """
    if scenario.experts is None:
        return zipf_shares(experts, ROUTING_EXPONENT)
    routing = scenario.experts.routing
    match routing.kind:
        case "uniform":
            return zipf_shares(experts, 0.0)
        case "zipf":
            return zipf_shares(experts, routing.exponent)
        case "measured":
            raise scenario.error(
                "experts.routing.kind",
                f"found measured; costs of kind {costs} take uniform or zipf",
            )
