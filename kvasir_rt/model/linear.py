"""Matrix products with weights packed once for the device they run on.

Which form is fastest depends on the processor, and was measured (SmolLM2, one core, 8 rows):

- `mkldnn` (float32; bfloat16 where the processor multiplies it): oneDNN's blocked layout, 1.4 to 2
  times `F.linear` at decode widths.
- `half`: bfloat16 asked of a processor without bfloat16 arithmetic, where oneDNN's emulation is 3
  times slower than float32 at 8 rows and 5 times at 128. The weights are kept as float16 (three
  more bits of precision than asked, half the bytes of float32) and multiplied in float32 by FBGEMM:
  1.4 times the float32 speed at decode widths. A matrix with a weight beyond float16 stays float32,
  not packed.
- `plain`: `F.linear`, on CUDA and where neither library is built in.

A large matrix is packed in chunks of rows, so that loading needs one chunk beside what is kept.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kvasir_rt.errors import UnsupportedModel

CHUNK_ELEMENTS = 3 << 20  # 12 MiB of float32 beside the packed weights while loading.
HALF_MAX = 65504.0
HALF_BLOCK = 512  # FBGEMM rounds the input features up to this.
PACK_ROWS = 8  # Decode width the blocked layout is chosen for; 1 to 16 measured alike.

Linear: TypeAlias = Callable[[Tensor], Tensor]
Form: TypeAlias = Literal["mkldnn", "half", "plain"]
Blocks: TypeAlias = Iterable[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Numerics:
    """The number formats of a stage.

    Attributes:
        boundary: Of hidden states between stages, and of the embedding table.
        compute: Of activations and KV inside the stage.
        form: How weights are packed.
    """

    device: torch.device
    boundary: torch.dtype
    compute: torch.dtype
    form: Form

    @classmethod
    def of(cls, device: str, dtype: str) -> "Numerics":
        """The formats for `dtype` ("float32" or "bfloat16") on a device ("cpu", "cuda:0").

        Raises:
            UnsupportedModel: An unknown dtype.
        """
        if dtype not in ("float32", "bfloat16"):
            raise UnsupportedModel(f"dtype {dtype!r} is not supported; use float32 or bfloat16")
        place = torch.device(device)
        wide = dtype == "float32"
        asked = torch.float32 if wide else torch.bfloat16
        if place.type != "cpu":
            return cls(place, asked, asked, "plain")
        packs = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if wide or (packs and has_bfloat16_arithmetic()):
            return cls(place, asked, asked, "mkldnn" if packs else "plain")
        if "fbgemm" in torch.backends.quantized.supported_engines:
            return cls(place, asked, torch.float32, "half")
        return cls(place, asked, torch.bfloat16, "plain")

    def packed_bytes(self, rows: int, width: int) -> int:
        """Bytes that a matrix `[rows, width]` takes once it is packed."""
        if self.form == "half":
            return rows * -(-width // HALF_BLOCK) * HALF_BLOCK * 2
        return rows * width * self.compute.itemsize


@cache
def has_bfloat16_arithmetic() -> bool:
    """Whether this processor multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # As old as torch 2.6.
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


class Packer:
    """Packs matrices one after the other through one scratch buffer: loading leaves no holes.

    Args:
        numerics: Device and number formats of the matrices.
    """

    def __init__(self, numerics: Numerics) -> None:
        self.numerics = numerics
        self._dtype = torch.float32 if numerics.form == "half" else numerics.compute
        self._scratch = torch.empty(0, dtype=self._dtype)

    def pack(self, blocks: Blocks, rows: int, width: int, bias: Tensor | None = None) -> Linear:
        """Pack a matrix `[rows, width]` that arrives in blocks of rows.

        Args:
            blocks: `float32[any, width]` each, `rows` rows together, in order.
            rows: Output features.
            width: Input features.
            bias: `float32[rows]`, or None.

        Returns:
            `x[n, width] -> y[n, rows]` in the compute dtype.
        """
        parts: list[Linear] = []
        chunk = self._chunk(rows, width)
        filled = done = 0
        for block in blocks:
            values = torch.from_numpy(block)
            while len(values):
                count = min(len(values), len(chunk) - filled)
                chunk[filled : filled + count] = values[:count]
                values = values[count:]
                filled += count
                if filled == len(chunk):
                    end = done + filled
                    part_bias = None if bias is None else bias[done:end]
                    parts.append(_pack(chunk, self.numerics, part_bias))
                    filled, done = 0, end
                    chunk = self._chunk(rows - done, width)
        assert done == rows, f"{done} of {rows} rows arrived"
        return parts[0] if len(parts) == 1 else _Chunked(parts)

    def _chunk(self, rows: int, width: int) -> Tensor:
        """Room for the next rows; overwritten once they are packed, except in the plain form."""
        if self.numerics.form == "plain":
            return torch.empty(rows, width, dtype=self._dtype, device=self.numerics.device)
        count = min(rows, max(1, CHUNK_ELEMENTS // width))
        if self._scratch.numel() < count * width:
            self._scratch = torch.empty(max(CHUNK_ELEMENTS, count * width), dtype=self._dtype)
        return self._scratch[: count * width].view(count, width)


class _Chunked:
    """Chunks of output features, side by side."""

    def __init__(self, parts: list[Linear]) -> None:
        self._parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)


def _pack(weight: Tensor, numerics: Numerics, bias: Tensor | None) -> Linear:
    form = numerics.form
    if form == "half" and float(weight.abs().max()) > HALF_MAX:
        form, weight = "plain", weight.clone()
    if form == "half":
        return _pack_half(weight, bias)
    if bias is not None:
        bias = bias.to(weight.dtype).to(weight.device)
    if form == "mkldnn":
        return _pack_mkldnn(weight, bias)
    return lambda x: functional.linear(x, weight, bias)


def _pack_mkldnn(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)  # noqa: SLF001
    multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    none: list[float] = []
    return lambda x: cast("Tensor", multiply(x, packed, bias, "none", none, ""))


def _pack_half(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: cast("Tensor", multiply(x, packed))
