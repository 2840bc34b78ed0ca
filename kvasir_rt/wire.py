"""Every message between processes of a ring: typed, msgpack, no pickle.

An *edge* runs from a stage (or the bridge) to the next; it carries `Lap`s, each followed by one raw
tensor frame, and `Release`s behind them, and back come `Credit`s. A *control* line joins each stage
to the bridge. A message is one header frame, plus the body frame that its header announces. Both
have largest sizes that follow from the plan alone, so sockets refuse more before it is read.
"""

from typing import Literal

import msgspec

from kvasir_core.microbatch import MicroBatch
from kvasir_core.plan import Plan
from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.units import Epoch, RequestId
from kvasir_rt.ring_errors import WireError
from kvasir_rt.sampling import SamplingParams

PROTOCOL = 3
Buffer = bytes | memoryview
CONTROL_BYTES_MAX = 1 << 20  # A plan of 1,024 stages takes 20 kB.
TEXT_MAX = 4000  # Characters of an error that travels.


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
        composed: When the head composed it, on the bridge's clock; overlapping stages hand it back.
        spent: Of each stage passed that overlaps, `kvasir_rt.overlap_laps.Stretch`.
    """

    micro_batch: MicroBatch
    ids: bytes
    keeps_ids: bool
    sampling: tuple[tuple[int, SamplingParams], ...]
    stamps: tuple[int, ...]
    body_bytes: int
    composed: int = 0
    spent: tuple[int, ...] = ()


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
    spent: tuple[int, ...] = ()


EdgeMessage = Hello | Welcome | Refusal | Credit | Lap | Release | Result


# ---------------------------------------------------------------------------- on a control line


class FixedSpec(Wire, tag="fixed", frozen=True):
    """Stages that compute nothing: each holds a micro-batch for `hold_ns`."""

    hold_ns: tuple[int, ...]  # One per stage.
    vocab: int


class ExpertsSpec(Wire, tag="experts", frozen=True):
    """Routed experts may be computed by workers: how each stage's coordinator finds them.

    It holds secrets: it travels on control lines only, and is never logged.

    Attributes:
        hub: `http(s)://HOST:PORT`.
        relay: `ws(s)://...`; None is the hub's own.
        service_token: The hub's.
        model: Its name at the hub.
        brings_file: Stages on the bridge's machine name their model file to the hub.
        slots_url: Where the bridge answers `GET /slots`, for the stage and the hub alike.
        slots_key: What the bridge wants as a bearer token.
        overlap: Most micro-batches that a stage holds at once; 1 blocks.
        dtype: Of rows on the way to workers.
        policy: The coordinator's numbers.
        seed: Of which answers are checked.
        events: Directory for the coordinators' event logs; None writes none.
        log_level: Of what the coordinators log.
    """

    hub: str
    relay: str | None
    service_token: str
    model: str
    brings_file: bool
    slots_url: str
    slots_key: str | None
    overlap: int
    dtype: Literal["f32", "f16", "bf16"]
    policy: SwarmPolicy
    seed: int
    events: str | None
    log_level: str = "warning"

    def __repr__(self) -> str:
        return f"ExpertsSpec(hub={self.hub!r}, model={self.model!r}, overlap={self.overlap})"


class ModelSpec(Wire, tag="model", frozen=True):
    """A stage of a real model.

    Attributes:
        path: The GGUF file; a joined stage uses its own path, the digest must match.
        sha256: Of the file's bytes; empty if every stage opens the same file.
        devices: One per stage, `cpu` or `cuda:i`.
        experts: None computes all experts in the stages.
    """

    path: str
    sha256: str
    devices: tuple[str, ...]
    experts: ExpertsSpec | None = None


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


class Slow(Wire, tag="slow", frozen=True):
    """Hold every micro-batch `factor` times as long as it takes, as a scenario's fault asks."""

    factor: float


class Pulse(Wire, tag="pulse", frozen=True):
    """The bridge is alive; sent at `bridge_ns` of its clock."""

    bridge_ns: int


class Echo(Wire, tag="echo", frozen=True):
    """Answers a pulse at once: from these the bridge knows how far apart the clocks are."""

    bridge_ns: int
    stage_ns: int


class ExpertCounts(Wire, frozen=True):
    """What a stage's coordinator has done and sees now; counts are since it began.

    Attributes:
        is_connected: Its connection to the relay stands.
        is_engaged: Experts may be computed by workers now.
        decided: Why, or why not: `engaged`, `drained`, `blind`, `no_gain`; empty: never yet.
        engaged_ns: How long it was so.
        engagements: Times it changed.
        busy: Slots of the bridge that are busy, as last read.
        reading: How good that reading is: `ok`, `stale`, `failed`.
        standings: Workers by the most telling standing of their slices.
        pairs_computed: Routed pairs that the stage computed: its own share, checks, fallbacks.
        pairs_remote: Those that entered a sum from a worker.
        pairs_verified: Answered, computed here too, and entered from here.
        pairs_fallback: Sent, and in the end computed here because no answer came in time.
        refused: Parts that came back unanswered, by reason.
        quarantined: Workers that ever were.
        decisions: Of the core.
        law_checks: Full checks of its invariants.
        turn: How many times these counts have been taken.
    """

    is_connected: bool = False
    is_engaged: bool = False
    decided: str = ""
    engaged_ns: int = 0
    engagements: int = 0
    busy: int = 0
    slots: int = 0
    threshold: int = 0
    reading: str = "failed"
    polls_missed: int = 0
    maps_missed: int = 0
    clock_jumps: int = 0
    workers_known: int = 0
    workers_attached: int = 0
    standings: dict[str, int] = {}  # msgspec copies it.
    pairs_computed: int = 0
    pairs_remote: int = 0
    pairs_verified: int = 0
    pairs_fallback: int = 0
    calls: int = 0
    dispatches: int = 0
    trials: int = 0
    hedges: int = 0
    checks: int = 0
    mismatches: int = 0
    late: int = 0
    dropped: int = 0
    refused: dict[str, int] = {}
    quarantined: int = 0
    decisions: int = 0
    law_checks: int = 0
    turn: int = 0


class Beat(Wire, tag="beat", frozen=True):
    """The stage is alive, and this is what it holds.

    `holding` is the micro-batch in hand and `held_ns` how long the computation of it has lasted.
    `traffic` counts bytes by kind and direction. `experts` is None without a coordinator.
    """

    epoch: Epoch
    holding: int | None
    held_ns: int
    rows: int
    traffic: dict[str, int]
    experts: ExpertCounts | None = None


class LinkLost(Wire, tag="link_lost", frozen=True):
    """The connection to the next stage broke inside an epoch: frames may be gone."""

    epoch: Epoch


class Failed(Wire, tag="failed", frozen=True):
    """The stage cannot go on; it exits."""

    why: str


class Stop(Wire, tag="stop", frozen=True):
    """The stage is to exit: with no `why` all is well, else it was refused or cut off."""

    why: str
    may_rejoin: bool


ToBridge = Join | Loaded | Idle | Listening | Wired | Echo | Beat | LinkLost | Failed
ToStage = Assign | NewEpoch | Wiring | Connect | Slow | Pulse | Stop

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
