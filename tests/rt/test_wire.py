"""The wire: what is refused, with both values named, before anything is computed or kept."""

import math
import random
from dataclasses import replace

import msgspec
import pytest
import zmq

from kvasir_core.microbatch import BindingLimit, MicroBatch
from kvasir_core.plan import RESULT_ROW_BYTES
from kvasir_core.ring import Ring
from kvasir_core.units import Epoch, MicroBatchId, RequestId
from kvasir_rt import frames, wire
from kvasir_rt.agent import hello
from kvasir_rt.frames import ResultRow, pack_rows, unpack_rows
from kvasir_rt.link import Inbox, Outlet
from kvasir_rt.ring_errors import JoinError, WireError
from kvasir_rt.sampling import LOGIT_BIAS_MAX, SamplingParams
from tests.rt.rings import plan_of, until

PLAN = plan_of(3)


def batch(**changes: object) -> MicroBatch:
    """Two decodes, then a prompt chunk of three rows that ends its prompt."""
    numbers: dict[str, object] = {
        "id": MicroBatchId(7),
        "epoch": Epoch(2),
        "requests": (RequestId(4), RequestId(9), RequestId(11)),
        "starts": (10, 20, 0),
        "rows": (1, 1, 3),
        "decodes": 2,
        "completing": (2,),
        "row_count": 5,
        "decode_context": 32,
        "binding": BindingLimit.COHORT,
    }
    return MicroBatch(**(numbers | changes))  # type: ignore[arg-type]


def lap(
    micro_batch: MicroBatch | None = None,
    *,
    ids: bytes = b"",
    body_bytes: int = 5 * 16,
    stamps: tuple[int, ...] = (1, 2, 3, 4),
) -> wire.Lap:
    """As it arrives at stage 1."""
    return wire.Lap(
        micro_batch=micro_batch or batch(),
        ids=ids,
        keeps_ids=False,
        sampling=((2, SamplingParams(temperature=0.5, seed=3)),),
        stamps=stamps,
        body_bytes=body_bytes,
    )


def test_every_message_reads_back_equal() -> None:
    messages: list[wire.EdgeMessage] = [
        hello(PLAN, PLAN.digest, "float32", -1, Epoch(3)),
        wire.Welcome(Epoch(3), None),
        wire.Refusal("no"),
        wire.Credit(Epoch(3), 2),
        lap(),
        wire.Release(Epoch(3), (RequestId(1), RequestId(2))),
        wire.Result(7, Epoch(3), (1, 2, 3, 4), 24),
    ]
    for message in messages:
        assert wire.decode_edge(wire.encode(message)) == message
    assert isinstance(wire.decode_edge(wire.encode(messages[4])), wire.Lap)


def test_garbage_is_a_wire_error_and_nothing_else() -> None:
    chance = random.Random(1)
    good = wire.encode(lap())
    for _ in range(3000):
        kind = chance.randrange(3)
        if kind == 0:
            frame = chance.randbytes(chance.randrange(60))
        elif kind == 1:
            frame = good[: chance.randrange(len(good))]
        else:
            at = chance.randrange(len(good))
            frame = good[:at] + chance.randbytes(1) + good[at + 1 :]
        for decode in (wire.decode_edge, wire.decode_to_bridge, wire.decode_to_stage):
            try:
                decode(frame)
            except WireError:
                continue


def test_a_length_that_promises_gigabytes_takes_no_memory() -> None:
    for frame in (
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xa3lap\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ):
        with pytest.raises(WireError):
            wire.decode_edge(frame)


