"""Pairs: sharded equals whole, frames carry every pair once, hostile payloads are refused."""

import itertools
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core.swarm.words import CallId, ModelName, Session, Share, WorkerId
from kvasir_core.units import Nanos
from kvasir_rt.experts.backend import load_local
from kvasir_rt.experts.pairs import Pairs, Routing, from_bytes, pair_sum, to_bytes, unpack_pairs
from kvasir_rt.experts.records import RoutedCall, make_flight, relative_error
from kvasir_rt.experts.requests import encode, is_sendable, take_reply
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.model.linear import Numerics
from kvasir_rt.model.moe import Experts, expert_sum
from kvasir_rt.swarm.frames import Call, Dtype, FrameError, Reply, pack
from tests.rt.tiny_models import TinyModel, write_tiny_model

EXPERTS, USED, HIDDEN = 16, 4, 64


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Experts:
    model = TinyModel(architecture="qwen3moe", layers=1, hidden=HIDDEN, experts=EXPERTS)
    path = write_tiny_model(tmp_path_factory.mktemp("pairs") / "tiny.gguf", model)
    with open_gguf(Path(path)) as gguf:
        return load_local(gguf, (0, 1), Numerics.of("cpu", "float32"))[0]


def choice(rows: int, seed: int, hidden: int = HIDDEN) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:USED] for _ in range(rows)])
    weights = torch.rand(rows, USED, generator=generator)
    return x, chosen, weights / weights.sum(dim=1, keepdim=True)


def cut(routing: Routing, seed: int, places: int) -> list[list[Share]]:
    """Every pair to one of some places, at random."""
    generator = torch.Generator().manual_seed(seed)
    found: list[list[Share]] = [[] for _ in range(places)]
    for expert, count in routing.counts:
        first = 0
        while first < count:
            size = int(torch.randint(1, count - first + 1, (1,), generator=generator))
            place = int(torch.randint(0, places, (1,), generator=generator))
            found[place].append(Share(expert, first, size))
            first += size
    return found


@given(rows=st.integers(1, 40), seed=st.integers(0, 1000), places=st.integers(1, 5))
def test_sums_over_any_division_of_the_pairs_add_up_to_the_whole(
    experts: Experts, rows: int, seed: int, places: int
) -> None:
    x, chosen, weights = choice(rows, seed)
    whole = expert_sum(experts, x, chosen, weights)
    routing = Routing(chosen, weights)
    total = torch.zeros_like(x)
    for shares in cut(routing, seed, places):
        if shares:
            total += pair_sum(experts, x, routing.pairs(shares))
    assert relative_error(total, whole) < 1e-5


def flight_of(x: torch.Tensor, routing: Routing, shares: tuple[Share, ...]):  # type: ignore[no-untyped-def]
    import threading

    call = RoutedCall(CallId(1), 0, x, routing, threading.Condition())
    key = CallId(1), 1, WorkerId("w")
    return make_flight(call, key, Session(3), shares, Nanos(10**9), is_trial=False)


@given(
    rows=st.integers(1, 300),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(["f32", "f16", "bf16"]),
)
def test_frames_carry_each_row_once_and_every_pair_once(rows: int, seed: int, dtype: Dtype) -> None:
    hidden = 8192  # A frame holds some 30 rows of f32.
    x, chosen, weights = choice(rows, seed, hidden=1)
    x = x.expand(rows, hidden)
    routing = Routing(chosen, weights)
    shares = tuple(cut(routing, seed, 2)[0])
    if not shares:
        return
    flight = flight_of(x, routing, shares)
    wanted = routing.pairs(shares)
    found: list[tuple[int, int, float]] = []
    sent_rows = 0
    for call, payload in encode(flight, ModelName("m"), dtype, Nanos(0), itertools.count(1)):
        pack(call, payload)  # Refuses what breaks a limit.
        start, stop = flight.requests[call.request]
        assert call.rows == stop - start
        sent_rows += call.rows
        values, pairs = unpack_pairs(call, payload)
        there = flight.rows[start:stop]
        assert torch.equal(values, from_bytes(to_bytes(x[there], dtype), dtype, call.rows, hidden))
        found += zip(
            there[pairs.rows].tolist(), pairs.experts.tolist(), pairs.weights.tolist(), strict=True
        )
    assert sent_rows == len(set(wanted.rows.tolist()))
    expected = zip(
        wanted.rows.tolist(), wanted.experts.tolist(), wanted.weights.tolist(), strict=True
    )
    assert sorted(found) == sorted(expected)


