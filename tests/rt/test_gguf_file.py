"""The bounded parser: what is right is read, what is hostile is refused at once and cheaply."""

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir_rt.errors import ModelFileError
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.gguf_header import ALIGNMENT_MAX, ARRAY_STRINGS_MAX, BLOCKS, KEYS_MAX, TENSORS_MAX
from kvasir_rt.gguf_read import read_rows, row_blocks, tensor_of
from tests.rt.tiny_models import TinyModel, write_tiny_model

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 98362432\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>"


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def file_of(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count)
    head += b"".join(pairs) + b"".join(tensors)
    return head + (b"\0" * (-len(head) % 32) + data if data else b"")


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


HOSTILE: dict[str, tuple[bytes, str]] = {
    "array length 2^63": (file_of((pair(b"a", 9, array(4, 1 << 63)),)), "claims 9223372036854775808"),
    "string array length 2^63": (file_of((pair(b"a", 9, array(8, 1 << 63)),)), "claims 92233720"),
    "nested arrays": (file_of((pair(b"a", 9, array(9, 1, array(9, 1))),)), "array of arrays"),
    "string length 2^48": (file_of((pair(b"a", 8, struct.pack("<Q", 1 << 48)),)), "has 2814749767"),
    "string in an array of 2^48": (
        file_of((pair(b"a", 9, array(8, 1, struct.pack("<Q", 1 << 48))),)), "has 281474976710656"),
    "string over 1 MiB": (
        file_of((pair(b"a", 8, text(b"x" * (1 << 20) + b"y")),)), "has 1048577 bytes"),
    "key of 64 KiB": (file_of((pair(b"k" * 65536, 4, b"\0" * 4),)), "a key has 65536 bytes"),
    "empty key": (file_of((pair(b"", 4, b"\0" * 4),)), "a key has 0 bytes"),
    "key not UTF-8": (file_of((pair(b"\xff", 4, b"\0" * 4),)), "not UTF-8"),
    "key twice": (file_of((pair(b"a", 4, b"\0" * 4),) * 2), "key 'a' appears twice"),
    "value type 13": (file_of((pair(b"a", 13, b""),)), "unknown value type 13"),
    "array type 77": (file_of((pair(b"a", 9, array(77, 1)),)), "array of the unknown type 77"),
    "truth of 2": (file_of((pair(b"a", 7, b"\2"),)), "truth value of 2"),
    "too many keys": (file_of(counts=(0, KEYS_MAX + 1)), f"{KEYS_MAX + 1} keys"),
    "too many tensors": (file_of(counts=(TENSORS_MAX + 1, 0)), f"{TENSORS_MAX + 1} tensors"),
    "keys beyond the end": (file_of(counts=(0, 5)), "needs 8 more bytes"),
    "tensors beyond the end": (file_of(counts=(5, 0)), "needs 8 more bytes"),
    "no dimensions": (file_of((), (tensor(b"t", ()),)), "has 0 dimensions"),
    "five dimensions": (file_of((), (tensor(b"t", (1,) * 5),)), "has 5 dimensions"),
    "dimension 0": (file_of((), (tensor(b"t", (4, 0)),)), "at least 1"),
    "product over 64 bits": (file_of((), (tensor(b"t", (1 << 63,) * 4),)), "needs"),
    "product that wraps to little": (file_of((), (tensor(b"t", (1 << 32, 1 << 32, 4)),)), "needs"),
    "tensor type 99": (file_of((), (tensor(b"t", (4,), 99),)), "unknown type 99"),
    "row not a multiple of its block": (
        file_of((), (tensor(b"t", (33,), 2),), data=b"\0" * 64), "multiple of 32"),
    "tensor name too long": (file_of((), (tensor(b"t" * 257, (1,)),)), "a tensor name has 257"),
    "tensor twice": (
        file_of((), (tensor(b"t", (1,)), tensor(b"t", (1,), 0, 32)), data=b"\0" * 64), "twice"),
    "tensor past the end": (file_of((), (tensor(b"t", (32,)),), data=b"\0" * 64), "truncated"),
    "offset near 2^64": (
        file_of((), (tensor(b"t", (1,), 0, (1 << 64) - 32),), data=b"\0" * 64), "truncated"),
    "offset not aligned": (
        file_of((), (tensor(b"t", (1,), 0, 4),), data=b"\0" * 64), "not aligned to 32"),
    "tensors overlap": (
        file_of((), (tensor(b"t", (16,)), tensor(b"u", (1,), 0, 32)), data=b"\0" * 96), "overlaps"),
    "alignment 3": (
        file_of((pair(b"general.alignment", 4, struct.pack("<I", 3)),)), "alignment is 3"),
    "alignment 0": (
        file_of((pair(b"general.alignment", 4, struct.pack("<I", 0)),)), "alignment is 0"),
    "alignment too large": (
        file_of((pair(b"general.alignment", 4, struct.pack("<I", 2 * ALIGNMENT_MAX)),)),
        "alignment is 131072"),
    "alignment as text": (file_of((pair(b"general.alignment", 8, text(b"32")),)), "unsigned 32-bit"),
}  # fmt: skip

