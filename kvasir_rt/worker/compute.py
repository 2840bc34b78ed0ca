"""A slice in memory: loads it from its file, and computes calls.

A slice is a GGUF file with gate, up and down of experts `[begin, end)` of one layer and some keys
that say so. The file came over the network: whatever it says is checked against what was assigned,
and what it needs in memory is known before any is taken.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvasir_rt.errors import ModelFileError
from kvasir_rt.experts.pairs import Pairs, pair_sum
from kvasir_rt.gguf_file import GgufFile, open_gguf
from kvasir_rt.model.linear import Numerics, Packer
from kvasir_rt.model.moe import Experts
from kvasir_rt.model.weights import load_experts
from kvasir_rt.worker.store import SliceName

SLICE_VERSION = 1
FFN_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class SliceSizes:
    """Of the experts in a file: how many, and how wide. Satisfies `weights.ExpertSizes`."""

    experts: int
    hidden: int
    expert_ffn: int

    def weight_bytes(self, numerics: Numerics) -> int:
        """What they take in memory."""
        packed = numerics.packed_bytes
        each = packed(2 * self.expert_ffn, self.hidden) + packed(self.hidden, self.expert_ffn)
        return self.experts * each


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """Experts that can be computed."""

    name: SliceName
    hidden: int
    weight_bytes: int
    experts: Experts

    @torch.inference_mode()
    def compute(self, x: Tensor, pairs: Pairs, numerics: Numerics) -> Tensor:
        """`float32[rows, hidden]` on the CPU: each row's weighted sum over the pairs."""
        device = numerics.device
        there = Pairs(pairs.rows.to(device), pairs.experts.to(device), pairs.weights.to(device))
        return pair_sum(self.experts, x.to(device, numerics.compute), there).cpu()


def read_sizes(gguf: GgufFile, name: SliceName, hidden: int) -> SliceSizes:
    """What the file holds, if it is the slice that was assigned.

    Args:
        gguf: The opened slice.
        name: What was assigned.
        hidden: The model's width, as the hub said.

    Raises:
        ModelFileError: It is another slice, or none.
    """
    said = {key: gguf.metadata.get(f"kvasir.slice.{key}") for key in
            ("version", "model", "layer", "begin", "end")}  # fmt: skip
    layer, begin, end = name.slice
    expected = {"version": SLICE_VERSION, "model": name.model, "layer": layer, "begin": begin,
                "end": end}  # fmt: skip
    for key, value in expected.items():
        if said[key] != value:
            raise ModelFileError(
                f"{gguf.path}: kvasir.slice.{key} is {said[key]!r}; {value!r} was assigned"
            )
    gate = gguf.tensors.get(f"blk.{layer}.ffn_gate_exps.weight")
    if gate is None or len(gate.shape) != 3:
        raise ModelFileError(f"{gguf.path}: holds no experts of layer {layer}")
    sizes = SliceSizes(end - begin, hidden, gate.shape[1])
    if gate.shape != (sizes.experts, sizes.expert_ffn, hidden) or sizes.expert_ffn > FFN_MAX:
        raise ModelFileError(
            f"{gguf.path}: gate has shape {list(gate.shape)}; {sizes.experts} experts of width "
            f"{hidden} were assigned"
        )
    return sizes


def slice_sizes(path: Path, name: SliceName, hidden: int) -> SliceSizes:
    """As `read_sizes`, of a file that is not open. Raises ModelFileError."""
    with open_gguf(path) as gguf:
        return read_sizes(gguf, name, hidden)


def load_slice(path: Path, name: SliceName, hidden: int, numerics: Numerics) -> LoadedSlice:
    """Load the experts.

    Raises:
        ModelFileError: The file is not this slice, or lacks a tensor.
    """
    with open_gguf(path) as gguf, torch.inference_mode():
        sizes = read_sizes(gguf, name, hidden)
        layer, begin, end = name.slice
        experts = load_experts(gguf, sizes, Packer(numerics), layer, 0, end - begin)
    return LoadedSlice(name, hidden, sizes.weight_bytes(numerics), replace(experts, begin=begin))
