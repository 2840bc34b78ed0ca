"""An ideal prefix cache: what equal beginnings of prompts would save, at most.

Where a trace carries a hash per block of its prompts, a request's leading blocks that any earlier
arrival had too are taken from the cache. The cache never forgets and is filled at once, so the
figures are an upper bound; KV blocks are still counted for every request.
"""

from kvasir_scenario.schema import Scenario
from kvasir_scenario.workload import ClosedLoop, Requests

BLOCK_TOKENS = 512  # Per hash, in the Mooncake traces that carry them.


def cached_tokens(scenario: Scenario, requests: Requests | ClosedLoop) -> list[int] | None:
    """Per request in order of arrival, prompt rows that the cache holds; None without a cache.

    Raises:
        ScenarioError: `ring.prefix_cache` is true, and the workload carries no hashes.
    """
    if not scenario.ring.prefix_cache:
        return None
    hashes = None if isinstance(requests, ClosedLoop) else requests.prefix_hashes
    if hashes is None or isinstance(requests, ClosedLoop):
        raise scenario.error(
            "ring.prefix_cache",
            "found true; the workload carries no prefix hashes (format mooncake does)",
        )
    seen: set[int] = set()
    cached = []
    for row, prompt in enumerate(requests.prompt_tokens.tolist()):
        blocks = hashes.of(row)
        known = 0
        while known < len(blocks) and blocks[known] in seen:
            known += 1
        seen.update(blocks)
        cached.append(min(known * BLOCK_TOKENS, prompt - 1))
    return cached
