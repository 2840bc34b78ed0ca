"""What travels over a relay: frames, each a small typed header and a raw tensor payload.

    frame   = header length (u16) | header (msgpack, at most 4 KiB) | payload
    message = chunk header (16 bytes) | at most 256 KiB of a frame

A frame has at most 1 MiB, so callers cut large calls by rows (`rows_max`). It crosses a connection
in chunks, so that a heartbeat waits for 256 KiB at most; chunks of one frame stay in order, those
of different frames may alternate. The payload's length follows from the header in closed form and
is checked before anything is made of it. No pickle; the relay reads headers and never a payload.

Who sends what: coordinator -> relay -> worker `Call`, `Drop`; back `Reply`, `Fault`. The relay
says `Hello` first on every connection, `Attached` and `Detached` to coordinators; both ends send
`Beat`. A request number belongs to the connection it crosses: the relay gives its own towards
workers.
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvasir_core.errors import KvasirError

FRAME_BYTES_MAX = 1 << 20
CHUNK_BYTES_MAX = 256 << 10  # Of a frame in one message.
HEADER_BYTES_MAX = 4096
FRAMES_OPEN_MAX = 8  # Begun and not complete, on one connection.
BEAT_S = 5.0
DEAD_S = 15.0  # Without any message.
SEND_S_MAX = 2.0  # A peer that does not take a message for so long is cut off.
SESSION_HEADER = "Kvasir-Session"
"""On a worker's dial: the `relay_session` of its last heartbeat. The token is in Authorization."""

HIDDEN_MAX = 1 << 16
ROWS_MAX = 1 << 14
PAIRS_MAX = 1 << 16
EXPERTS_MAX = 1 << 12
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
PAIR_BYTES = 12  # Row u32, expert u32, weight f32.

Buffer = bytes | bytearray | memoryview
Dtype = Literal["f32", "f16", "bf16"]
Request = Annotated[int, Meta(ge=0, lt=1 << 62)]
Session = Annotated[int, Meta(ge=0, le=1 << 31)]
Text = Annotated[str, Meta(max_length=128)]
Rows = Annotated[int, Meta(ge=1, le=ROWS_MAX)]
Hidden = Annotated[int, Meta(ge=1, le=HIDDEN_MAX)]

_length = struct.Struct("<H")
_chunk = struct.Struct("<IIII")  # Frame number, offset, chunk bytes, frame bytes.
CHUNK_HEADER_BYTES = _chunk.size
MESSAGE_BYTES_MAX = CHUNK_HEADER_BYTES + CHUNK_BYTES_MAX


class FrameError(KvasirError):
    """A peer's message breaks a rule; it names the value and the rule. Close the connection."""


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A frame's header: an array of its fields, its tag first."""


class Hello(Header, tag="hello", frozen=True):
    """First from the relay. `name` is what the relay holds this end for."""

    protocol: int
    name: Text
    epoch: Session  # Of the relay: it rises when the relay restarts.


class Beat(Header, tag="beat", frozen=True):
    """I am alive; sent every `BEAT_S` by both ends."""


class Call(Header, tag="call", frozen=True):
    """Compute these pairs.

    The payload: `pairs` row indexes (u32), as many expert numbers (u32) and weights (f32), then the
    rows, `dtype[rows, hidden]`; all little endian.

    Attributes:
        request: Answered by exactly one `Reply` or `Fault` with the same number.
        worker, session: Who is meant, in which generation; any other is a `Fault`.
        deadline_ms: Left when this was sent; afterwards nobody waits.
    """

    request: Request
    worker: Text
    session: Session
    model: Text
    layer: Annotated[int, Meta(ge=0, lt=1 << 12)]
    dtype: Dtype
    rows: Rows
    hidden: Hidden
    pairs: Annotated[int, Meta(ge=1, le=PAIRS_MAX)]
    deadline_ms: Annotated[int, Meta(ge=1, le=600_000)]


class Reply(Header, tag="reply", frozen=True):
    """The weighted sum of each row's experts, `dtype[rows, hidden]`, rows in the call's order."""

    request: Request
    dtype: Dtype
    rows: Rows
    hidden: Hidden
    compute_us: Annotated[int, Meta(ge=0, lt=1 << 32)]


class Fault(Header, tag="fault", frozen=True):
    """No result. `busy`: a queue on the way is full. `closed`: the worker is not there (any more).

    `error`: it could not, and `detail` says why.
    """

    request: Request
    why: Literal["busy", "closed", "error"]
    detail: Annotated[str, Meta(max_length=512)] = ""


class Drop(Header, tag="drop", frozen=True):
    """Nobody waits for this request any more."""

    request: Request


class Attached(Header, tag="attached", frozen=True):
    """To coordinators: this worker can be reached under this generation."""

    worker: Text
    session: Session


class Detached(Header, tag="detached", frozen=True):
    worker: Text
    session: Session


Frame = Hello | Beat | Call | Reply | Fault | Drop | Attached | Detached

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame)


