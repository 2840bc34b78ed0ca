"""Cuts a slice out of a model: experts `[begin, end)` of one layer as a GGUF file of its own.

Experts are axis 0 of three tensors, so a slice of each is one run of bytes: quantised blocks are
copied as they are, in small pieces, and hashed on the way. The same slice has the same bytes
always, so a download can resume after the hub has restarted.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvasir_core.swarm.words import Slice
from kvasir_rt.gguf_header import TensorInfo
from kvasir_rt.hub.models import ExpertModel

PIECE_BYTES = 4 << 20
ALIGNMENT = 32
SLICE_VERSION = 1
HEADER_BYTES_MAX = 8192  # Of a slice: some 20 short keys and three tensors.


Outcome = Literal["sent", "confirmed", "cut"]
"""Of a download: it went to the last byte, the worker has these bytes already, or neither."""


@dataclass(frozen=True, slots=True)
class CutSlice:
    """A slice on disk."""

    path: Path
    size: int
    sha256: str


def slice_bytes(model: ExpertModel, cut: Slice) -> int:
    """What a slice takes on disk at most; known before anything is read."""
    tensors = model.tensors(cut.layer)
    data = sum(_aligned(part.size // part.shape[0] * (cut.end - cut.begin)) for part in tensors)
    return data + HEADER_BYTES_MAX


def write_slice(model: ExpertModel, cut: Slice, path: Path) -> CutSlice:
    """Write the slice to a new file; it appears whole or not at all.

    Raises:
        ModelFileError: The model was cut short while it was read.
        OSError: The disk is full.
    """
    part = path.with_name(path.name + ".part")
    digest = hashlib.sha256()
    size = 0
    try:
        with part.open("wb") as file:
            for piece in _pieces(model, cut):
                digest.update(piece)
                file.write(piece)
                size += len(piece)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return CutSlice(path, size, digest.hexdigest())


def _pieces(model: ExpertModel, cut: Slice) -> Iterator[Any]:
    yield _header(model, cut)
    for tensor in model.tensors(cut.layer):
        start, size = _bytes_of(tensor, cut)
        for offset in range(0, size, PIECE_BYTES):
            piece = np.empty(min(PIECE_BYTES, size - offset), dtype=np.uint8)
            model.gguf.read_into(tensor, start + offset, piece)
            yield piece.data
        yield bytes(_aligned(size) - size)


def _header(model: ExpertModel, cut: Slice) -> bytes:
    import gguf

    shape = model.shape
    writer = gguf.GGUFWriter(None, shape.architecture.name)
    for name, value in (
        ("expert_count", shape.experts),
        ("expert_used_count", shape.experts_used),
        ("expert_feed_forward_length", shape.expert_ffn),
        ("embedding_length", shape.hidden),
        ("block_count", shape.layers),
    ):
        writer.add_uint32(f"{shape.architecture.name}.{name}", value)
    writer.add_string("kvasir.slice.model", model.facts.model)
    for name, value in (
        ("version", SLICE_VERSION),
        ("layer", cut.layer),
        ("begin", cut.begin),
        ("end", cut.end),
    ):
        writer.add_uint32(f"kvasir.slice.{name}", value)
    for tensor in model.tensors(cut.layer):
        _, size = _bytes_of(tensor, cut)
        writer.add_tensor_info(
            tensor.name,
            (cut.end - cut.begin, *tensor.shape[1:]),
            np.dtype(np.float32),  # Only the stored type below counts.
            size,
            raw_dtype=gguf.GGMLQuantizationType(tensor.kind),
        )
    return _written(writer)


def _written(writer: Any) -> bytes:
    """The library's header, from memory instead of a file of its own."""
    import gguf

    buffer = BytesIO()
    writer.fout = [buffer]
    writer.state = gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    header = buffer.getvalue()
    assert len(header) <= HEADER_BYTES_MAX - ALIGNMENT
    return header + bytes(_aligned(len(header)) - len(header))


def _bytes_of(tensor: TensorInfo, cut: Slice) -> tuple[int, int]:
    """Start and length of the experts' bytes within the tensor's."""
    per_expert = tensor.size // tensor.shape[0]
    return cut.begin * per_expert, (cut.end - cut.begin) * per_expert


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
