"""How large frames may be, what a greeting and a lap must satisfy, and how result rows are packed.

Everything follows from the plan, so both ends of an edge know it before the first byte.
"""

import struct
from collections.abc import Sequence

import msgspec

from kvasir_core.plan import LOGPROBS_MAX, Plan
from kvasir_rt import wire
from kvasir_rt.ring_errors import WireError
from kvasir_rt.sampling import SAMPLING_BYTES_MAX

ID_BYTES = 4  # One token id, little endian.
INTEGER_BYTES = 9  # The longest msgpack integer.
STAMPS = 4  # Of each stage that a lap has passed: received, start, end, sent.
SPENT = 7  # Of each stage that overlaps: `kvasir_rt.overlap_laps.Stretch`.


def spans_max(plan: Plan) -> int:
    return min(plan.micro_batch_width, plan.row_width)


def header_bytes_max(plan: Plan) -> int:
    """The longest `Lap` or `Release` header of this plan."""
    per_span = 4 * INTEGER_BYTES + INTEGER_BYTES + SAMPLING_BYTES_MAX
    lap = spans_max(plan) * per_span + plan.row_width * ID_BYTES
    release = plan.running_max * INTEGER_BYTES
    per_stage = (STAMPS + SPENT) * INTEGER_BYTES
    return 512 + per_stage * plan.stages + max(lap, release)


def boundary_frame_max(plan: Plan) -> int:
    """What a stage's input socket accepts at most in one frame."""
    return max(header_bytes_max(plan), plan.boundary_bytes_max)


def result_frame_max(plan: Plan) -> int:
    """What the bridge's input socket accepts at most in one frame."""
    return max(header_bytes_max(plan), plan.result_bytes_max)


def check_hello(hello: wire.Hello, expected: wire.Hello) -> str:
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


def check_lap(lap: wire.Lap, plan: Plan, stage: int) -> None:
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
    if len(lap.stamps) != STAMPS * stage:
        raise WireError(f"micro-batch {batch.id} has {len(lap.stamps)} stamps at stage {stage}")
    if len(lap.spent) not in (0, SPENT * stage):
        raise WireError(f"micro-batch {batch.id} has {len(lap.spent)} times at stage {stage}")
    body = 0 if stage == 0 else batch.row_count * plan.hidden * plan.element_bytes
    if lap.body_bytes != body:
        raise WireError(f"micro-batch {batch.id} announces {lap.body_bytes} bytes, not {body}")


class ResultRow(msgspec.Struct, frozen=True, gc=False):
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


def unpack_rows(body: wire.Buffer, count: int) -> list[ResultRow]:
    """Exactly `count` rows.

    Raises:
        WireError: The body is shorter or longer, or a row has too many alternatives.
    """
    if len(body) == count * _row.size:  # No row has alternatives; the longest part of all runs.
        flat = list(_row.iter_unpack(body))
        if not any(tops for _, _, tops in flat):
            return [
                ResultRow(None if token == NO_TOKEN else token, logprob)
                for token, logprob, _ in flat
            ]
    rows: list[ResultRow] = []
    at = 0
    try:
        for _ in range(count):
            token, logprob, tops = _row.unpack_from(body, at)
            at += _row.size
            if not 0 <= tops <= LOGPROBS_MAX:
                raise WireError(f"a result row has {tops} alternatives; at most {LOGPROBS_MAX}")
            top: tuple[tuple[int, float], ...] = ()
            if tops:
                top = tuple(_top.unpack_from(body, at + i * _top.size) for i in range(tops))
                at += tops * _top.size
            rows.append(ResultRow(None if token == NO_TOKEN else token, logprob, top))
    except struct.error:
        raise WireError(f"a result of {len(body)} bytes is too short for {count} rows") from None
    if at != len(body):
        raise WireError(f"a result of {len(body)} bytes has {len(body) - at} too many")
    return rows
