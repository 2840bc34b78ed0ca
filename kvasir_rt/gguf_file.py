"""GGUF model files: checked when opened, values decoded when asked, data read by `pread`.

A model may be split over `NAME-00001-of-00003.gguf`, ...; opening the first part opens all of them
and the caller sees one file. Nothing is mapped (see `gguf_header`): a file that is cut while it is
served raises `ModelFileError` where a mapping would end the process.
"""

import hashlib
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvasir_rt.errors import ModelFileError
from kvasir_rt.gguf_header import (
    BOOL,
    SCALARS,
    STRING,
    Header,
    HeaderReader,
    TensorInfo,
    ValueAt,
    read_header,
)

MAGIC = b"GGUF"
PARTS_MAX = 1024  # Files of one model, each an open descriptor.
SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

Value: TypeAlias = str | int | float | bool | list[str] | NDArray[Any]


class _Part:
    """One opened file and its header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = _open_regular(path)
        try:
            self.size = os.fstat(self.descriptor).st_size
            _check_magic(path, os.pread(self.descriptor, 64, 0))
            self.header: Header = read_header(HeaderReader(self.descriptor, path, self.size))
        except BaseException:
            os.close(self.descriptor)
            raise

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self.descriptor, size, offset)
        if len(data) != size:
            raise ModelFileError(f"{self.path}: was cut while in use: no {size} bytes at {offset}")
        return data

    def read_into(self, offset: int, target: NDArray[np.uint8]) -> None:
        view = target.data.cast("B")
        done = 0
        while done < len(view):  # One call moves at most 2 GiB.
            count = os.preadv(self.descriptor, [view[done:]], offset + done)
            if count == 0:
                raise ModelFileError(f"{self.path}: was cut while in use at byte {offset + done}")
            done += count


def _close_all(parts: list[_Part]) -> None:
    while parts:
        os.close(parts.pop().descriptor)


def _open_regular(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelFileError(
            f"{path}: cannot be opened: {error.strerror}; a model is a GGUF file"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise ModelFileError(f"{path}: is {kind}; a model is a GGUF file")
    return descriptor


def _check_magic(path: Path, start: bytes) -> None:
    if start[:4] == MAGIC:
        return
    lowered = start.lstrip().lower()
    hint = ""
    if start.startswith(b"version https://git-lfs"):
        hint = "; it is a Git LFS pointer: fetch the real file with `git lfs pull`"
    elif lowered.startswith((b"<!doc", b"<html", b"<head", b"<?xml")):
        hint = "; it is a web page: the download saved an error or login page"
    elif start.startswith(b"PK\x03\x04"):
        hint = "; it is a ZIP archive, perhaps a PyTorch checkpoint, which is never loaded here"
    elif len(start) < 4:
        hint = f"; the file has only {len(start)} bytes: the download is incomplete"
    first = start[:4]
    shown = first.decode("ascii", "backslashreplace")
    raise ModelFileError(
        f"{path}: is not a GGUF file: it starts with {shown!r} "
        f"(hex {first.hex(' ') or 'nothing'}), not with 'GGUF'{hint}"
    )


class Metadata(Mapping[str, Value]):
    """The file's key-value pairs, each decoded when asked for and not kept."""

    def __init__(self, part: _Part) -> None:
        self._part = part
        self._values = part.header.values

    def __getitem__(self, key: str) -> Value:
        at = self._values[key]
        if at.is_array:
            return self._strings(key, at) if at.kind == STRING else self._numbers(at)
        if at.kind == STRING:
            return self._text(key, self._part.read(at.offset, at.items))
        number: int | float = SCALARS[at.kind].unpack(
            self._part.read(at.offset, SCALARS[at.kind].size)
        )[0]
        return bool(number) if at.kind == BOOL else number

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def count(self, key: str) -> int:
        """Items of the array `key`, without decoding it; 0 if there is no such key."""
        at = self._values.get(key)
        return 0 if at is None or not at.is_array else at.items

    def _numbers(self, at: ValueAt) -> NDArray[Any]:
        item = SCALARS[at.kind]
        data = self._part.read(at.offset, at.items * item.size)
        return np.frombuffer(data, dtype=np.dtype(item.format))

    def _strings(self, key: str, at: ValueAt) -> list[str]:
        # The walk was checked when the file was opened; here it is repeated in one buffer.
        unpack = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        window, start = b"", 0
        offset = at.offset
        for _ in range(at.items):
            place = offset - start
            if place + 8 > len(window) or place + 8 + unpack(window, place)[0] > len(window):
                start, place = offset, 0
                window = self._part.read(offset, min(4 << 20, self._part.size - offset))
            length = unpack(window, place)[0]
            strings.append(self._text(key, window[place + 8 : place + 8 + length]))
            offset += 8 + length
        return strings

    def _text(self, key: str, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(
                f"{self._part.path}: {key!r} holds text that is not UTF-8: {error.reason}"
            ) from error


class GgufFile:
    """An opened model: metadata of the first part, tensors of all parts.

    Attributes:
        path: The (first) file.
        metadata: Key-value pairs, decoded on access.
        tensors: By name, in file order.
    """

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self.path = parts[0].path
        self.metadata = Metadata(parts[0])
        self.tensors: dict[str, TensorInfo] = {}
        for index, part in enumerate(parts):
            for name, tensor in part.header.tensors.items():
                if name in self.tensors:
                    raise ModelFileError(
                        f"{part.path}: tensor {name!r} is also in "
                        f"{parts[self.tensors[name].part].path}"
                    )
                self.tensors[name] = tensor._replace(part=index)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(part.path for part in self._parts)

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self._parts)

    def read_into(self, tensor: TensorInfo, offset: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the tensor's stored bytes from `offset` on."""
        assert offset >= 0
        assert offset + target.nbytes <= tensor.size
        self._parts[tensor.part].read_into(tensor.offset + offset, target)

    def digest(self) -> str:
        """SHA-256 (hex) over the bytes of all parts; reads the whole model."""
        total = hashlib.sha256()
        for part in self._parts:
            with part.path.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
        return total.hexdigest()

    def close(self) -> None:
        """Close every part; reading afterwards is an error. Closing twice is not."""
        _close_all(self._parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_gguf(path: Path | str) -> GgufFile:
    """Open a GGUF model, all parts of it when it is split.

    Args:
        path: The file; of a split model the first part.

    Raises:
        ModelFileError: Not a GGUF file, hostile, truncated, or a part is missing; within a second
            and without taking memory by what the file claims.
    """
    path = Path(path)
    with ExitStack() as stack:
        first = _Part(path)
        parts = [first]
        stack.callback(_close_all, parts)
        count = _split_value(first, "split.count", 1)
        if count > 1:
            for sibling in _siblings(first, count):
                parts.append(_Part(sibling))
                _check_part(parts[-1], len(parts) - 1, count)
            _check_tensor_count(parts)
        opened = GgufFile(parts)
        stack.pop_all()
        return opened


def _split_value(part: _Part, key: str, default: int) -> int:
    if key not in part.header.values:
        return default
    value = Metadata(part)[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelFileError(f"{part.path}: {key} must be a whole number")
    return value


def _siblings(first: _Part, count: int) -> list[Path]:
    match = SPLIT_NAME.fullmatch(first.path.name)
    number = _split_value(first, "split.no", 0)
    if count > PARTS_MAX:
        raise ModelFileError(f"{first.path}: split.count is {count}; the limit is {PARTS_MAX}")
    if match is None or int(match["count"]) != count:
        raise ModelFileError(
            f"{first.path}: is part {number + 1} of {count}, so its name must end in "
            f"-{number + 1:05d}-of-{count:05d}.gguf"
        )
    if number != 0 or int(match["number"]) != 1:
        raise ModelFileError(
            f"{first.path}: is part {number + 1} of {count}; give the first part, "
            f"{match['stem']}-00001-of-{count:05d}.gguf"
        )
    return [
        first.path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(2, count + 1)
    ]


def _check_part(part: _Part, number: int, count: int) -> None:
    found = (_split_value(part, "split.no", -1), _split_value(part, "split.count", -1))
    if found != (number, count):
        raise ModelFileError(
            f"{part.path}: says split.no {found[0]} of {found[1]}; part {number} of {count} "
            "was expected: files of two models are mixed"
        )


def _check_tensor_count(parts: list[_Part]) -> None:
    expected = _split_value(parts[0], "split.tensors.count", -1)
    found = sum(len(part.header.tensors) for part in parts)
    if expected not in (-1, found):
        raise ModelFileError(
            f"{parts[0].path}: announces {expected} tensors in {len(parts)} "
            f"parts; they hold {found}"
        )