def test_sampling_parameters_out_of_range_do_not_pass_the_wire() -> None:
    raw = msgspec.msgpack.decode(wire.encode(lap()))
    raw[4][0][1]["temperature"] = math.nan
    with pytest.raises(WireError, match="temperature"):
        wire.decode_edge(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"protocol": 9}, ("protocol version", "9", str(wire.PROTOCOL))),
        ({"digest": "abc"}, ("plan digest", "abc", PLAN.digest)),
        ({"epoch": Epoch(4)}, ("epoch", "4", "3")),
        ({"sender": 2}, ("upstream stage", "2", "0")),
        ({"layers": ((0, 1), (1, 3))}, ("layers", "((0, 1), (1, 3))", str(PLAN.layers))),
        ({"dtype": "bfloat16"}, ("dtype", "bfloat16", "float32")),
    ],
)
def test_a_greeting_from_another_ring_is_refused_naming_both(
    changes: dict[str, object], numbers: tuple[str, ...]
) -> None:
    ours = hello(PLAN, PLAN.digest, "float32", 0, Epoch(3))
    assert frames.check_hello(ours, ours) == ""
    why = frames.check_hello(msgspec.structs.replace(ours, **changes), ours)
    for number in numbers:
        assert number in why


def test_a_lap_as_composed_is_accepted() -> None:
    frames.check_lap(lap(), PLAN, 1)
    head = lap(ids=bytes(20), body_bytes=0, stamps=())
    frames.check_lap(head, PLAN, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requests": (), "starts": (), "rows": (), "completing": (), "row_count": 0}, "0 spans"),
        ({"row_count": 6}, "5 rows and claims 6"),
        ({"rows": (1, 1, 64), "row_count": 66}, "row width is 64"),
        ({"starts": (10, 20, -1)}, "outside"),
        ({"starts": (10, 512, 0)}, r"outside \[0, 512\)"),
        ({"rows": (1, 1)}, "unequal length"),
        ({"requests": (RequestId(4), RequestId(4), RequestId(11))}, "twice"),
        ({"decodes": 3}, "3 decodes"),
        ({"completing": (5,)}, "completes"),
        ({"completing": (0,)}, "completes"),
    ],
)
def test_a_lap_that_breaks_the_plan_or_itself_is_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(WireError, match=words):
        frames.check_lap(lap(batch(**changes)), PLAN, 1)


def test_a_lap_with_a_wrong_body_ids_or_stamps_is_refused() -> None:
    with pytest.raises(WireError, match="announces 79 bytes, not 80"):
        frames.check_lap(lap(body_bytes=79), PLAN, 1)
    with pytest.raises(WireError, match="20 bytes of ids"):
        frames.check_lap(lap(ids=bytes(20)), PLAN, 1)
    with pytest.raises(WireError, match="0 bytes of ids"):
        frames.check_lap(lap(body_bytes=0, stamps=()), PLAN, 0)
    with pytest.raises(WireError, match="4 stamps at stage 2"):
        frames.check_lap(lap(), PLAN, 2)


def test_the_largest_lap_that_a_plan_allows_fits_its_bound() -> None:
    plan = plan_of(3, micro_batch_width=8, row_width=64)
    big = 1 << 62
    bias = tuple((token + (1 << 20), -99.123456789) for token in range(LOGIT_BIAS_MAX))
    params = SamplingParams(
        temperature=0.123456789, top_k=1 << 30, top_p=0.123456, min_p=0.0123, seed=(1 << 64) - 1,
        repetition_penalty=1.23456, frequency_penalty=-1.23456, presence_penalty=1.23456,
        logprobs=20, logit_bias=bias,
    )  # fmt: skip
    requests = tuple(RequestId(big + index) for index in range(8))
    message = wire.Lap(
        micro_batch=batch(
            id=MicroBatchId(big), epoch=Epoch(big), requests=requests, starts=(448,) * 8,
            rows=(8,) * 8, decodes=0, completing=tuple(range(8)), row_count=64,
        ),
        ids=bytes(4 * 64),
        keeps_ids=True,
        sampling=tuple((index, params) for index in range(8)),
        stamps=(big,) * 12,
        body_bytes=64 * 16,
    )  # fmt: skip
    frames.check_lap(replace_stamps(message, 2), plan, 2)
    assert len(wire.encode(message)) <= frames.header_bytes_max(plan)
    release = wire.Release(Epoch(big), tuple(RequestId(big + k) for k in range(plan.running_max)))
    assert len(wire.encode(release)) <= frames.header_bytes_max(plan)


def replace_stamps(message: wire.Lap, stage: int) -> wire.Lap:
    return msgspec.structs.replace(message, stamps=message.stamps[: 4 * stage])


