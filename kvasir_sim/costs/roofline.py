"""Costs from a model's shape and a device: bytes over bandwidth, or FLOPs over peak.

Per micro-batch of n rows a stage of L layers holds it for

    pass + L * (matrices(n) + small kernels(n) + experts(n) + attention) + head + tail

- A matrix of `inputs x outputs` takes a floor plus the longer of its bytes (weights once, rows in
  and out) and 2 * n * inputs * outputs FLOPs.
- Experts read the weights of the *distinct* experts touched (`costs.routing`), once each, and the
  rows that go to them.
- Attention: `costs.attention`.
- Small kernels (norms, rotation, activation): a floor each, and their rows through memory.
- The head adds the embedding's lookup; the tail a norm, the output matrix over output rows, and
  sampling.

The longer of two is the roofline (Williams, Waterman, Patterson, CACM 2009). What kernels reach
of the peaks is `costs.efficiency`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_core.errors import ScenarioError
from kvasir_core.microbatch import MicroBatch
from kvasir_core.plan import Plan
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_sim.costs.attention import AttentionCost
from kvasir_sim.costs.base import Provenance
from kvasir_sim.costs.efficiency import Efficiency
from kvasir_sim.costs.routing import distinct_experts
from kvasir_sim.costs.shape import ModelShape
from kvasir_sim.devices import GIB, Device

SMALL_KERNELS = 5  # Two norms, q and k norm, rotation, activation (with the residuals fused).
SMALL_ROW_WIDTHS = 10  # Widths of `hidden` that they move per row, in and out together.
EXPERT_ROW_WIDTHS = (3, 6)  # In units of hidden and expert_ffn, per row and expert: in and out.
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """One component's two bounds, in seconds; the longer counts."""

    memory_s: float
    compute_s: float
    floor_s: float

    @property
    def seconds(self) -> float:
        return self.floor_s + max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        """Which limit rules: the floor, memory or compute."""
        if self.floor_s > max(self.memory_s, self.compute_s):
            return "latency"
        return "memory" if self.memory_s >= self.compute_s else "compute"


class DeviceCosts:
    """One model on one device: seconds of a layer and of the extras of head and tail."""

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        efficiency: Efficiency,
        expert_shares: tuple[float, ...] = (),
    ) -> None:
        """`expert_shares` are each expert's part of all choices; needed for a mixture."""
        self.shape = shape
        self.device = device
        self.efficiency = efficiency
        self.attention = AttentionCost(shape, device, efficiency)
        self.pass_s = efficiency.pass_s if device.overhead_s is None else device.overhead_s
        self._peak = device.peak(shape.dtype)
        self._shares = expert_shares
        self._by_rows: dict[int, float] = {}
        self._by_outputs: dict[int, float] = {}

    def matrix(self, rows: int, inputs: int, outputs: int) -> Part:
        """One dense matrix over `rows` rows."""
        size = self.shape.element_bytes * (inputs * outputs + rows * (inputs + outputs))
        bandwidth = self.efficiency.matrix_memory * self.device.bandwidth_bytes_per_s
        flops = 2 * rows * inputs * outputs
        return Part(
            size / bandwidth,
            flops / (self.efficiency.matrix_flops * self._peak),
            self.efficiency.kernel_s,
        )

    def experts(self, rows: float, distinct: float) -> Part:
        """The routed experts of one layer: `distinct` of them touched by `rows` rows."""
        shape = self.shape
        pairs = rows * shape.experts_used
        moved = EXPERT_ROW_WIDTHS[0] * shape.hidden + EXPERT_ROW_WIDTHS[1] * shape.expert_ffn
        size = distinct * shape.expert_bytes + pairs * moved * shape.element_bytes
        flops = pairs * 6 * shape.hidden * shape.expert_ffn
        return Part(
            size / (self.efficiency.expert_memory * self.device.bandwidth_bytes_per_s),
            flops / (self.efficiency.expert_flops * self._peak),
            self.efficiency.expert_s,
        )

    def layer_parts(self, rows: int) -> dict[str, Part]:
        """All of a layer that depends on the rows alone, by name."""
        shape = self.shape
        parts = {
            f"matrix {inputs}x{outputs}": self.matrix(rows, inputs, outputs)
            for inputs, outputs in shape.matrices
        }
        if shape.experts:
            distinct = distinct_experts(rows, shape.experts_used, self._shares)
            parts["experts"] = self.experts(rows, distinct)
        moved = SMALL_ROW_WIDTHS * shape.hidden * shape.element_bytes * rows
        parts["small kernels"] = Part(
            moved / self.device.bandwidth_bytes_per_s, 0.0, SMALL_KERNELS * self.efficiency.kernel_s
        )
        return parts

    def rows_s(self, rows: int) -> float:
        """A layer without its attention."""
        known = self._by_rows.get(rows)
        if known is None:
            known = self._by_rows[rows] = sum(
                part.seconds for part in self.layer_parts(rows).values()
            )
        return known

    def head_s(self, rows: int) -> float:
        """The embedding's lookup: each row read and written once."""
        moved = 2 * rows * self.shape.hidden * self.shape.element_bytes
        return self.efficiency.kernel_s + moved / self.device.bandwidth_bytes_per_s

    def tail_s(self, outputs: int) -> float:
        """Norm, output matrix and sampling of the output rows; nothing without any."""
        if not outputs:
            return 0.0
        known = self._by_outputs.get(outputs)
        if known is None:
            matrix = self.matrix(outputs, self.shape.hidden, self.shape.vocab)
            logits = outputs * self.shape.vocab * LOGIT_BYTES
            sampling = self.efficiency.sampler_s + logits / (
                self.efficiency.sampler_memory * self.device.bandwidth_bytes_per_s
            )
            known = matrix.seconds + self.efficiency.kernel_s + sampling
            self._by_outputs[outputs] = known
        return known

    def bounds(self, rows: int) -> str:
        """A sentence: what limits a layer of so many rows."""
        parts = self.layer_parts(rows)
        total = sum(part.seconds for part in parts.values())
        shares = dict.fromkeys(("memory", "compute", "latency"), 0.0)
        for part in parts.values():
            shares[part.bound] += part.seconds / total
        named = ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share)
        return f"{rows} row{'s' * (rows > 1)}: {total * 1e6:.0f} us a layer ({named}-bound)"


