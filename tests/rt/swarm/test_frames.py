"""Frames: what is packed comes out, and what breaks a rule is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_rt.swarm import frames
from kvasir_rt.swarm.frames import Call, Fault, FrameError, Joiner, Reply, chunks, pack, unpack

CALL = Call(7, "w", 3, "m", 0, "f32", 2, 8, 3, 1000)
CALL_PAYLOAD = bytes(3 * 12 + 2 * 8 * 4)


def test_a_frame_comes_out_as_it_went_in() -> None:
    payload = bytes(range(100))
    assert len(CALL_PAYLOAD) == len(payload)
    header, found = unpack(pack(CALL, payload))
    assert header == CALL
    assert found == payload


@given(
    rows=st.integers(1, 64),
    hidden=st.integers(1, 4000),
    dtype=st.sampled_from(["f32", "f16", "bf16"]),
)
def test_any_reply_that_fits_survives_its_chunks(
    rows: int, hidden: int, dtype: frames.Dtype
) -> None:
    reply = Reply(1, dtype, rows, hidden, 5)
    frame = pack(reply, bytes(frames.payload_bytes(reply)))
    joiner = Joiner()
    found = [joiner.take(message) for message in chunks(frame, 9)]
    assert found[:-1] == [None] * (len(found) - 1)
    assert found[-1] == frame
    assert joiner.bytes_held == 0


def test_chunks_of_two_frames_may_alternate() -> None:
    one, other = (pack(Reply(n, "f32", 100, 1000, 0), bytes([n]) * 400_000) for n in (1, 2))
    joiner = Joiner()
    found = [
        joiner.take(message)
        for pair in zip(chunks(one, 1), chunks(other, 2), strict=True)
        for message in pair
    ]
    assert [each for each in found if each] == [one, other]


def test_rows_max_is_the_largest_call_that_fits() -> None:
    for hidden, dtype, per_row in ((2048, "f32", 8), (576, "bf16", 4), (65536, "f16", 1)):
        rows = frames.rows_max(hidden, dtype, per_row)  # type: ignore[arg-type]
        call = Call(1, "w" * 128, 1 << 31, "m" * 128, 1, dtype, rows, hidden, rows * per_row, 1)  # type: ignore[arg-type]
        pack(call, bytes(frames.payload_bytes(call)))


def _chunk(number: int, offset: int, length: int, total: int, data: bytes) -> bytes:
    return struct.pack("<IIII", number, offset, length, total) + data


FULL = bytes(frames.CHUNK_BYTES_MAX)
BAD_MESSAGES = {
    "empty": b"",
    "a header alone": _chunk(1, 0, 0, 10, b""),
    "larger than a message may be": bytes(frames.MESSAGE_BYTES_MAX + 1),
    "a frame of 4 GiB": _chunk(1, 0, 4, (1 << 32) - 1, b"abcd"),
    "a frame of no bytes": _chunk(1, 0, 1, 0, b"a"),
    "a length that is a lie": _chunk(1, 0, 5, 5, b"abcd"),
    "a start in the middle": _chunk(
        1, frames.CHUNK_BYTES_MAX, 4, frames.CHUNK_BYTES_MAX + 4, b"abcd"
    ),
    "a drip of single bytes": _chunk(1, 0, 1, 100, b"a"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_a_hostile_message_is_refused_and_the_next_one_is_taken(name: str) -> None:
    joiner = Joiner()
    with pytest.raises(FrameError):
        joiner.take(BAD_MESSAGES[name])
    assert joiner.bytes_held == 0
    frame = pack(CALL, CALL_PAYLOAD)
    assert joiner.take(next(chunks(frame, 1))) == frame


def test_a_repeated_chunk_and_a_changed_size_are_refused() -> None:
    total = 3 * frames.CHUNK_BYTES_MAX
    first = _chunk(1, 0, len(FULL), total, FULL)
    joiner = Joiner()
    assert joiner.take(first) is None
    with pytest.raises(FrameError, match="does not continue"):
        joiner.take(first)
    with pytest.raises(FrameError, match="now"):
        joiner.take(_chunk(1, len(FULL), len(FULL), total + 7, FULL))


def test_frames_begun_without_end_are_bounded() -> None:
    joiner = Joiner()
    for number in range(frames.FRAMES_OPEN_MAX):
        assert joiner.take(_chunk(number, 0, len(FULL), len(FULL) + 1, FULL)) is None
    with pytest.raises(FrameError, match="begun"):
        joiner.take(_chunk(99, 0, len(FULL), len(FULL) + 1, FULL))
    assert joiner.bytes_held == frames.FRAMES_OPEN_MAX * len(FULL)


GOOD = pack(CALL, CALL_PAYLOAD)
BAD_FRAMES = {
    "one byte": b"\x01",
    "a header longer than the frame": b"\xff\xff" + bytes(10),
    "a header over the limit": struct.pack("<H", 5000) + bytes(5000),
    "no msgpack": struct.pack("<H", 3) + b"\xc1\xc1\xc1",
    "100k nested arrays": struct.pack("<H", 4000) + b"\x91" * 4000,
    "payload cut": GOOD[:-1],
    "payload too long": GOOD + b"x",
    "a tag nobody knows": struct.pack("<H", 6) + b"\x91\xa4evil",
    "a boolean for a number": struct.pack("<H", 7) + b"\x92\xa4drop\xc3",
    "a negative request": struct.pack("<H", 7) + b"\x92\xa4drop\xff",
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_hostile_frame_is_refused(name: str) -> None:
    with pytest.raises(FrameError):
        unpack(BAD_FRAMES[name])


def test_nobody_can_pack_what_would_be_refused() -> None:
    with pytest.raises(FrameError, match="payload"):
        pack(CALL, b"short")
    with pytest.raises(FrameError, match="at most"):
        pack(Reply(1, "f32", 1000, 1000, 0), bytes(4_000_000))
    with pytest.raises(FrameError, match="header"):
        pack(Fault(1, "error", "x" * 5000))
