"""Every message between processes of a ring: typed, msgpack, no pickle.

An *edge* runs from a stage (or the bridge) to the next; it carries `Lap`s, each followed by one raw
tensor frame, and `Release`s behind them, and back come `Credit`s. A *control* line joins each stage
to the bridge. A message is one header frame, plus the body frame that its header announces. Both
have largest sizes that follow from the plan alone, so sockets refuse more before it is read.
"""

import struct
from collections.abc import Sequence

import msgspec

from kvasir_core.microbatch import MicroBatch
from kvasir_core.plan import LOGPROBS_MAX, Plan
from kvasir_core.units import Epoch, RequestId
from kvasir_rt.ring_errors import WireError
from kvasir_rt.sampling import SAMPLING_BYTES_MAX, SamplingParams

PROTOCOL = 1
Buffer = bytes | memoryview
ID_BYTES = 4  # One token id, little endian.
CONTROL_BYTES_MAX = 1 << 20  # A plan of 1,024 stages takes 20 kB.
TEXT_MAX = 4000  # Characters of an error that travels.
INTEGER_BYTES = 9  # The longest msgpack integer.


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message: an array of its fields, its tag first."""


# ---------------------------------------------------------------------------- on an edge


class Hello(Wire, tag="hello", frozen=True):
    """First on an edge, from its sender. Both ends must mean the same ring."""

    protocol: int
    digest: str
    epoch: Epoch
    sender: int  # Stage index; the bridge is -1 as the head's upstream.
    layers: tuple[tuple[int, int], ...]
    dtype: str


class Welcome(Wire, tag="welcome", frozen=True):
    """The receiver's answer: its free input slots; None is unbounded."""

    epoch: Epoch
    credits: int | None


class Refusal(Wire, tag="refusal", frozen=True):
    """The other end will not talk to this one, and why."""

    why: str


class Credit(Wire, tag="credit", frozen=True):
    """Input slots freed at the receiver."""

    epoch: Epoch
    count: int


class Lap(Wire, tag="lap", frozen=True):
    """One micro-batch on its way; a body of `body_bytes` follows if that is not 0.

    Attributes:
        micro_batch: Exactly as the head composed it.
        ids: Token ids of its rows, int32 little endian. The head drops them unless `keeps_ids`.
        keeps_ids: The tail needs the ids (penalties look at a request's history).
        sampling: `(span index, parameters)` of spans that start at position 0.
        stamps: received, start, end, sent of each stage passed, in ns of that stage's clock.
        body_bytes: Length of the tensor frame.
    """

    micro_batch: MicroBatch
    ids: bytes
    keeps_ids: bool
    sampling: tuple[tuple[int, SamplingParams], ...]
    stamps: tuple[int, ...]
    body_bytes: int


class Release(Wire, tag="release", frozen=True):
    """Frees these requests' KV at each stage it passes."""

    epoch: Epoch
    requests: tuple[RequestId, ...]


class Result(Wire, tag="result", frozen=True):
    """What the tail sampled: a body of packed rows follows, one per output of the micro-batch."""

    id: int
    epoch: Epoch
    stamps: tuple[int, ...]
    body_bytes: int


EdgeMessage = Hello | Welcome | Refusal | Credit | Lap | Release | Result


# ---------------------------------------------------------------------------- on a control line


class FixedSpec(Wire, tag="fixed", frozen=True):
    """Stages that compute nothing: each holds a micro-batch for `hold_ns`."""

    hold_ns: tuple[int, ...]  # One per stage.
    vocab: int


class ModelSpec(Wire, tag="model", frozen=True):
    """A stage of a real model.

    Attributes:
        path: The GGUF file; a joined stage uses its own path, the digest must match.
        sha256: Of the file's bytes; empty if every stage opens the same file.
        devices: One per stage, `cpu` or `cuda:i`.
    """

    path: str
    sha256: str
    devices: tuple[str, ...]


ComputeSpec = FixedSpec | ModelSpec


class Join(Wire, tag="join", frozen=True):
    """A stage process presents itself. `stage` is None where the bridge is to choose."""

    protocol: int
    secret: str
    stage: int | None
    host: str
    pid: int
    boot: str  # The kernel's boot id: equal ones share a monotonic clock.
    server_key: bytes  # CURVE public keys, Z85; empty on one host.
    client_key: bytes
    sha256: str


class Assign(Wire, tag="assign", frozen=True):
    """What to load. The stage checks that the plan has that digest."""

    protocol: int
    plan: Plan
    digest: str
    stage: int
    dtype: str
    compute: ComputeSpec


