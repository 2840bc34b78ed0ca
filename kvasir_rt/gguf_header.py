"""The bounded reader of a GGUF header: every count and length is checked before it is used.

Theory of operation. The header is read through one small window with `pread`, never mapped: memory
stays flat whatever the file claims, a file that shrinks under us is a short read and not a SIGBUS,
and the resident set does not count the file. Values are not decoded here: for each key the parser
records where its value lies, and `GgufFile.metadata` decodes it when asked. Strings in arrays must
be walked, since each carries its own length; that walk is the only loop a file can make long, so
the number of strings and of header bytes is limited.

Every refusal is a `ModelFileError` with the byte offset, the value found and the rule.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from kvasir_rt.errors import ModelFileError

# Limits, each far above any published model and low enough that the worst header is refused or
# read within a second and 64 MB.
HEADER_BYTES_MAX = 256 << 20  # Largest seen: 15 MB, a vocabulary of 262 k with merges.
KEYS_MAX = 65_536  # Real files have below 100.
TENSORS_MAX = 65_536  # One Python record each; 61 layers of 256 unfused experts have 47 k.
KEY_BYTES_MAX = 65_535  # The format's own limit.
NAME_BYTES_MAX = 256  # ggml allows 64.
NAMES_BYTES_MAX = 8 << 20  # All keys, or all tensor names, together.
STRING_BYTES_MAX = 1 << 20  # The longest chat templates have 20 kB.
ARRAY_ITEMS_MAX = 10_000_000
ARRAY_STRINGS_MAX = 1_200_000  # In all arrays of a file; a large vocabulary with merges has 0.7 M.
DIMENSIONS_MAX = 4
ALIGNMENT_MAX = 65_536
WINDOW_BYTES = 65_536

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, struct.Struct] = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip

# (elements, bytes) of one block of each stored tensor type, and its name.
BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


class ValueAt(NamedTuple):
    """Where a metadata value lies: scalars at `offset`, arrays and strings with their size."""

    kind: int  # Scalar type; STRING; for arrays the type of the items.
    is_array: bool
    items: int  # Of an array; bytes of a string; 1 for a scalar.
    offset: int


class TensorInfo(NamedTuple):
    """A tensor in a file: `shape` is rows first, as numpy reads it (GGUF stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # Absolute, in bytes.
    size: int  # Bytes.
    part: int = 0  # Index of the split file that holds it.

    @property
    def type_name(self) -> str:
        return BLOCKS[self.kind][0]

    @property
    def row_bytes(self) -> int:
        _, elements, size = BLOCKS[self.kind]
        return self.shape[-1] // elements * size


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says before its data."""

    version: int
    values: dict[str, ValueAt]
    tensors: dict[str, TensorInfo]
    alignment: int


class HeaderReader:
    """A cursor over a file through one window; all reads are checked against the file's size."""

    def __init__(self, descriptor: int, path: Path, size: int) -> None:
        self._descriptor = descriptor
        self._path = path
        self.size = size
        self.position = 0
        self._window = b""
        self._window_start = 0

    def refuse(self, found: str) -> NoReturn:
        raise ModelFileError(f"{self._path}: at byte {self.position}: {found}")

    def take(self, count: int) -> bytes:
        """The next `count` bytes (small: at most a string)."""
        start = self.position - self._window_start
        if not 0 <= start <= len(self._window) - count:
            self._fill(count)
            start = 0
        self.position += count
        return self._window[start : start + count]

    def _fill(self, count: int) -> None:
        if self.position + count > min(self.size, HEADER_BYTES_MAX):
            self.refuse(
                f"the header needs {count} more bytes; the file has {self.size} bytes "
                f"and a header may have {HEADER_BYTES_MAX}: it is truncated or not a GGUF file"
            )
        self._window = os.pread(self._descriptor, max(count, WINDOW_BYTES), self.position)
        self._window_start = self.position
        if len(self._window) < count:
            self.refuse(f"the file ended while it was read; {self.size} bytes were expected")

    def skip(self, count: int) -> None:
        if self.position + count > min(self.size, HEADER_BYTES_MAX):
            self.refuse(
                f"a value of {count} bytes passes the end: the file has {self.size} bytes "
                f"and a header may have {HEADER_BYTES_MAX}"
            )
        self.position += count

    def unsigned32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def unsigned64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self, what: str, bytes_max: int) -> str:
        length = self.unsigned64()
        if not 1 <= length <= bytes_max:
            self.refuse(f"{what} has {length} bytes; it must have from 1 to {bytes_max}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not UTF-8: {error.reason}")

    def skip_strings(self, count: int) -> None:
        """Walk `count` length-prefixed strings, checking each length."""
        # The only hot loop of the parser, so it keeps to local names and one window.
        unpack = SCALARS[10].unpack_from
        window, place = self._window, self.position - self._window_start
        last = len(window) - 8
        for _ in range(count):
            if not 0 <= place <= last:
                self.position = self._window_start + place
                self._fill(8)
                window, place = self._window, 0
                last = len(window) - 8
            (length,) = unpack(window, place)
            place += 8 + length
            if length > STRING_BYTES_MAX:
                self.position = self._window_start + place - length
                self.refuse(f"a string has {length} bytes; the limit is {STRING_BYTES_MAX}")
        self.position = self._window_start + place
        self.skip(0)  # The last string's end is checked here, all others' by the next fill.


