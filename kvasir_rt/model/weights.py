"""Loads one stage's weights, and says beforehand how many bytes they take.

Only the stage's own layers are read, each tensor in blocks of rows straight into the packed form.
A tensor of those layers that nothing here uses is refused: it would change the results.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_rt.errors import UnsupportedModel
from kvasir_rt.gguf_file import GgufFile
from kvasir_rt.gguf_read import read_rows, read_vector, row_blocks, tensor_of
from kvasir_rt.model.block import AttentionWeights, DenseWeights, LayerWeights, Norm
from kvasir_rt.model.linear import Blocks, Linear, Numerics, Packer
from kvasir_rt.model.moe import ExpertBackend, Experts, LocalExperts, MoeBlock
from kvasir_rt.model.shape import ModelShape

GLOBAL_TENSORS = {
    "token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight",
}  # fmt: skip
LAYER_TENSORS = {
    "attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight",
    "attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias", "ffn_norm.weight",
}  # fmt: skip
DENSE_TENSORS = {"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"}
EXPERT_TENSORS = {
    "ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight",
}  # fmt: skip
QK_NORM_TENSORS = {"attn_q_norm.weight", "attn_k_norm.weight"}


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes one stage keeps, by what they are for."""

    layers: int
    embedding: int
    lm_head: int

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.lm_head


def weight_bytes(shape: ModelShape, layers: tuple[int, int], numerics: Numerics) -> WeightBytes:
    """What a stage of these layers will keep; a tied output matrix counts at the tail as well."""
    packed = numerics.packed_bytes
    attention = packed(shape.query_width + 2 * shape.kv_width, shape.hidden)
    attention += packed(shape.hidden, shape.query_width)
    if shape.experts:
        expert = packed(2 * shape.expert_ffn, shape.hidden) + packed(shape.hidden, shape.expert_ffn)
        ffn = shape.experts * expert + packed(shape.experts, shape.hidden)
    else:
        ffn = packed(2 * shape.ffn, shape.hidden) + packed(shape.hidden, shape.ffn)
    start, stop = layers
    table = shape.vocab * shape.hidden * numerics.boundary.itemsize
    return WeightBytes(
        layers=(stop - start) * (attention + ffn),
        embedding=table if start == 0 else 0,
        lm_head=packed(shape.vocab, shape.hidden) if stop == shape.layers else 0,
    )


@dataclass(frozen=True, slots=True)
class StageWeights:
    layers: list[LayerWeights]
    embedding: Tensor | None  # [vocab, hidden], at the head.
    output_norm: Norm | None  # At the tail, as the next.
    lm_head: Linear | None
    rope_factors: Tensor | None