class Loaded(Wire, tag="loaded", frozen=True):
    """The stage holds its layers and listens for its upstream."""

    digest: str
    endpoint: str
    resident_bytes: int


class NewEpoch(Wire, tag="epoch", frozen=True):
    """Drop all KV and every older frame."""

    epoch: Epoch


class Idle(Wire, tag="idle", frozen=True):
    """Done: nothing older is left here."""

    epoch: Epoch


class Wiring(Wire, tag="wiring", frozen=True):
    """The neighbours of this epoch. Addresses and keys come from the bridge and nobody else."""

    epoch: Epoch
    upstream_key: bytes
    next_endpoint: str
    next_key: bytes


class Listening(Wire, tag="listening", frozen=True):
    """The upstream may connect."""

    epoch: Epoch


class Connect(Wire, tag="connect", frozen=True):
    """Everybody listens: greet the next stage."""

    epoch: Epoch


class Wired(Wire, tag="wired", frozen=True):
    """The next stage has answered."""

    epoch: Epoch


class Pulse(Wire, tag="pulse", frozen=True):
    """The bridge is alive; sent at `bridge_ns` of its clock."""

    bridge_ns: int


class Echo(Wire, tag="echo", frozen=True):
    """Answers a pulse at once: from these the bridge knows how far apart the clocks are."""

    bridge_ns: int
    stage_ns: int


class Beat(Wire, tag="beat", frozen=True):
    """The stage is alive, and this is what it holds.

    `holding` is the micro-batch in hand and `held_ns` how long the computation of it has lasted.
    `traffic` counts bytes by kind and direction.
    """

    epoch: Epoch
    holding: int | None
    held_ns: int
    rows: int
    traffic: dict[str, int]


class LinkLost(Wire, tag="link_lost", frozen=True):
    """The connection to the next stage broke inside an epoch: frames may be gone."""

    epoch: Epoch


class Failed(Wire, tag="failed", frozen=True):
    """The stage cannot go on; it exits."""

    why: str


class Stop(Wire, tag="stop", frozen=True):
    """The bridge wants nothing more; the stage exits. `why` is shown if it is an error."""

    why: str


ToBridge = Join | Loaded | Idle | Listening | Wired | Echo | Beat | LinkLost | Failed
ToStage = Assign | NewEpoch | Wiring | Connect | Pulse | Stop

encode = msgspec.msgpack.Encoder().encode
_edge = msgspec.msgpack.Decoder(EdgeMessage)
_to_bridge = msgspec.msgpack.Decoder(ToBridge)
_to_stage = msgspec.msgpack.Decoder(ToStage)


def decode_edge(frame: bytes | memoryview) -> EdgeMessage:
    """One edge header. Raises WireError."""
    try:
        return _edge.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"an edge frame of {len(frame)} bytes is no message: {error}") from None


def decode_to_bridge(frame: bytes | memoryview) -> ToBridge:
    """One control message from a stage. Raises WireError."""
    try:
        return _to_bridge.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"a control frame of {len(frame)} bytes is no message: {error}") from None


def decode_to_stage(frame: bytes | memoryview) -> ToStage:
    """One control message from the bridge. Raises WireError."""
    try:
        return _to_stage.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"a control frame of {len(frame)} bytes is no message: {error}") from None


# ---------------------------------------------------------------------------- bounds


def spans_max(plan: Plan) -> int:
    return min(plan.micro_batch_width, plan.row_width)


def header_bytes_max(plan: Plan) -> int:
    """The longest `Lap` or `Release` header of this plan."""
    per_span = 4 * INTEGER_BYTES + INTEGER_BYTES + SAMPLING_BYTES_MAX
    lap = spans_max(plan) * per_span + plan.row_width * ID_BYTES
    release = plan.running_max * INTEGER_BYTES
    return 512 + 4 * INTEGER_BYTES * plan.stages + max(lap, release)


def boundary_frame_max(plan: Plan) -> int:
    """What a stage's input socket accepts at most in one frame."""
    return max(header_bytes_max(plan), plan.boundary_bytes_max)


def result_frame_max(plan: Plan) -> int:
    """What the bridge's input socket accepts at most in one frame."""
    return max(header_bytes_max(plan), plan.result_bytes_max)


