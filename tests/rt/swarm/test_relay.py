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


def test_a_worker_that_reads_nothing_makes_its_calls_busy_and_nobody_else_wait() -> None:
    limits = RelayLimits(send_s_max=1.0)
    patient = RelayLimits(queue_bytes_max=100 << 20)

    async def story() -> None:
        async with (
            live_relay(limits) as relay,
            dialled(relay, SERVICE, limits=patient) as coordinator,
            dialled(relay, "other-token", 1) as other,
        ):
            frozen = await dial(relay.url, "worker-token", 1)
            frozen.connection.transport.pause_reading()
            await coordinator.next(Attached)
            for request in range(60):
                coordinator.channel.post(*call_of(request, rows=60, hidden=4096))
            fault, _ = await coordinator.next(Fault)
            assert fault.why == "busy"
            coordinator.channel.post(*call_of(1000, worker=OTHER))
            asked, _ = await other.next(Call)
            other.channel.post(*reply_to(asked))
            while True:
                answer, _ = await coordinator.next(Reply, Detached)
                if isinstance(answer, Reply):
                    break
            assert answer.request == 1000
            while True:  # The frozen one is cut off, and every call to it is answered.
                gone, _ = await coordinator.next(Detached)
                if gone.worker == WORKER:
                    break
            while coordinator.frames.qsize():
                fault, _ = await coordinator.next()
                assert isinstance(fault, Fault)
                assert fault.why in ("busy", "closed")
            assert relay.relay.figures()["calls_open"] == 0
            frozen.abort()

    asyncio.run(story())


def test_when_a_worker_goes_its_open_calls_are_answered_and_all_are_told() -> None:
    async def story() -> None:
        async with live_relay() as relay, dialled(relay, SERVICE) as coordinator:
            async with dialled(relay, "worker-token", 1) as worker:
                coordinator.channel.post(*call_of(5))
                await worker.next(Call)
            fault, _ = await coordinator.next(Fault)
            assert (fault.request, fault.why) == (5, "closed")
            gone, _ = await coordinator.next(Detached)
            assert (gone.worker, gone.session) == (WORKER, 1)
            coordinator.channel.post(*call_of(6))
            fault, _ = await coordinator.next(Fault)
            assert (fault.request, fault.why) == (6, "closed")
        assert relay.gate.closed == [(WORKER, 1)]

    asyncio.run(story())


def test_a_call_under_another_generation_reaches_nobody() -> None:
    async def story() -> None:
        async with (
            live_relay() as relay,
            dialled(relay, SERVICE) as coordinator,
            dialled(relay, "worker-token", 4) as worker,
        ):
            coordinator.channel.post(*call_of(1, session=3))
            assert (await coordinator.next(Fault))[0].why == "closed"
            coordinator.channel.post(*call_of(2, session=4))
            await worker.next(Call)

    asyncio.run(story())


def test_a_newer_generation_takes_the_place_of_the_older() -> None:
    async def story() -> None:
        async with (
            live_relay() as relay,
            dialled(relay, SERVICE) as coordinator,
            dialled(relay, "worker-token", 1) as older,
        ):
            coordinator.channel.post(*call_of(1))
            await older.next(Call)
            async with dialled(relay, "worker-token", 2) as newer:
                assert (await coordinator.next(Fault))[0].why == "closed"
                coordinator.channel.post(*call_of(2, session=2))
                asked, _ = await newer.next(Call)
                newer.channel.post(*reply_to(asked))
                assert (await coordinator.next(Reply))[0].request == 2
            with pytest.raises(DialError, match="409"):
                await dial(relay.url, "worker-token", 2)

    asyncio.run(story())


def test_a_dropped_call_is_taken_back_or_the_worker_is_told() -> None:
    async def story() -> None:
        async with (
            live_relay() as relay,
            dialled(relay, SERVICE) as coordinator,
            dialled(relay, "worker-token", 1) as worker,
        ):
            coordinator.channel.post(*call_of(1))
            asked, _ = await worker.next(Call)
            coordinator.channel.post_urgent(Drop(1))
            dropped, _ = await worker.next(Drop)
            assert dropped.request == asked.request
            worker.channel.post(*reply_to(asked))  # Too late: nobody gets it.
            answer = await exchange(coordinator, worker, 2)
            assert isinstance(answer, Reply)
            assert answer.request == 2
            assert relay.relay.counts.strays == 1

    asyncio.run(story())


def test_a_reply_counts_once_and_only_for_what_was_asked() -> None:
    limits = RelayLimits(strays_max=5)

    async def story() -> None:
        async with (
            live_relay(limits) as relay,
            dialled(relay, SERVICE) as coordinator,
            dialled(relay, "worker-token", 1) as worker,
        ):
            coordinator.channel.post(*call_of(1))
            asked, _ = await worker.next(Call)
            for _ in range(3):
                worker.channel.post(*reply_to(asked))
            worker.channel.post(*reply_to(call_of(999)[0]))
            assert (await coordinator.next(Reply))[0].request == 1
            assert isinstance(await exchange(coordinator, worker, 2), Reply)
            assert coordinator.frames.empty()
            for _ in range(6):
                worker.channel.post(*reply_to(asked))
            assert (await coordinator.next(Detached))[0].worker == WORKER

    asyncio.run(story())


def test_who_says_nothing_is_dead_and_who_beats_is_not() -> None:
    limits = RelayLimits(beat_s=0.3, dead_s=1.5)

    async def story() -> None:
        async with (
            live_relay(limits) as relay,
            dialled(relay, SERVICE, limits=limits) as coordinator,
            dialled(relay, "worker-token", 1, limits=limits),
        ):
            silent = await dial(relay.url, "other-token", 1)
            gone, _ = await coordinator.next(Detached)
            assert gone.worker == OTHER
            assert list(relay.relay.workers) == [WORKER]
            silent.abort()

    asyncio.run(story())


def test_after_the_relay_itself_slept_nobody_is_judged_before_another_limit() -> None:
    async def story() -> None:
        async with live_relay() as relay, dialled(relay, "worker-token", 1) as worker:
            channel = relay.relay.workers[WORKER].channel
            later = asyncio.get_running_loop().time() + 1000
            channel.check(later, slept=True)
            channel.check(later + relay.relay.limits.dead_s - 0.1, slept=False)
            assert not channel.is_over
            channel.check(later + relay.relay.limits.dead_s + 0.1, slept=False)
            assert channel.is_over
            assert "nothing was heard" in channel.why
            del worker

    asyncio.run(story())