class RooflineCosts:
    """The stages' holds; see the module for the formula."""

    turnaround_ns = 0

    def __init__(self, plan: Plan, stages: Sequence[DeviceCosts], provenance: Provenance) -> None:
        """One `DeviceCosts` per stage; equal devices should be one object, computed once."""
        self.provenance = provenance
        self._plan = plan
        self._devices = tuple(dict.fromkeys(stages))
        self._layers = tuple(stop - start for start, stop in plan.layers)
        self._place = tuple(self._devices.index(stage) for stage in stages)
        self._stages = tuple(
            (place, layers, device.pass_s)
            for place, layers, device in zip(self._place, self._layers, stages, strict=True)
        )
        self._head, self._tail = stages[0], stages[-1]

    def check_memory(self) -> None:
        """Refuses a plan that its devices cannot hold.

        Raises:
            ScenarioError: A stage's weights and KV do not fit; the message has both numbers.
        """
        for stage, layers in enumerate(self._layers):
            costs = self._devices[self._place[stage]]
            weights, kv = self._bytes(stage)
            memory = costs.device.memory_bytes
            if memory is None or weights + kv <= memory:
                continue
            room = max(memory - weights, 0) // (layers * costs.shape.kv_bytes)
            raise ScenarioError(
                f"stage {stage} ({layers} layers) needs {weights / GIB:.2f} GiB of weights and "
                f"{kv / GIB:.2f} GiB of KV ({self._plan.kv_tokens[stage]} tokens), together "
                f"{(weights + kv) / GIB:.2f} GiB, but {costs.device.name} has "
                f"{memory / GIB:.2f} GiB; "
                + (f"at most {room} KV tokens fit: set ring.kv_tokens" if room else "add stages")
            )

    def _bytes(self, stage: int) -> tuple[int, int]:
        """Weights and KV of one stage."""
        shape = self._devices[self._place[stage]].shape
        layers = self._layers[stage]
        is_tail = stage == len(self._layers) - 1
        weights = shape.stage_bytes(layers, is_head=stage == 0, is_tail=is_tail)
        return weights, self._plan.kv_tokens[stage] * layers * shape.kv_bytes

    def holds(self, micro_batch: MicroBatch) -> Sequence[int]:
        decodes = micro_batch.decodes
        return self._holds(
            micro_batch.row_count,
            decodes,
            micro_batch.decode_context,
            micro_batch.starts[decodes:],
            micro_batch.rows[decodes:],
            decodes + len(micro_batch.completing),
        )

    def _holds(
        self,
        rows: int,
        decodes: int,
        context: int,
        starts: Sequence[int],
        chunks: Sequence[int],
        outputs: int,
    ) -> list[int]:
        layer_s = [
            device.rows_s(rows) + device.attention.seconds(decodes, context, starts, chunks)
            for device in self._devices
        ]
        seconds = [pass_s + layers * layer_s[place] for place, layers, pass_s in self._stages]
        seconds[0] += self._head.head_s(rows)
        seconds[-1] += self._tail.tail_s(outputs)
        return [round(second * NANOS_PER_SECOND) for second in seconds]

    def experts_s(self, stage: int, rows: float, distinct: float) -> float:
        """The part of one layer's time on a stage that its routed experts take."""
        return self._devices[self._place[stage]].experts(rows, distinct).seconds

    def predict(self, decodes: int, decode_context: int, chunk_rows: int, chunk_start: int) -> int:
        starts, chunks = ((chunk_start,), (chunk_rows,)) if chunk_rows else ((), ())
        rows = decodes + chunk_rows
        return max(self._holds(rows, decodes, decode_context, starts, chunks, decodes))

    def describe(self) -> list[str]:
        lines = [
            (
                f"costs: roofline, {self.provenance}: the longer of bytes over bandwidth and FLOPs "
                "over peak, with efficiencies fitted on an RTX PRO 6000"
            )
        ]
        for costs in self._devices:
            guess = "estimated" if costs.device.is_assumed else "from"
            lines.append(f"{costs.device.name}: {guess} {costs.device.source}")
            lines += [
                f"{costs.device.name}, {costs.bounds(rows)}"
                for rows in dict.fromkeys((1, self._plan.row_width))
            ]
        for stage, layers in enumerate(self._layers):
            device = self._devices[self._place[stage]].device
            weights, kv = (size / GIB for size in self._bytes(stage))
            memory = device.memory_bytes
            of = "memory not known, not checked" if memory is None else f"of {memory / GIB:.1f} GiB"
            lines.append(
                f"stage {stage}: {layers} layers on {device.name}: {weights:.2f} GiB weights + "
                f"{kv:.2f} GiB KV {of}"
            )
        return lines