NOT_GGUF: dict[str, tuple[bytes, str]] = {
    "LFS pointer": (LFS_POINTER, r"starts with 'vers' \(hex 76 65 72 73\).*Git LFS pointer"),
    "HTML page": (HTML, r"starts with '<!DO' \(hex 3c 21 44 4f\).*web page"),
    "nothing": (b"", r"starts with '' \(hex nothing\).*only 0 bytes"),
    "three bytes": (b"GGU", r"starts with 'GGU' \(hex 47 47 55\).*only 3 bytes"),
    "checkpoint": (b"PK\x03\x04data", r"starts with 'PK\\x03\\x04'.*ZIP archive"),
    "version 1": (file_of(version=1), "GGUF version 1; versions 2 and 3"),
    "byte-swapped": (b"GGUF\0\0\0\3" + b"\0" * 16, "version 50331648.*big-endian"),
}


@pytest.mark.parametrize("name", [*HOSTILE, *NOT_GGUF])
def test_a_hostile_or_foreign_file_is_refused_with_path_and_reason(
    tmp_path: Path, name: str
) -> None:
    data, reason = (HOSTILE | NOT_GGUF)[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=reason) as refused:
        open_gguf(path)
    assert str(refused.value).startswith(str(path))


def test_a_directory_and_a_missing_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a directory"):
        open_gguf(tmp_path)
    with pytest.raises(ModelFileError, match="No such file"):
        open_gguf(tmp_path / "gone.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")  # Opening one without care would wait for a writer.
    with pytest.raises(ModelFileError, match="not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")


MEASURE = """
import json, re, sys, time
from kvasir_rt.errors import ModelFileError
from kvasir_rt.gguf_file import open_gguf
def peak_kib():  # Of this program; getrusage would count the parent's memory before the exec.
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak_kib()
start = time.process_time()
try:
    open_gguf(sys.argv[1])
    refused = ""
except ModelFileError as error:
    refused = str(error)
spent = time.process_time() - start
grown = peak_kib() - before
print(json.dumps([refused, spent, grown / 1024]))
"""


@pytest.mark.parametrize(
    "make",
    [
        # The largest headers the limits admit, each spoilt only at its end.
        lambda: file_of(
            (pair(b"a", 9, array(8, ARRAY_STRINGS_MAX, b"\0" * 8 * ARRAY_STRINGS_MAX)), b"\xff" * 8)
        ),
        lambda: file_of(
            (*(pair(b"key%d" % n, 8, text(b"v")) for n in range(KEYS_MAX - 1)), b"\xff" * 8)
        ),
        lambda: file_of(
            (), tuple(tensor(b"t%d" % n, (1,), 0, 0) for n in range(TENSORS_MAX)), data=b"\0" * 64
        ),
        lambda: file_of(
            (*(pair(b"k%d" % n, 8, text(b"x" * (1 << 20))) for n in range(80)), b"\xff" * 8)
        ),
        lambda: file_of((pair(b"a", 9, array(10, 10_000_000, b"\0" * 80_000_000)), b"\xff" * 8)),
    ],
    ids=["strings", "keys", "tensors", "long strings", "numbers"],
)
def test_the_worst_header_is_refused_in_a_second_and_64_megabytes(
    tmp_path: Path, make: "object"
) -> None:
    path = tmp_path / "worst.gguf"
    path.write_bytes(make())  # type: ignore[operator]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    refused, seconds, mebibytes = json.loads(done.stdout)
    assert refused
    assert seconds < 1
    assert mebibytes < 64


GOOD_KINDS = ("F32", "F16", "Q4_1", "Q8_0")


@pytest.mark.parametrize("kind", GOOD_KINDS)
def test_values_and_metadata_equal_those_of_the_reference_library(
    tmp_path: Path, kind: str
) -> None:
    path = write_tiny_model(
        tmp_path / "good.gguf", TinyModel(quantisation=kind, bos_id=256, add_bos=True)
    )
    reader = oracle.GGUFReader(path)
    with open_gguf(path) as opened:
        for name, field in reader.fields.items():
            if name.startswith("GGUF."):
                continue
            value = opened.metadata[name]
            expected = field.contents()
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, name
        assert set(opened.metadata) == {n for n in reader.fields if not n.startswith("GGUF.")}
        for each in reader.tensors:
            found = opened.tensors[each.name]
            assert found.shape == tuple(int(d) for d in reversed(each.shape))
            expected_values = oracle.quants.dequantize(each.data, each.tensor_type)
            values = read_rows(opened, found).reshape(found.shape)
            assert np.array_equal(values, expected_values), each.name