def read_header(reader: HeaderReader) -> Header:
    """Parse everything before the tensor data; `reader` stands at byte 0 of a file named GGUF.

    Raises:
        ModelFileError: Anything that the limits, the file's size or the format forbid.
    """
    reader.take(4)  # The magic, checked by the caller, who can hint at what else it may be.
    version = reader.unsigned32()
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = "; it is big-endian, which is not supported" if swapped in (1, 2, 3) else ""
        reader.refuse(f"GGUF version {version}; versions 2 and 3 can be read{hint}")
    tensors = reader.unsigned64()
    keys = reader.unsigned64()
    if tensors > TENSORS_MAX or keys > KEYS_MAX:
        reader.refuse(
            f"{tensors} tensors and {keys} keys; the limits are {TENSORS_MAX} and {KEYS_MAX}"
        )
    values = _read_values(reader, keys)
    alignment = _alignment(reader, values)
    return Header(version, values, _read_tensors(reader, tensors, alignment), alignment)


def _read_values(reader: HeaderReader, keys: int) -> dict[str, ValueAt]:
    values: dict[str, ValueAt] = {}
    names_bytes = strings = 0
    for _ in range(keys):
        key = reader.text("a key", KEY_BYTES_MAX)
        names_bytes += len(key)
        if key in values:
            reader.refuse(f"key {key[:80]!r} appears twice")
        if names_bytes > NAMES_BYTES_MAX:
            reader.refuse(f"the keys have more than {NAMES_BYTES_MAX} bytes together")
        kind = reader.unsigned32()
        value = _array_at(reader, key) if kind == ARRAY else _value_at(reader, key, kind)
        if value.is_array and value.kind == STRING:
            strings += value.items
            if strings > ARRAY_STRINGS_MAX:
                reader.refuse(f"arrays hold {strings} strings; the limit is {ARRAY_STRINGS_MAX}")
            reader.skip_strings(value.items)
        values[key] = value
    return values


def _value_at(reader: HeaderReader, key: str, kind: int) -> ValueAt:
    if kind == STRING:
        length = reader.unsigned64()
        if length > STRING_BYTES_MAX:
            reader.refuse(f"{key[:80]!r} has {length} bytes; the limit is {STRING_BYTES_MAX}")
        value = ValueAt(STRING, False, length, reader.position)
        reader.skip(length)
        return value
    if kind not in SCALARS:
        reader.refuse(f"{key[:80]!r} has the unknown value type {kind}")
    value = ValueAt(kind, False, 1, reader.position)
    if kind == BOOL and (byte := reader.take(1)[0]) > 1:
        reader.refuse(f"{key[:80]!r} is a truth value of {byte}; it must be 0 or 1")
    reader.skip(SCALARS[kind].size if kind != BOOL else 0)
    return value


