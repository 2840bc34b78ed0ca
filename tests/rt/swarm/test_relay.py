"""The relay carries calls and answers, and stays fair to everybody when somebody is not."""

import asyncio

import pytest

from kvasir_rt.relay.dial import DialError, dial
from kvasir_rt.relay.limits import RelayLimits
from kvasir_rt.swarm.frames import Attached, Call, Detached, Drop, Fault, Reply
from tests.rt.swarm.relays import (
    OTHER,
    SERVICE,
    WORKER,
    End,
    call_of,
    dialled,
    exchange,
    live_relay,
    reply_to,
)


def test_a_call_reaches_its_worker_and_the_answer_its_caller() -> None:
    async def story() -> None:
        async with (
            live_relay() as relay,
            dialled(relay, SERVICE) as coordinator,
            dialled(relay, "worker-token", 1) as worker,
        ):
            attached, _ = await coordinator.next(Attached)
            assert (attached.worker, attached.session) == (WORKER, 1)
            header, payload = call_of(7, rows=60, hidden=4096)  # Some chunks.
            payload = bytes(range(256)) * (len(payload) // 256) + bytes(len(payload) % 256)
            coordinator.channel.post(header, payload)
            asked, asked_payload = await worker.next(Call)
            assert asked_payload == payload
            assert asked.request != 7 or relay.relay.workers[WORKER].requests == 7
            worker.channel.post(*reply_to(asked, payload[: 4 * 60 * 4096]))
            answer, answer_payload = await coordinator.next(Reply)
            assert answer.request == 7
            assert answer_payload == payload[: 4 * 60 * 4096]

    asyncio.run(story())


def test_two_callers_with_the_same_numbers_get_their_own_answers() -> None:
    async def story() -> None:
        async with (
            live_relay() as relay,
            dialled(relay, SERVICE) as first,
            dialled(relay, SERVICE) as second,
            dialled(relay, "worker-token", 1) as worker,
        ):
            first.channel.post(*call_of(1, rows=1))
            second.channel.post(*call_of(1, rows=2))
            for _ in range(2):
                asked, _ = await worker.next(Call)
                worker.channel.post(*reply_to(asked))
            assert (await first.next(Reply))[0].rows == 1
            assert (await second.next(Reply))[0].rows == 2

    asyncio.run(story())