def test_answers_to_several_frames_are_put_together_in_any_order() -> None:
    x, chosen, weights = choice(100, 1, hidden=8192)
    routing = Routing(chosen, weights)
    flight = flight_of(x, routing, tuple(Share(e, 0, n) for e, n in routing.counts))
    sent = list(encode(flight, ModelName("m"), "f32", Nanos(0), itertools.count(1)))
    assert len(sent) > 2
    for index, (call, _) in enumerate(reversed(sent)):
        start, stop = flight.requests[call.request]
        answer = to_bytes(x[start:stop] * 2, "f32")
        reply = Reply(call.request, "f32", call.rows, call.hidden, 1)
        assert take_reply(flight, reply, memoryview(answer), "f32") == (index == len(sent) - 1)
    assert flight.values is not None
    assert torch.equal(flight.values, x * 2)
    assert flight.norm_ratio() == pytest.approx(2.0)


def test_an_answer_of_another_shape_is_noticed() -> None:
    x, chosen, weights = choice(3, 1)
    routing = Routing(chosen, weights)
    flight = flight_of(x, routing, tuple(Share(e, 0, n) for e, n in routing.counts))
    (sent,) = encode(flight, ModelName("m"), "f32", Nanos(0), itertools.count(1))
    reply = Reply(sent.call.request, "f32", sent.call.rows, HIDDEN * 2, 1)
    assert take_reply(flight, reply, memoryview(bytes(3 * HIDDEN * 8)), "f32")
    assert not flight.is_shaped


def test_what_f16_cannot_hold_and_what_is_not_finite_is_not_sent() -> None:
    for value, dtype, is_right in (
        (1.0, "f16", True), (7e4, "f16", False), (7e4, "f32", True),
        (float("nan"), "f32", False), (float("inf"), "bf16", False),
    ):  # fmt: skip
        x, chosen, weights = choice(3, 1)
        x[1, 5] = value
        routing = Routing(chosen, weights)
        flight = flight_of(x, routing, tuple(Share(e, 0, n) for e, n in routing.counts))
        assert is_sendable(flight, dtype) == is_right  # type: ignore[arg-type]


def test_the_error_is_of_the_worst_row_and_a_nan_passes_nowhere() -> None:
    right = torch.randn(10, 32, generator=torch.Generator().manual_seed(1))
    assert relative_error(right, right) == 0
    assert relative_error(right * 1.02, right) == pytest.approx(0.02, rel=1e-3)
    one = right.clone()
    one[7] *= 1.5
    assert relative_error(one, right) == pytest.approx(0.5, rel=1e-3)
    one[7, 0] = float("nan")
    assert not relative_error(one, right) <= 1e9
    zeros = torch.zeros_like(right)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(right, zeros) > 1e9


def payload_of(
    rows: list[int], experts: list[int], weights: list[float], values: list[float]
) -> bytes:
    count = len(rows)
    return struct.pack(
        f"<{count}I{count}I{count}f{len(values)}f", *rows, *experts, *weights, *values
    )


@pytest.mark.parametrize(
    ("rows", "weights", "values"),
    [
        ([2], [1.0], [0.0] * 4),
        ([0xFFFFFFFF], [1.0], [0.0] * 4),
        ([0], [float("nan")], [0.0] * 4),
        ([0], [float("inf")], [0.0] * 4),
        ([0], [1.0], [0.0, float("nan"), 0.0, 0.0]),
        ([0], [1.0], [0.0, float("-inf"), 0.0, 0.0]),
    ],
)
def test_a_payload_with_numbers_that_cannot_be_is_refused(
    rows: list[int], weights: list[float], values: list[float]
) -> None:
    call = Call(1, "w", 1, "m", 0, "f32", 2, 2, 1, 1000)
    with pytest.raises(FrameError):
        unpack_pairs(call, payload_of(rows, [0], weights, values))


def test_an_empty_place_sums_to_zero(experts: Experts) -> None:
    x, _, _ = choice(3, 1)
    none = torch.empty(0, dtype=torch.int64)
    assert torch.equal(pair_sum(experts, x, Pairs(none, none, torch.empty(0))), torch.zeros_like(x))
