"""Tensor values out of a GGUF file, dequantised in blocks of rows.

The working memory is bounded by `BLOCK_BYTES` whatever the tensor's size, so that a stage peaks at
the weights it keeps and not at those it reads. The `gguf` library knows the number formats.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir_rt.errors import ModelFileError, UnsupportedModel
from kvasir_rt.gguf_file import GgufFile
from kvasir_rt.gguf_header import BLOCKS, TensorInfo

BLOCK_BYTES = 1 << 20  # Of float32 per step; the library needs a few times as much beside it.


def tensor_of(gguf: GgufFile, name: str, shape: Sequence[int]) -> TensorInfo:
    """The named tensor, which must have that shape.

    Raises:
        ModelFileError: It is missing or has another shape; both are named.
    """
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise ModelFileError(f"{gguf.path}: tensor {name!r} is missing; the model needs it")
    if tensor.shape != tuple(shape):
        raise ModelFileError(
            f"{gguf.path}: tensor {name!r} has shape {list(tensor.shape)}; "
            f"the model's metadata asks for {list(shape)}"
        )
    return tensor


def row_blocks(
    gguf: GgufFile, tensor: TensorInfo, start: int = 0, stop: int | None = None
) -> Iterator[NDArray[np.float32]]:
    """Rows `[start, stop)` of a tensor seen as a matrix of its last dimension, block by block.

    Yields:
        `float32[rows, shape[-1]]`, overwritten by no later block.

    Raises:
        UnsupportedModel: The number format cannot be dequantised.
    """
    from gguf import GGMLQuantizationType, quants

    width = tensor.shape[-1]
    row_bytes = tensor.row_bytes
    rows = tensor.size // row_bytes
    stop = rows if stop is None else stop
    assert 0 <= start <= stop <= rows
    step = max(1, BLOCK_BYTES // (4 * width))
    kind = GGMLQuantizationType(tensor.kind)
    for first in range(start, stop, step):
        count = min(step, stop - first)
        raw = np.empty((count, row_bytes), dtype=np.uint8)
        gguf.read_into(tensor, first * row_bytes, raw)
        try:
            values: NDArray[Any] = quants.dequantize(raw, kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{gguf.path}: tensor {tensor.name!r} is stored as {BLOCKS[tensor.kind][0]}, "
                "which cannot be dequantised"
            ) from error
        yield values.astype(np.float32, copy=False).reshape(count, width)


def read_rows(
    gguf: GgufFile, tensor: TensorInfo, start: int = 0, stop: int | None = None
) -> NDArray[np.float32]:
    """Rows `[start, stop)` in one array `float32[rows, shape[-1]]`; for what is small or kept."""
    rows = tensor.size // tensor.row_bytes
    stop = rows if stop is None else stop
    out = np.empty((stop - start, tensor.shape[-1]), dtype=np.float32)
    done = 0
    for block in row_blocks(gguf, tensor, start, stop):
        out[done : done + len(block)] = block
        done += len(block)
    return out


def read_vector(gguf: GgufFile, name: str, length: int) -> NDArray[np.float32]:
    """A one-dimensional tensor, such as a norm's weights or a bias: `float32[length]`."""
    return read_rows(gguf, tensor_of(gguf, name, (length,))).reshape(length)