def test_the_table_of_block_sizes_is_the_reference_librarys() -> None:
    known = oracle.constants.GGML_QUANT_SIZES
    for kind, (name, elements, size) in BLOCKS.items():
        assert known[oracle.GGMLQuantizationType[name]] == (elements, size)
        assert oracle.GGMLQuantizationType[name].value == kind


def test_row_ranges_and_blocks_are_the_rows_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TinyModel(quantisation="Q8_0"))
    with open_gguf(path) as opened:
        embedding = opened.tensors["token_embd.weight"]
        whole = read_rows(opened, embedding)
        monkeypatch.setattr("kvasir_rt.gguf_read.BLOCK_BYTES", 4 * 64 * 7)
        blocks = list(row_blocks(opened, embedding, 3, 40))
        assert [len(block) for block in blocks] == [7, 7, 7, 7, 7, 2]
        assert np.array_equal(np.concatenate(blocks), whole[3:40])
        with pytest.raises(ModelFileError, match=r"has shape \[\d+, 64\].*asks for \[9, 64\]"):
            tensor_of(opened, "token_embd.weight", (9, 64))


def test_a_file_cut_while_it_is_open_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    with open_gguf(path) as opened:
        os.truncate(path, 5000)
        with pytest.raises(ModelFileError, match="was cut while in use"):
            read_rows(opened, opened.tensors["output.weight"])


def test_every_truncation_of_a_good_file_is_refused(tmp_path: Path) -> None:
    data = write_tiny_model(tmp_path / "m.gguf", TinyModel(layers=1)).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(400), *range(400, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ModelFileError):
            open_gguf(path)


# ------------------------------------------------------------------------------ split files


def split_model(folder: Path) -> list[Path]:
    write_tiny_model(folder / "m.gguf", TinyModel(split_tensors=15))
    return sorted(folder.glob("m-*.gguf"))


def test_a_split_model_is_opened_by_its_first_part_and_reads_as_one(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    whole = write_tiny_model(tmp_path / "whole.gguf")
    assert len(parts) == 3
    with open_gguf(parts[0]) as split, open_gguf(whole) as one:
        assert split.paths == tuple(parts)
        assert split.size == sum(part.stat().st_size for part in parts)
        assert list(split.tensors) == list(one.tensors)
        for name in one.tensors:
            ours, theirs = (read_rows(each, each.tensors[name]) for each in (split, one))
            assert np.array_equal(ours, theirs)
        before = split.digest()
    with parts[2].open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x7f")
    with open_gguf(parts[0]) as changed:
        assert changed.digest() != before


def test_a_split_model_with_a_part_missing_renamed_or_foreign_is_refused(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    with pytest.raises(ModelFileError, match=r"give the first part, m-00001-of-00003\.gguf"):
        open_gguf(parts[1])
    other = tmp_path / "other"
    other.mkdir()
    renamed = other / "renamed.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelFileError, match=r"must end in -00001-of-00003\.gguf"):
        open_gguf(renamed)
    kept = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelFileError, match=r"says split.no 2 of 3; part 1 of 3 was expected"):
        open_gguf(parts[0])
    parts[1].write_bytes(kept)
    parts[2].unlink()
    with pytest.raises(ModelFileError, match=r"00003-of-00003.gguf: cannot be opened"):
        open_gguf(parts[0])


def test_no_descriptor_is_left_open_after_a_refusal(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    parts[2].write_bytes(HTML)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(ModelFileError):
            open_gguf(parts[0])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ------------------------------------------------------------------------------------- fuzz


@pytest.fixture(scope="module")
def seed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("fuzz") / "seed.gguf", TinyModel(layers=1))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.lists(
        st.tuples(
            st.integers(min_value=0, max_value=11_000),
            st.sampled_from([b"\xff", b"\0", b"\xff" * 8, b"\0" * 8, b"\x7f", b"\x09", b"GGUF"])
            | st.binary(min_size=1, max_size=9),
        ),
        max_size=4,
    ),
    cut=st.none() | st.integers(min_value=0, max_value=12_000),
)
def test_a_mutated_file_is_read_or_refused_and_nothing_else(
    seed_file: Path, changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    data = bytearray(seed_file.read_bytes())
    for at, value in changes:
        data[at : at + len(value)] = value
    path = seed_file.with_name("mutant.gguf")
    path.write_bytes(bytes(data if cut is None else data[:cut]))
    limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + (64 << 10)
    try:
        with open_gguf(path) as opened:
            for key in opened.metadata:
                assert opened.metadata[key] is not None
            for found in opened.tensors.values():
                assert found.offset + found.size <= opened.size
                next(row_blocks(opened, found))
    except ModelFileError:
        pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < limit
