"""Bodies of the hub's HTTP, as both its clients and the hub itself spell them.

Ranges are half-open: `experts: [a, b]` is `[a, b)`, a segment is `[layer, a, b]`. Unknown fields
and numbers written as strings are refused, not guessed. What goes over the relay is in `frames`.
"""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL = 1
PROTOCOL_HEADER = "Kvasir-Protocol"

NAME_PATTERN = r"^[!-~]([ -~]{0,126}[!-~])?$"
"""Of models and coordinators: printable ASCII, no blank at either end."""
NAME_RULE = "1 to 128 printable ASCII characters, no blank at either end"
NODE_PATTERN = r"^[0-9a-f]{32}$"
"""Of workers: the fingerprint of their key, see `identity.node_id`."""
COUNT_MAX = 1 << 31
SEGMENTS_MAX = 4096  # Of one worker; as the core's.
HELD_MAX = 1024
SERVED_ROWS_MAX = 4096  # Of one report: longer ones are sent in parts.
LAYERS_MAX = 4096
SLOTS_URL_CHARACTERS_MAX = 256

DIGEST_HEADER = "Repr-Digest"
"""Of a slice: `sha-256=:BASE64:` over the whole file (RFC 9530); the ETag is the same in hex."""

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=128)]
NodeName = Annotated[str, Field(pattern=NODE_PATTERN)]
Whole = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Positive = Annotated[int, Field(ge=1, le=COUNT_MAX)]
Range = Annotated[list[Whole], Field(min_length=2, max_length=2)]
Segment = Annotated[list[Whole], Field(min_length=3, max_length=3)]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def is_name(text: str) -> bool:
    """Whether a model or coordinator may be called so: `NAME_RULE`."""
    return re.fullmatch(NAME_PATTERN[1:-1], text) is not None


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ErrorDetail(Body):
    message: str
    type: str
    code: str


class ErrorBody(Body):
    """Every refusal, whatever its status."""

    error: ErrorDetail


# ------------------------------------------------------------------ who a node is


class ChallengeRequest(Body):
    """`POST /api/node-challenge`."""

    public_key: Hex32


class Challenge(Body):
    """Sign `identity.challenge_text(hub, nonce)` and hand it in once, before it expires."""

    hub: Hex32
    nonce: Hex32
    expires_s: float


class TokenRequest(Body):
    """`POST /api/node-token`. A failed try burns the nonce too."""

    public_key: Hex32
    nonce: Hex32
    signature: Hex64


class NodeToken(Body):
    """Send it as `Authorization: Bearer TOKEN`; after 401 ask for another challenge."""

    node: NodeName
    token: str
    scope: Literal["node"]
    expires_s: float


# ------------------------------------------------------------------ workers


class HeldSlice(Body):
    """A slice on the volunteer's disk."""

    model: Name
    layer: Whole
    experts: Range


class VolunteerRequest(Body):
    """`POST /api/expert-volunteer`."""

    max_experts: Positive
    model: Name | None = None
    holds: Annotated[list[HeldSlice], Field(max_length=HELD_MAX, fail_fast=True)] = []


class Assigned(Body):
    """Download the slice, dial the relay, report coverage with this claim within the lease."""

    assigned: Literal[True]
    claim: int
    lease_s: float
    model: str
    layer: int
    experts: Range
    scarcity: float
    replicas: int
    target: int
    hidden_size: int
    expert_count: int


class Declined(Body):
    assigned: Literal[False]
    reason: str
    retry_after_s: float


class CoverageReport(Body):
    """`POST /api/expert-coverage`: a heartbeat with all that is served now. `[]` is goodbye."""

    worker: NodeName
    model: Name
    segments: Annotated[list[Segment], Field(max_length=SEGMENTS_MAX, fail_fast=True)]
    claim: Positive | None = None
    draining: bool = False


class CoverageReply(Body):
    """Dial the relay with `relay_session`; stop serving what `release` names."""

    ok: Literal[True]
    relay_session: int
    release: list[Segment]
    heartbeat_s: float


# ------------------------------------------------------------------ coordinators


class CoordinatorRegistration(Body):
    """`POST /api/coordinators`, again at least every `lease_s` and after any 404 `unknown`.

    Attributes:
        layers: Those that hold routed experts, ascending.
        slots_url: Where `GET /slots` is answered, as `http://HOST:PORT`: on the hub's own machine,
            or one the hub's operator allows.
        slots_key: What that address needs as a bearer token.
        model_file: The model's path, for a coordinator on the hub's own machine: slices are cut
            from it. Not needed where the hub was started with `--model`.
    """

    coordinator: Name
    model: Name
    layers: Annotated[list[Whole], Field(min_length=1, max_length=LAYERS_MAX, fail_fast=True)]
    experts: Positive
    hidden_size: Positive
    slots_url: Annotated[str, Field(max_length=SLOTS_URL_CHARACTERS_MAX)]
    slots_key: Annotated[str, Field(max_length=512)] | None = None
    model_file: Annotated[str, Field(max_length=4096)] | None = None


class CoordinatorReply(Body):
    ok: Literal[True]
    lease_s: float
    poll_s: float


class ServedSlice(Body):
    """What a coordinator saw of one worker's slice; `pairs` since its last report."""

    worker: NodeName
    layer: Whole
    experts: Range
    standing: Literal["new", "trial", "proven", "suspect", "quarantined", "gone"]
    last_serve_ms: Whole
    pairs: Whole


class ServingReport(Body):
    """`POST /api/expert-serving`."""

    coordinator: Name
    rows: Annotated[list[ServedSlice], Field(max_length=SERVED_ROWS_MAX, fail_fast=True)]


class Done(Body):
    ok: Literal[True] = True


class DispatchRow(Body):
    worker: str
    session: int
    layer: int
    experts: Range


class DispatchMap(Body):
    """`GET /api/expert-dispatch-map?model=`."""

    model: str
    rows: list[DispatchRow]


# ------------------------------------------------------------------ a relay of its own


class RelayOpen(Body):
    """`POST /api/relay-sessions`, by a relay that runs alone: a worker dialled with this token."""

    token: Annotated[str, Field(max_length=128)]
    session: Whole


class RelayAdmitted(Body):
    worker: str
    session: int


class RelayClose(Body):
    """`POST /api/relay-sessions/closed`: that connection is over."""

    worker: NodeName
    session: Whole


# ------------------------------------------------------------------ what the hub shows


class ModelRecruitment(Body):
    model: str
    busy: int
    slots: int
    saturated: bool
    recruiting: bool
    base_target: int
    effective_target: int
    workers: int
    age_s: float | None
    reason: str


class Recruitment(Body):
    """`GET /api/moe/recruitment`."""

    threshold: int
    base: int
    boost: int
    models: list[ModelRecruitment]


class DemandSegment(Body):
    experts: Range
    replicas: int
    claimed: int
    target: int
    scarcity: float


class LayerDemand(Body):
    layer: int
    segments: list[DemandSegment]


class ModelDemand(Body):
    model: str
    recruiting: bool
    target: int
    layers: list[LayerDemand]


class Demand(Body):
    """`GET /api/expert-demand`."""

    recruiting: bool
    models: list[ModelDemand]
