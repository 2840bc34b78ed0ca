"""Hostile dials and frames: each is refused, each is followed by a valid call that succeeds."""

import asyncio
import os
import struct
from collections.abc import Sequence

import psutil
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from kvasir_rt.relay.channel import ChannelClosed
from kvasir_rt.relay.dial import DialError, DialSocket, dial
from kvasir_rt.relay.limits import RelayLimits
from kvasir_rt.swarm.frames import (
    CHUNK_BYTES_MAX,
    FRAME_BYTES_MAX,
    Attached,
    Beat,
    Call,
    Frame,
    Hello,
    Reply,
    chunks,
    pack,
)
from tests.rt.swarm.relays import (
    SERVICE,
    WORKER,
    LiveRelay,
    call_of,
    dialled,
    exchange,
    live_relay,
    reply_to,
)

CALL, CALL_PAYLOAD = call_of(1)


def message(frame: bytes, number: int = 1, offset: int = 0, total: int | None = None,
            length: int | None = None) -> bytes:  # fmt: skip
    size = len(frame)
    head = struct.pack(
        "<IIII",
        number,
        offset,
        size if length is None else length,
        total if total is not None else size,
    )
    return head + frame


def header(data: bytes, payload: bytes = b"") -> bytes:
    return message(struct.pack("<H", len(data)) + data + payload)


def nested(levels: int) -> bytes:
    return header(b"\x91" * levels)


HOSTILE_MESSAGES: dict[str, list[bytes | str]] = {
    "text": ["hello"],
    "nothing": [b""],
    "less than a chunk's header": [b"\0" * 15],
    "a chunk without bytes": [b"\0" * 16],
    "a chunk longer than it says": [message(pack(Beat())) + b"x"],
    "a chunk shorter than it says": [message(pack(Beat()), length=500)],
    "a frame of 4 GiB": [message(b"x" * CHUNK_BYTES_MAX, total=0xFFFFFFFF)],
    "a frame of 1 MiB and a byte": [message(b"x" * CHUNK_BYTES_MAX, total=FRAME_BYTES_MAX + 1)],
    "a message beyond the limit": [b"x" * (CHUNK_BYTES_MAX + 17)],
    "a chunk in the middle of nothing": [
        message(b"x" * 100, offset=CHUNK_BYTES_MAX, total=CHUNK_BYTES_MAX + 100)
    ],
    "a frame that changes its size": [
        message(b"x" * CHUNK_BYTES_MAX, total=FRAME_BYTES_MAX),
        message(b"x" * CHUNK_BYTES_MAX, offset=CHUNK_BYTES_MAX, total=CHUNK_BYTES_MAX * 3),
    ],
    "nine frames begun": [
        message(b"x" * CHUNK_BYTES_MAX, number=n, total=FRAME_BYTES_MAX) for n in range(9)
    ],
    "a header beyond the frame": [message(struct.pack("<H", 60_000) + b"x")],
    "a header of 5,000 bytes": [header(b"x" * 5000)],
    "a header that is no msgpack": [header(b"\xc1\xff\xff")],
    "a header nested 4,000 deep": [nested(4000)],
    "a header of an unknown kind": [header(b"\x92\xa6pickle\x01")],
    "a header with a field too many": [header(b"\x92\xa4beat\x01")],
    "a payload where none belongs": [message(pack(Beat()) + b"x" * 50)],
}


async def valid_exchange(relay: LiveRelay, session: int) -> None:
    async with (
        dialled(relay, SERVICE) as coordinator,
        dialled(relay, "other-token", session) as worker,
    ):
        attached = await coordinator.next(Attached)
        header_, payload = call_of(1, worker=attached[0].worker, session=session)
        coordinator.channel.post(header_, payload)
        asked, _ = await worker.next(Call)
        worker.channel.post(*reply_to(asked))
        assert isinstance((await coordinator.next(Reply))[0], Reply)


async def send_and_be_closed(relay: LiveRelay, token: str, session: int | None,
                             messages: list[bytes | str]) -> None:  # fmt: skip
    socket = await dial(relay.url, token, session)
    with pytest.raises((ChannelClosed, ConnectionClosed)):
        await _send_then_listen(socket, messages)
    assert socket.connection.close_code in (1002, 1003, 1007, 1008, 1009)


async def _send_then_listen(socket: DialSocket, messages: Sequence[bytes | str]) -> None:
    for each in messages:
        await socket.connection.send(each)
    async with asyncio.timeout(10):
        while True:
            await socket.receive()


def test_hostile_messages_end_their_connection_and_nothing_else() -> None:
    async def story() -> None:
        async with live_relay() as relay:
            for session, (name, messages) in enumerate(HOSTILE_MESSAGES.items(), 1):
                try:
                    await send_and_be_closed(relay, "worker-token", session, messages)
                    await send_and_be_closed(relay, SERVICE, None, messages)
                    await valid_exchange(relay, session)
                except BaseException as error:
                    error.add_note(name)
                    raise
            assert relay.relay.figures()["partial_bytes"] == 0

    assert len(HOSTILE_MESSAGES) >= 15
    asyncio.run(story())


def frames_of(*frames: bytes) -> list[bytes | str]:
    return [piece for n, frame in enumerate(frames) for piece in chunks(frame, n)]