def payload_bytes(header: Frame) -> int:
    """How long the payload of this frame is, exactly."""
    match header:
        case Call(rows=rows, hidden=hidden, dtype=dtype, pairs=pairs):
            return pairs * PAIR_BYTES + rows * hidden * ELEMENT_BYTES[dtype]
        case Reply(rows=rows, hidden=hidden, dtype=dtype):
            return rows * hidden * ELEMENT_BYTES[dtype]
        case _:
            return 0


def rows_max(hidden: int, dtype: Dtype, pairs_per_row: int) -> int:
    """How many rows of a call fit into one frame (0: not even one)."""
    space = FRAME_BYTES_MAX - HEADER_BYTES_MAX - _length.size
    by_bytes = space // (hidden * ELEMENT_BYTES[dtype] + pairs_per_row * PAIR_BYTES)
    return min(by_bytes, ROWS_MAX, PAIRS_MAX // pairs_per_row)


def pack(header: Frame, payload: Buffer = b"") -> bytes:
    """A frame.

    Raises:
        FrameError: It would be too large, or the payload is not what the header says.
    """
    data = _encode(header)
    frame = b"".join((_length.pack(len(data)), data, payload))
    _check_frame(header, len(data), len(frame), len(payload))
    return frame


def unpack(frame: Buffer) -> tuple[Frame, memoryview]:
    """Header and payload.

    Raises:
        FrameError: It is too large, malformed, or the payload is not what the header says.
    """
    view = memoryview(frame)
    if len(view) < _length.size:
        raise FrameError(f"a frame of {len(view)} bytes has no header")
    (length,) = _length.unpack_from(view)
    data = view[_length.size : _length.size + length]
    if len(data) != length:
        raise FrameError(f"a frame of {len(view)} bytes announces a header of {length}")
    if length > HEADER_BYTES_MAX:
        raise FrameError(f"a header has {length} bytes; at most {HEADER_BYTES_MAX}")
    try:
        header = _decode.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a header of {length} bytes is no message: {error}") from None
    payload = view[_length.size + length :]
    _check_frame(header, length, len(view), len(payload))
    return header, payload


def _check_frame(header: Frame, header_bytes: int, frame_bytes: int, payload: int) -> None:
    if header_bytes > HEADER_BYTES_MAX:
        raise FrameError(f"a header has {header_bytes} bytes; at most {HEADER_BYTES_MAX}")
    if frame_bytes > FRAME_BYTES_MAX:
        raise FrameError(f"a frame has {frame_bytes} bytes; at most {FRAME_BYTES_MAX}")
    if payload != payload_bytes(header):
        raise FrameError(
            f"a {type(header).__name__.lower()} needs {payload_bytes(header)} bytes of payload; "
            f"it has {payload}"
        )


def chunks(frame: Buffer, number: int) -> Iterator[bytes]:
    """The messages that carry a frame; `number` differs from those of other frames under way."""
    view = memoryview(frame)
    assert 0 < len(view) <= FRAME_BYTES_MAX
    for offset in range(0, len(view), CHUNK_BYTES_MAX):
        piece = view[offset : offset + CHUNK_BYTES_MAX]
        yield _chunk.pack(number & 0xFFFFFFFF, offset, len(piece), len(view)) + piece


class Joiner:
    """Puts one connection's messages together; holds at most `FRAMES_OPEN_MAX` frames."""

    def __init__(self) -> None:
        self._open: dict[int, bytearray] = {}
        self._sizes: dict[int, int] = {}

    @property
    def bytes_held(self) -> int:
        return sum(map(len, self._open.values()))

    def take(self, message: Buffer) -> bytes | bytearray | None:
        """The frame that this message completes, or None. Memory grows with what has arrived.

        Raises:
            FrameError: A gap, an overlap, a change of size, or too much at once.
        """
        view = memoryview(message)
        if not CHUNK_HEADER_BYTES < len(view) <= MESSAGE_BYTES_MAX:
            raise FrameError(
                f"a message has {len(view)} bytes; from {CHUNK_HEADER_BYTES + 1} to "
                f"{MESSAGE_BYTES_MAX} are allowed"
            )
        number, offset, length, total = _chunk.unpack_from(view)
        piece = view[CHUNK_HEADER_BYTES:]
        if not 0 < total <= FRAME_BYTES_MAX:
            raise FrameError(f"a frame of {total} bytes is announced; at most {FRAME_BYTES_MAX}")
        if length != len(piece) or length != min(CHUNK_BYTES_MAX, max(0, total - offset)):
            raise FrameError(
                f"a chunk at {offset} of {total} announces {length} bytes and has {len(piece)}; "
                "all but a frame's last are full"
            )
        held = self._open.get(number)
        if offset != (0 if held is None else len(held)):
            raise FrameError(
                f"a chunk at {offset} does not continue frame {number}, which has "
                f"{0 if held is None else len(held)} bytes"
            )
        if length == total:
            return bytes(piece)
        if held is None:
            if len(self._open) >= FRAMES_OPEN_MAX:
                raise FrameError(f"{FRAMES_OPEN_MAX} frames are begun; finish one first")
            held = self._open[number] = bytearray()
            self._sizes[number] = total
        if total != self._sizes[number]:
            raise FrameError(f"frame {number} had {self._sizes[number]} bytes and now {total}")
        held += piece
        if len(held) < total:
            return None
        del self._sizes[number]
        return self._open.pop(number)
