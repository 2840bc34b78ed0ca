"""The scenario's load as the planner sees it: mean lengths, and how many requests at once."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir_scenario.schema_workload import ClosedWorkload
from kvasir_scenario.workload import Requests, build_workload
from kvasir_sim.stage_costs import Reference

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario

SAMPLES = 4096  # Of a closed loop's lengths: the mean is then within a few per cent.


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Means over the workload's requests.

    Attributes:
        prompt_tokens, output_tokens: Mean per request.
        longest_request: Most prompt and output tokens of one request.
        running: Requests admitted at once when the ring is full.
        kv_most: KV that all of them at full context would take.
    """

    prompt_tokens: int
    output_tokens: int
    longest_request: int
    running: int
    kv_most: int

    @property
    def request_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def cohort(self, window: int) -> int:
        """Decodes per micro-batch when all running requests are spread over the window."""
        return -(-self.running // window)

    def reference(self, decodes: int, row_width: int) -> Reference:
        """The average micro-batch: its decodes, and the prompt rows that go with them."""
        decodes = max(1, min(decodes, row_width))
        share = decodes * self.prompt_tokens / self.output_tokens
        chunk = min(round(share), row_width - decodes)
        return Reference(
            decodes=decodes,
            context=self.prompt_tokens + max(self.output_tokens // 2, 1),
            chunk_rows=chunk,
            chunk_start=max(self.prompt_tokens - chunk, 0) // 2,
            completes=chunk >= self.prompt_tokens,
        )


def load_of(scenario: "Scenario") -> Load:
    """Reads or draws the workload.

    Raises:
        ScenarioError: As `build_workload`.
    """
    workload, _ = build_workload(scenario)
    ring, context = scenario.ring, scenario.model.context
    if isinstance(workload, Requests):
        prompts = workload.prompt_tokens.tolist()
        outputs = workload.output_tokens.tolist()
    else:
        lengths = [workload.next_lengths() for _ in range(SAMPLES)]
        prompts, outputs = [pair[0] for pair in lengths], [pair[1] for pair in lengths]
    running = ring.running_max
    if isinstance(scenario.workload, ClosedWorkload):
        running = min(running, scenario.workload.users)
    longest = max((p + o for p, o in zip(prompts, outputs, strict=True)), default=context)
    count = max(len(prompts), 1)
    block = ring.kv_block
    return Load(
        prompt_tokens=max(round(sum(prompts) / count), 1),
        output_tokens=max(round(sum(outputs) / count), 1),
        longest_request=min(longest, context),
        running=running,
        kv_most=running * -(-context // block) * block,
    )
