"""A worker's desk answers every call, whatever it holds, and computes what is right."""

import asyncio
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kvasir_core.swarm.words import Slice
from kvasir_rt.errors import ModelFileError
from kvasir_rt.experts.backend import load_local
from kvasir_rt.experts.pairs import from_bytes
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.hub.cutting import write_slice
from kvasir_rt.hub.models import open_expert_model
from kvasir_rt.model.linear import Numerics
from kvasir_rt.model.moe import expert_sum
from kvasir_rt.relay.channel import Channel
from kvasir_rt.swarm.frames import Buffer, Call, Drop, Fault, Frame, Reply
from kvasir_rt.worker import desk as desks
from kvasir_rt.worker.compute import LoadedSlice, load_slice, slice_sizes
from kvasir_rt.worker.desk import Desk
from kvasir_rt.worker.store import SliceName
from tests.rt.tiny_models import TinyModel, write_tiny_model

CPU = Numerics.of("cpu", "float32")
HIDDEN = 64
NAME = SliceName("tiny", Slice(1, 4, 12))
TINY = TinyModel(
    architecture="qwen3moe", layers=2, hidden=HIDDEN, quantisation="Q8_0", expert_ffn=32
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the slice that the hub would cut of it."""
    root = tmp_path_factory.mktemp("desk")
    model = write_tiny_model(root / "tiny.gguf", TINY)
    opened = open_expert_model(cast("Any", "tiny"), model)
    write_slice(opened, NAME.slice, root / "slice.gguf")
    opened.gguf.close()
    return model, root / "slice.gguf"


class Wire:
    """A channel that keeps what is posted."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[tuple[Frame, bytes]] = asyncio.Queue()

    def post(self, header: Frame, payload: Buffer = b"") -> int | None:
        self.answers.put_nowait((header, bytes(payload)))
        return 1

    def post_urgent(self, header: Frame) -> None:
        self.answers.put_nowait((header, b""))

    async def next(self) -> tuple[Any, bytes]:
        async with asyncio.timeout(20):
            return await self.answers.get()


@contextmanager
def open_desk(
    files: tuple[Path, Path], clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[Desk, Wire, Callable[[Frame, Any], None]]]:
    desk, wire = Desk(CPU, clock=clock), Wire()
    desk.add(load_slice(files[1], NAME, HIDDEN, CPU))
    try:
        yield desk, wire, desk.take(cast("Channel", wire), "me", 3, "tiny")
    finally:
        desk.close()


def call(rows: int = 2, pairs: int = 2, **changes: Any) -> Call:
    fields: dict[str, Any] = {
        "request": 1, "worker": "me", "session": 3, "model": "tiny", "layer": 1, "dtype": "f32",
        "rows": rows, "hidden": HIDDEN, "pairs": pairs, "deadline_ms": 20_000, **changes,
    }  # fmt: skip
    return Call(**fields)


def payload(
    rows: list[int], experts: list[int], weights: list[float], x: torch.Tensor
) -> memoryview:
    count = len(rows)
    columns = struct.pack(f"<{count}I{count}I{count}f", *rows, *experts, *weights)
    return memoryview(columns + x.numpy().tobytes())


X = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))
GOOD = payload([1, 0], [11, 4], [0.25, 0.5], X)


def test_a_slice_computes_what_the_whole_model_computes(files: tuple[Path, Path]) -> None:
    with open_gguf(files[0]) as gguf:
        whole = load_local(gguf, (1, 2), CPU)[1]
    right = expert_sum(whole, X, torch.tensor([[4], [11]]), torch.tensor([[0.5], [0.25]]))

    async def story() -> None:
        with open_desk(files) as (_, wire, take):
            take(call(), GOOD)
            reply, data = await wire.next()
            assert (reply.request, reply.rows, reply.hidden) == (1, 2, HIDDEN)
            found = from_bytes(data, "f32", 2, HIDDEN)
            assert torch.allclose(found, right, rtol=1e-5, atol=1e-6)

    asyncio.run(story())