def _array_at(reader: HeaderReader, key: str) -> ValueAt:
    kind = reader.unsigned32()
    count = reader.unsigned64()
    if kind == ARRAY:
        reader.refuse(f"{key[:80]!r} is an array of arrays, which no model uses")
    if kind != STRING and kind not in SCALARS:
        reader.refuse(f"{key[:80]!r} is an array of the unknown type {kind}")
    item_bytes = 8 if kind == STRING else SCALARS[kind].size
    left = reader.size - reader.position
    if count > ARRAY_ITEMS_MAX or count * item_bytes > left:
        reader.refuse(
            f"{key[:80]!r} claims {count} items of at least {item_bytes} bytes; {left} bytes "
            f"are left in the file and the limit is {ARRAY_ITEMS_MAX} items"
        )
    value = ValueAt(kind, True, count, reader.position)
    if kind != STRING:
        reader.skip(count * item_bytes)
    return value


def _alignment(reader: HeaderReader, values: dict[str, ValueAt]) -> int:
    at = values.get("general.alignment")
    if at is None:
        return 32
    if at.is_array or at.kind != 4:
        reader.refuse("general.alignment must be one unsigned 32-bit number")
    stand, reader.position = reader.position, at.offset
    alignment = reader.unsigned32()
    reader.position = stand
    if not 1 <= alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
        reader.refuse(
            f"general.alignment is {alignment}; it must be a power of two up to {ALIGNMENT_MAX}"
        )
    return alignment


def _read_tensors(reader: HeaderReader, count: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for _ in range(count):
        tensor = _tensor_at(reader)
        if tensor.name in tensors:
            reader.refuse(f"tensor {tensor.name!r} appears twice")
        tensors[tensor.name] = tensor
    data_start = -(-reader.position // alignment) * alignment
    end = data_start
    last = "the header"
    for tensor in sorted(tensors.values(), key=lambda each: each.offset):
        start = data_start + tensor.offset
        if tensor.offset % alignment:
            reader.refuse(
                f"tensor {tensor.name!r} starts at {tensor.offset}, which is not aligned to "
                f"{alignment}"
            )
        if start < end:
            reader.refuse(f"tensor {tensor.name!r} overlaps {last}")
        end = start + tensor.size
        if end > reader.size:
            reader.refuse(
                f"tensor {tensor.name!r} needs bytes [{start}, {end}); the file has "
                f"{reader.size}: it is truncated"
            )
        last = f"tensor {tensor.name!r}"
        tensors[tensor.name] = tensor._replace(offset=start)
    return tensors


def _tensor_at(reader: HeaderReader) -> TensorInfo:
    name = reader.text("a tensor name", NAME_BYTES_MAX)
    rank = reader.unsigned32()
    if not 1 <= rank <= DIMENSIONS_MAX:
        reader.refuse(f"tensor {name!r} has {rank} dimensions; from 1 to {DIMENSIONS_MAX} can be")
    shape = tuple(reader.unsigned64() for _ in range(rank))[::-1]
    kind = reader.unsigned32()
    offset = reader.unsigned64()
    if kind not in BLOCKS:
        reader.refuse(f"tensor {name!r} has the unknown type {kind}")
    type_name, elements, block_bytes = BLOCKS[kind]
    total = 1
    for dimension in shape:
        total *= dimension
    size = total // elements * block_bytes
    if total < 1 or size > reader.size:
        reader.refuse(
            f"tensor {name!r} of shape {list(shape)} needs {size} bytes as {type_name}; "
            f"the file has {reader.size} and every dimension must be at least 1"
        )
    if shape[-1] % elements:
        reader.refuse(
            f"tensor {name!r} has rows of {shape[-1]}; {type_name} needs a multiple of {elements}"
        )
    return TensorInfo(name, shape, kind, offset, size)