def check_hello(hello: Hello, expected: Hello) -> str:
    """Why the two ends do not mean the same ring, naming both values; empty if they do."""
    names = {
        "protocol": "protocol version",
        "digest": "plan digest",
        "sender": "upstream stage",
        "layers": "layers",
        "dtype": "dtype",
        "epoch": "epoch",
    }
    for name, words in names.items():
        theirs, ours = getattr(hello, name), getattr(expected, name)
        if theirs != ours:
            return f"{words} differs: yours is {theirs!r}, here it is {ours!r}"
    return ""


def check_lap(lap: Lap, plan: Plan, stage: int) -> None:
    """Whether stage `stage` may take in this micro-batch and its body.

    Raises:
        WireError: It breaks the plan's bounds or contradicts itself; both numbers are named.
    """
    batch = lap.micro_batch
    spans = len(batch.requests)
    if not 1 <= spans <= spans_max(plan):
        raise WireError(f"micro-batch {batch.id} has {spans} spans, not 1 to {spans_max(plan)}")
    if not spans == len(batch.starts) == len(batch.rows) or len(set(batch.requests)) != spans:
        raise WireError(f"micro-batch {batch.id} has columns of unequal length, or a request twice")
    if sum(batch.rows) != batch.row_count or not 1 <= batch.row_count <= plan.row_width:
        raise WireError(
            f"micro-batch {batch.id} has {sum(batch.rows)} rows and claims {batch.row_count}; "
            f"the row width is {plan.row_width}"
        )
    ends = [start + rows for start, rows in zip(batch.starts, batch.rows, strict=True)]
    if min(batch.rows) < 1 or min(batch.starts) < 0 or max(ends) > plan.context:
        raise WireError(f"micro-batch {batch.id} has rows outside [0, {plan.context})")
    if not 0 <= batch.decodes <= spans or any(rows != 1 for rows in batch.rows[: batch.decodes]):
        raise WireError(f"micro-batch {batch.id} has {batch.decodes} decodes in {spans} spans")
    if any(not batch.decodes <= index < spans for index in (*batch.completing,)):
        raise WireError(f"micro-batch {batch.id} completes {batch.completing} of {spans} spans")
    wants_ids = stage == 0 or lap.keeps_ids
    if len(lap.ids) != (batch.row_count * ID_BYTES if wants_ids else 0):
        raise WireError(f"micro-batch {batch.id} has {len(lap.ids)} bytes of ids")
    if any(not 0 <= index < spans for index, _ in lap.sampling):
        raise WireError(f"micro-batch {batch.id} has sampling parameters for no span")
    if len(lap.stamps) != 4 * stage:
        raise WireError(f"micro-batch {batch.id} has {len(lap.stamps)} stamps at stage {stage}")
    body = 0 if stage == 0 else batch.row_count * plan.hidden * plan.element_bytes
    if lap.body_bytes != body:
        raise WireError(f"micro-batch {batch.id} announces {lap.body_bytes} bytes, not {body}")


# ---------------------------------------------------------------------------- result rows


class ResultRow(msgspec.Struct, frozen=True):
    """One sampled token with its log-probability and the likeliest alternatives.

    `token` is None where the model gave no finite logits.
    """

    token: int | None
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


NO_TOKEN = -1  # How None travels in a packed row.
_row = struct.Struct("<ifi")
_top = struct.Struct("<if")


def pack_rows(rows: Sequence[ResultRow]) -> bytes:
    """Rows as bytes: `kvasir_core.plan.RESULT_ROW_BYTES` at most for each."""
    out = bytearray()
    for row in rows:
        assert len(row.top) <= LOGPROBS_MAX
        token = NO_TOKEN if row.token is None else row.token
        out += _row.pack(token, row.logprob, len(row.top))
        for alternative in row.top:
            out += _top.pack(*alternative)
    return bytes(out)


def unpack_rows(body: bytes | memoryview, count: int) -> list[ResultRow]:
    """Exactly `count` rows.

    Raises:
        WireError: The body is shorter or longer, or a row has too many alternatives.
    """
    rows: list[ResultRow] = []
    at = 0
    try:
        for _ in range(count):
            token, logprob, tops = _row.unpack_from(body, at)
            at += _row.size
            if not 0 <= tops <= LOGPROBS_MAX:
                raise WireError(f"a result row has {tops} alternatives; at most {LOGPROBS_MAX}")
            top = tuple(_top.unpack_from(body, at + i * _top.size) for i in range(tops))
            at += tops * _top.size
            rows.append(ResultRow(None if token == NO_TOKEN else token, logprob, top))
    except struct.error:
        raise WireError(f"a result of {len(body)} bytes is too short for {count} rows") from None
    if at != len(body):
        raise WireError(f"a result of {len(body)} bytes has {len(body) - at} too many")
    return rows