HOSTILE: dict[str, tuple[Call, memoryview]] = {
    "a row that is not there": (call(), payload([2, 0], [4, 5], [1, 1], X)),
    "an expert outside the slice": (call(), payload([0, 1], [4, 12], [1, 1], X)),
    "an expert below the slice": (call(), payload([0, 1], [3, 4], [1, 1], X)),
    "an absurd expert": (call(), payload([0, 1], [4, 0xFFFFFFFF], [1, 1], X)),
    "another layer": (call(layer=0), GOOD),
    "another width": (
        call(hidden=HIDDEN // 2),
        payload([1, 0], [11, 4], [0.25, 0.5], X[:, : HIDDEN // 2].contiguous()),
    ),
    "a weight that is not a number": (call(), payload([0, 1], [4, 5], [float("nan"), 1], X)),
    "a row with an infinity": (call(), payload([0, 1], [4, 5], [1, 1], X / 0)),
    "another worker": (call(worker="you"), GOOD),
    "an older session": (call(session=2), GOOD),
    "another model": (call(model="tin"), GOOD),
}


def test_a_hostile_call_is_a_fault_and_the_next_call_succeeds(files: tuple[Path, Path]) -> None:
    async def story() -> None:
        with open_desk(files) as (_, wire, take):
            for name, (header, data) in HOSTILE.items():
                take(header, data)
                fault, _ = await wire.next()
                assert isinstance(fault, Fault), name
                assert fault.why in ("error", "closed"), name
                take(call(request=2), GOOD)
                assert isinstance((await wire.next())[0], Reply), name

    asyncio.run(story())


def test_a_result_that_f16_cannot_hold_blames_nobody(files: tuple[Path, Path]) -> None:
    large = (X * 1000).half()
    data = memoryview(bytes(GOOD[:24]) + large.numpy().tobytes())

    async def story() -> None:
        with open_desk(files) as (_, wire, take):
            take(call(dtype="f16"), data)
            fault, _ = await wire.next()
            assert fault.why == "busy"
            take(call(request=2), GOOD)
            assert isinstance((await wire.next())[0], Reply)

    asyncio.run(story())


def hold_first(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Computing waits for the first event; the second tells that it has begun."""
    gate, held = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    compute = LoadedSlice.compute

    def hold(*arguments: Any) -> torch.Tensor:
        loop.call_soon_threadsafe(held.set)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(20)
        return compute(*arguments)

    monkeypatch.setattr(LoadedSlice, "compute", hold)
    return gate, held


def test_a_full_queue_is_busy_and_what_nobody_waits_for_is_not_computed(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "CALLS_MAX", 3)

    async def story() -> None:
        with open_desk(files) as (desk, wire, take):
            gate, held = hold_first(monkeypatch)
            take(call(request=1), GOOD)
            await held.wait()
            for request in (2, 3, 4, 5):
                take(call(request=request), GOOD)
            fault, _ = await wire.next()
            assert (fault.request, fault.why) == (5, "busy")
            take(Drop(3), memoryview(b""))
            assert not desk.is_idle
            gate.set()
            answered = [(await wire.next())[0].request for _ in range(3)]
            assert answered == [1, 2, 4]
            assert desk.counts.computed == 3

    asyncio.run(story())


def test_a_call_past_its_deadline_is_not_computed(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    async def story() -> None:
        with open_desk(files, lambda: now[0]) as (desk, wire, take):
            gate, held = hold_first(monkeypatch)
            take(call(request=0), GOOD)
            await held.wait()
            take(call(request=1, deadline_ms=5_000), GOOD)
            now[0] += 6
            gate.set()
            await wire.next()
            take(call(request=2), GOOD)
            assert (await wire.next())[0].request == 2
            assert desk.counts.expired == 1

    asyncio.run(story())


def test_a_file_that_is_not_the_assigned_slice_is_refused(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    assert slice_sizes(files[1], NAME, HIDDEN).experts == 8
    for name, hidden in (
        (SliceName("other", NAME.slice), HIDDEN),
        (SliceName("tiny", Slice(0, 4, 12)), HIDDEN),
        (SliceName("tiny", Slice(1, 4, 11)), HIDDEN),
        (NAME, HIDDEN * 2),
    ):
        with pytest.raises(ModelFileError):
            load_slice(files[1], name, hidden, CPU)
    with pytest.raises(ModelFileError):
        load_slice(files[0], NAME, HIDDEN, CPU)  # The whole model.
    page = tmp_path / "page.gguf"
    page.write_bytes(b"<!doctype html><title>Sign in</title>")
    with pytest.raises(ModelFileError, match="web page"):
        load_slice(page, NAME, HIDDEN, CPU)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files[1].read_bytes()[:-200])
    with pytest.raises(ModelFileError):
        load_slice(cut, NAME, HIDDEN, CPU)