def test_every_lap_of_a_ring_is_accepted_by_every_stage() -> None:
    from kvasir_core.decisions import Launch
    from kvasir_core.events import LapEnded, RequestArrived
    from kvasir_core.units import Nanos

    plan = replace(PLAN, packer="greedy")
    ring = Ring(plan)
    chance = random.Random(4)
    flying: list[MicroBatch] = []
    for now in range(2000):
        if now < 40:
            event = RequestArrived(
                RequestId(now), chance.randrange(1, 200), chance.randrange(1, 30)
            )
            decisions = ring.handle(event, Nanos(now))
        elif flying:
            landed = flying.pop(0)
            decisions = ring.handle(LapEnded(landed.id, landed.epoch), Nanos(now))
        else:
            break
        for decision in decisions:
            if isinstance(decision, Launch):
                flying.append(decision.micro_batch)
                for stage in range(plan.stages):
                    rows = decision.micro_batch.row_count
                    message = wire.Lap(
                        decision.micro_batch,
                        bytes(4 * rows) if stage == 0 else b"",
                        False,
                        (),
                        (0,) * 4 * stage,
                        rows * 16 if stage else 0,
                    )
                    frames.check_lap(message, plan, stage)


def test_result_rows_read_back_and_stay_within_the_plans_bound() -> None:
    top = tuple((token, -float(token)) for token in range(20))
    rows = [ResultRow(5, -0.5, top), ResultRow(None, 0.0), ResultRow((1 << 31) - 1, 0.0, top[:3])]
    packed = pack_rows(rows)
    assert unpack_rows(packed, 3) == rows
    assert len(pack_rows([rows[0]])) <= RESULT_ROW_BYTES
    for wrong in (packed[:-1], packed + b"x", b""):
        with pytest.raises(WireError):
            unpack_rows(wrong, 3)
    with pytest.raises(WireError, match="alternatives"):
        unpack_rows(packed[:8] + b"\xff\xff\xff\x7f" + packed[12:], 3)


def test_a_frame_above_the_plans_bound_is_never_taken(tmp_path: object) -> None:
    """ZeroMQ drops the connection before it reads the body; a frame at the bound passes."""
    endpoint = f"ipc://{tmp_path}/in"
    with zmq.Context() as context:
        inbox = Inbox(context, endpoint, 1000)
        polite, rude = Outlet(context, endpoint, 100), Outlet(context, endpoint, 100)
        try:
            rude.send(b"small", bytes(1001))
            until(rude.was_disconnected, "the rude one is thrown out", 10.0)
            polite.send(b"header", bytes(1000))
            assert inbox.socket.poll(10_000)
            received = inbox.receive()
            assert received is not None
            assert received.header == b"header"
            assert received.body is not None
            assert len(received.body) == 1000
            assert inbox.receive() is None
        finally:
            for link in (inbox, polite, rude):
                link.close()


def test_a_body_arrives_without_a_copy_and_can_be_written_to(tmp_path: object) -> None:
    import torch

    endpoint = f"ipc://{tmp_path}/in"
    with zmq.Context() as context:
        inbox, outlet = Inbox(context, endpoint, 1 << 20), Outlet(context, endpoint, 100)
        try:
            sent = torch.arange(50_000, dtype=torch.float32)
            outlet.send(b"h", sent.view(torch.uint8).numpy().data)
            assert inbox.socket.poll(10_000)
            received = inbox.receive()
            assert received is not None
            assert received.body is not None
            got = torch.frombuffer(received.body, dtype=torch.float32)
            assert torch.equal(got, sent)
        finally:
            inbox.close()
            outlet.close()


def test_an_address_that_cannot_be_had_is_named(tmp_path: object) -> None:
    with zmq.Context() as context:
        inbox = Inbox(context, "tcp://127.0.0.1:*", 100)
        try:
            with pytest.raises(JoinError, match=inbox.endpoint):
                Inbox(context, inbox.endpoint, 100)
            with pytest.raises(JoinError, match="longer than"):
                Inbox(context, f"ipc:///tmp/{'x' * 120}", 100)
        finally:
            inbox.close()