def test_each_end_may_say_only_what_is_its_own() -> None:
    from_worker: list[Frame] = [CALL, Attached(WORKER, 1), Hello(1, "x", 1)]
    from_coordinator: list[Frame] = [reply_to(CALL)[0], Attached(WORKER, 1), Hello(1, "x", 1)]
    payloads: dict[type[Frame], bytes] = {Call: CALL_PAYLOAD, Reply: bytes(16)}

    async def story() -> None:
        async with live_relay() as relay:
            session = 0
            for header_ in from_worker:
                session += 1
                frame = pack(header_, payloads.get(type(header_), b""))
                await send_and_be_closed(relay, "worker-token", session, frames_of(frame))
                await valid_exchange(relay, session)
            for header_ in from_coordinator:
                session += 1
                frame = pack(header_, payloads.get(type(header_), b""))
                await send_and_be_closed(relay, SERVICE, None, frames_of(frame))
                await valid_exchange(relay, session)
            async with dialled(relay, "worker-token", 99) as worker:
                header_, payload = call_of(1, session=99)
                open_twice = frames_of(pack(header_, payload), pack(header_, payload))
                await send_and_be_closed(relay, SERVICE, None, open_twice)
                del worker

    asyncio.run(story())


@pytest.mark.parametrize(
    ("headers", "query", "status"),
    [
        ({}, "", 401),
        ({"Authorization": "Bearer "}, "", 401),
        ({"Authorization": "Basic worker-token"}, "", 401),
        ({"Authorization": "Bearer wrong"}, "", 401),
        ({"Authorization": "Bearer " + "x" * 600}, "", 401),
        ({"Authorization": "Bearer worker-token"}, "", 401),  # No session: a coordinator's end.
        ({"Authorization": f"Bearer {SERVICE}", "Kvasir-Session": "1"}, "", 401),
        ({"Authorization": f"Bearer {SERVICE}", "Kvasir-Protocol": "99"}, "", 400),
        ({"Authorization": "Bearer worker-token", "Kvasir-Session": "-1"}, "", 400),
        ({"Authorization": "Bearer worker-token", "Kvasir-Session": "1e3"}, "", 400),
        ({"Authorization": "Bearer worker-token", "Kvasir-Session": "9" * 40}, "", 400),
        ({"Authorization": "Bearer worker-token", "Kvasir-Session": "٣"}, "", 400),
        ({"Authorization": "Bearer worker-token", "Kvasir-Session": "1"}, "?token=worker-token", 400),
        ({"Authorization": "Bearer worker-token", "Kvasir-Session": "1", "Origin": "http://evil.example"}, "", 403),
    ],
)  # fmt: skip
def test_a_dial_that_is_not_right_is_refused_before_it_is_a_websocket(
    headers: dict[str, str], query: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with live_relay() as relay:
            with pytest.raises(InvalidStatus) as refused:
                await connect(
                    relay.url + query,
                    additional_headers=[(k, v.encode().decode("latin-1")) for k, v in headers.items()],
                    user_agent_header=None, compression=None, proxy=None,
                )  # fmt: skip
            assert refused.value.response.status_code == status
            assert b'"error"' in (refused.value.response.body or b"")
            await valid_exchange(relay, 1)
            assert not [each for each in caplog.records if each.levelname == "ERROR"]

    asyncio.run(story())


def test_sessions_are_used_once() -> None:
    async def story() -> None:
        async with live_relay() as relay:
            async with dialled(relay, "worker-token", 3):
                for session in (3, 2):
                    with pytest.raises(DialError, match="409"):
                        await dial(relay.url, "worker-token", session)
            await valid_exchange(relay, 1)

    asyncio.run(story())


def test_many_begun_frames_cost_the_largest_holder_its_connection_and_memory_stays_flat() -> None:
    limits = RelayLimits(partial_bytes_max=4 * FRAME_BYTES_MAX)
    begun = [
        message(b"x" * CHUNK_BYTES_MAX, number=n, offset=offset, total=FRAME_BYTES_MAX)
        for n in range(8)
        for offset in range(0, FRAME_BYTES_MAX - CHUNK_BYTES_MAX, CHUNK_BYTES_MAX)
    ]

    async def story() -> None:
        process = psutil.Process(os.getpid())
        async with live_relay(limits) as relay:
            await valid_exchange(relay, 1)
            before = process.memory_info().rss
            async with (
                dialled(relay, SERVICE) as coordinator,
                dialled(relay, "other-token", 2) as worker,
            ):
                for session in range(1, 16):
                    socket = await dial(relay.url, "worker-token", session)
                    with pytest.raises((ChannelClosed, ConnectionClosed)):
                        await _send_then_listen(socket, begun)
                    assert relay.relay.figures()["partial_bytes"] <= 4 * FRAME_BYTES_MAX
                coordinator.channel.post(*call_of(1, worker="b2" * 16, session=2))
                asked, _ = await worker.next(Call)
                worker.channel.post(*reply_to(asked))
                await coordinator.next(Reply)
            assert process.memory_info().rss - before < 40 << 20

    asyncio.run(story())


def test_more_dials_than_allowed_are_refused_and_a_free_place_is_taken_again() -> None:
    async def story() -> None:
        async with live_relay(RelayLimits(coordinators_max=2)) as relay:
            async with dialled(relay, SERVICE), dialled(relay, SERVICE):
                with pytest.raises(DialError, match="503"):
                    await dial(relay.url, SERVICE)
            await valid_exchange(relay, 1)
            async with (
                dialled(relay, SERVICE) as coordinator,
                dialled(relay, "worker-token", 1) as w,
            ):
                assert isinstance(await exchange(coordinator, w, 1), Reply)

    asyncio.run(story())