class StageLoader:
    """Reads a stage's tensors into the form that `numerics` asks for."""

    def __init__(
        self,
        gguf: GgufFile,
        shape: ModelShape,
        numerics: Numerics,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._gguf = gguf
        self._shape = shape
        self._numerics = numerics
        self._packer = Packer(numerics)
        self._progress = progress
        self._local = LocalExperts({})

    def load(self, layers: tuple[int, int], backend: ExpertBackend | None = None) -> StageWeights:
        """Load layers `[start, stop)` and what head and tail need beside them.

        Args:
            layers: Half-open range.
            backend: Where routed experts are computed; None loads them here.

        Raises:
            ModelFileError: A tensor is missing, misshapen, or not known here.
        """
        start, stop = layers
        shape = self._shape
        self._refuse_unknown(start, stop)
        is_tail = stop == shape.layers
        loaded: list[LayerWeights] = []
        for layer in range(start, stop):
            loaded.append(self._layer(layer, backend))
            give_back_memory()
            if self._progress is not None:
                self._progress(layer - start + 1, stop - start)
        name = "token_embd.weight" if shape.is_tied else "output.weight"
        matrix = (shape.vocab, shape.hidden)
        weights = StageWeights(
            layers=loaded,
            embedding=self._table("token_embd.weight", *matrix) if start == 0 else None,
            output_norm=self._norm("output_norm.weight") if is_tail else None,
            lm_head=self._linear([(name, *matrix)]) if is_tail else None,
            rope_factors=self._rope_factors(),
        )
        give_back_memory()
        return weights

    def _refuse_unknown(self, start: int, stop: int) -> None:
        known = LAYER_TENSORS | (EXPERT_TENSORS if self._shape.experts else DENSE_TENSORS)
        if self._shape.architecture.has_qk_norm:
            known = known | QK_NORM_TENSORS
        for name in self._gguf.tensors:
            if name.startswith("blk."):
                _, number, rest = name.split(".", 2)
                is_known = rest in known or not (number.isdigit() and start <= int(number) < stop)
            else:
                is_known = name in GLOBAL_TENSORS
            if not is_known:
                raise UnsupportedModel(
                    f"{self._gguf.path}: tensor {name!r} is not known for "
                    f"{self._shape.architecture.name}; leaving it out would change the results"
                )

    def _layer(self, layer: int, backend: ExpertBackend | None) -> LayerWeights:
        prefix = f"blk.{layer}."
        shape = self._shape
        return LayerWeights(
            attention=AttentionWeights(
                norm=self._norm(prefix + "attn_norm.weight"),
                qkv=self._qkv(prefix),
                qk_norm=self._qk_norm(prefix) if shape.architecture.has_qk_norm else None,
                output=self._linear(
                    [(prefix + "attn_output.weight", shape.hidden, shape.query_width)],
                    self._bias([(prefix + "attn_output.bias", shape.hidden, None)]),
                ),
            ),
            ffn_norm=self._norm(prefix + "ffn_norm.weight"),
            ffn=self._experts(layer, prefix, backend) if shape.experts else self._dense(prefix),
        )

    def _qkv(self, prefix: str) -> Linear:
        shape = self._shape
        swap = shape.head_dim if shape.architecture.has_interleaved_rope else None
        parts = [
            (prefix + "attn_q", shape.query_width, swap),
            (prefix + "attn_k", shape.kv_width, swap),
            (prefix + "attn_v", shape.kv_width, None),
        ]

        def blocks() -> Iterator[NDArray[np.float32]]:
            for name, rows, head_dim in parts:
                tensor = tensor_of(self._gguf, name + ".weight", (rows, shape.hidden))
                if head_dim is None:
                    yield from row_blocks(self._gguf, tensor)
                    continue
                for start in range(0, rows, head_dim):
                    head = read_rows(self._gguf, tensor, start, start + head_dim)
                    yield halves_of_pairs(head, head_dim)

        rows = shape.query_width + 2 * shape.kv_width
        bias = self._bias([(name + ".bias", count, head) for name, count, head in parts])
        return self._packer.pack(blocks(), rows, shape.hidden, bias)

    def _bias(self, parts: list[tuple[str, int, int | None]]) -> Tensor | None:
        if not any(name in self._gguf.tensors for name, _, _ in parts):
            return None
        found: list[NDArray[np.float32]] = []
        for name, length, head_dim in parts:
            values = read_vector(self._gguf, name, length)
            if head_dim is not None:
                values = halves_of_pairs(values.reshape(length, 1), head_dim).reshape(length)
            found.append(values)
        return torch.from_numpy(np.concatenate(found))

    def _norm(self, name: str) -> Norm:
        return Norm(self._vector(name, self._shape.hidden), self._shape.rms_epsilon)

    def _qk_norm(self, prefix: str) -> Norm:
        shape = self._shape
        query = self._vector(prefix + "attn_q_norm.weight", shape.head_dim)
        key = self._vector(prefix + "attn_k_norm.weight", shape.head_dim)
        both = torch.cat((query.expand(shape.heads, -1), key.expand(shape.kv_heads, -1)))
        return Norm(both, shape.rms_epsilon)

    def _dense(self, prefix: str) -> DenseWeights:
        wide = (self._shape.ffn, self._shape.hidden)
        names = (prefix + "ffn_gate.weight", prefix + "ffn_up.weight")
        return DenseWeights(
            gate_up=self._linear([(name, *wide) for name in names]),
            down=self._linear([(prefix + "ffn_down.weight", wide[1], wide[0])]),
        )

    def _experts(self, layer: int, prefix: str, backend: ExpertBackend | None) -> MoeBlock:
        shape = self._shape
        if backend is None:
            self._local.by_layer[layer] = load_experts(
                self._gguf, shape, self._packer, layer, 0, shape.experts
            )
        router = self._linear([(prefix + "ffn_gate_inp.weight", shape.experts, shape.hidden)])
        return MoeBlock(layer, router, shape.experts_used, backend or self._local)

    def _linear(self, matrices: list[tuple[str, int, int]], bias: Tensor | None = None) -> Linear:
        """One product of matrices stacked by output features."""
        width = matrices[0][2]

        def blocks() -> Iterator[NDArray[np.float32]]:
            for name, rows, columns in matrices:
                yield from row_blocks(self._gguf, tensor_of(self._gguf, name, (rows, columns)))

        total = sum(rows for _, rows, _ in matrices)
        return self._packer.pack(blocks(), total, width, bias)

    def _table(self, name: str, rows: int, width: int) -> Tensor:
        numerics = self._numerics
        table = torch.empty(rows, width, dtype=numerics.boundary, device=numerics.device)
        done = 0
        for block in row_blocks(self._gguf, tensor_of(self._gguf, name, (rows, width))):
            table[done : done + len(block)] = torch.from_numpy(block)
            done += len(block)
        return table

    def _vector(self, name: str, length: int) -> Tensor:
        values = torch.from_numpy(read_vector(self._gguf, name, length))
        return values.to(self._numerics.device, self._numerics.compute)

    def _rope_factors(self) -> Tensor | None:
        name = "rope_freqs.weight"
        if name not in self._gguf.tensors:
            return None
        return torch.from_numpy(read_vector(self._gguf, name, self._shape.head_dim // 2))


def give_back_memory() -> None:
    """Return freed heap pages to the system, where the C library can; packing leaves many."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def halves_of_pairs(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows of q or k from llama's order (rotated pairs side by side) to half and half."""
    width = rows.shape[1]
    pairs = rows.reshape(-1, head_dim // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1, width)


class ExpertSizes(Protocol):
    """What the loader of experts knows of a model, or of a file with some of a layer's experts."""

    @property
    def experts(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def expert_ffn(self) -> int: ...


def load_experts(
    gguf: GgufFile, shape: ExpertSizes, packer: Packer, layer: int, begin: int, end: int
) -> Experts:
    """Experts `[begin, end)` of one layer, reading nothing else.

    Raises:
        ModelFileError: A tensor is missing or misshapen.
    """
    assert 0 <= begin < end <= shape.experts
    wide = (shape.experts, shape.expert_ffn, shape.hidden)
    narrow = (shape.experts, shape.hidden, shape.expert_ffn)
    prefix = f"blk.{layer}."
    gate = tensor_of(gguf, prefix + "ffn_gate_exps.weight", wide)
    up = tensor_of(gguf, prefix + "ffn_up_exps.weight", wide)
    down = tensor_of(gguf, prefix + "ffn_down_exps.weight", narrow)
    gate_up: list[Linear] = []
    downs: list[Linear] = []
    for expert in range(begin, end):
        rows = shape.expert_ffn
        span = (expert * rows, (expert + 1) * rows)

        def blocks(span: tuple[int, int] = span) -> Blocks:
            for tensor in (gate, up):
                yield from row_blocks(gguf, tensor, *span)

        gate_up.append(packer.pack(blocks(), 2 * rows, shape.hidden))
        span = (expert * shape.hidden, (expert + 1) * shape.hidden)
        downs.append(packer.pack(row_blocks(gguf, down, *span), shape.hidden, rows))
    return Experts(begin, gate_up, downs)
