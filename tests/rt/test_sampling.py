"""The sampler: ranges, filters, and draws that depend on seed and position only (case A7)."""

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_rt.errors import SamplingError
from kvasir_rt.sampler import SampledRow, TokenHistory, sample, uniform
from kvasir_rt.sampling import LOGIT_BIAS_MAX, SAMPLING_BYTES_MAX, SamplingParams

GREEDY = SamplingParams()


def logits_of(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def one(
    logits: torch.Tensor, params: SamplingParams, position: int = 0, history: Any = None
) -> SampledRow:
    (row,) = sample(logits, [params], [position], [history])
    assert row is not None
    return row


def drawn(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    return Counter(one(logits, params, position).token for position in range(count))


def test_greedy_takes_the_likeliest_and_of_equals_the_first() -> None:
    assert one(logits_of(0, 3, 1), GREEDY) == SampledRow(1, 0.0, ())
    assert one(logits_of(0, 3, 3), GREEDY).token == 1
    assert one(logits_of(0, 3, 1), SamplingParams(temperature=0.0, top_p=0.1)).token == 1


def test_draws_follow_the_distribution_and_its_temperature() -> None:
    logits = logits_of(math.log(0.5), math.log(0.3), math.log(0.2))
    counts = drawn(logits, SamplingParams(temperature=1.0, seed=3), 4000)
    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert abs(counts[token] / 4000 - share) < 0.03
    hot = drawn(logits, SamplingParams(temperature=100.0, seed=3), 4000)
    assert all(abs(hot[token] / 4000 - 1 / 3) < 0.03 for token in range(3))
    assert drawn(logits, SamplingParams(temperature=1e-300), 50) == {0: 50}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2}),  # Of the equal 2, 3 the lower id.
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.0}, {0}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.56}, {0}),  # 0.4 is 0.57 of what top-k leaves.
        ({"top_k": 2, "top_p": 0.6}, {0, 1}),
        ({"min_p": 0.7}, {0, 1}),
        ({"min_p": 0.3}, {0, 1, 2, 3}),
        ({"min_p": 1.0}, {0}),
    ],
)
def test_each_filter_keeps_exactly_what_it_says(options: dict[str, Any], kept: set[int]) -> None:
    logits = logits_of(*(math.log(share) for share in (0.4, 0.3, 0.13, 0.13, 0.04)))
    counts = drawn(logits, SamplingParams(temperature=1.0, seed=1, **options), 600)
    assert set(counts) == kept


def test_top_p_that_needs_more_than_the_first_sorted_part_keeps_the_right_count() -> None:
    logits = torch.zeros(1, 5000)
    params = SamplingParams(temperature=1.0, top_p=0.5, seed=2)
    counts = drawn(logits, params, 300)
    assert max(counts) < 2501  # Of equals the lower ids stay: just over half of 5,000.
    assert max(counts) > 2200


def test_penalties_look_at_the_whole_text_so_far() -> None:
    logits = logits_of(2.0, 1.9, -1.0)
    history = TokenHistory([0, 0])
    history.extend([2])
    for params, token in (
        (SamplingParams(presence_penalty=0.2), 1),
        (SamplingParams(frequency_penalty=0.04), 0),
        (SamplingParams(frequency_penalty=0.06), 1),
        (SamplingParams(repetition_penalty=1.1), 1),
        (SamplingParams(repetition_penalty=0.9), 0),
    ):
        assert one(logits, params, history=history).token == token
    assert one(logits, SamplingParams(presence_penalty=0.2), history=TokenHistory()).token == 0
    assert logits.tolist() == logits_of(2.0, 1.9, -1.0).tolist()  # Left alone.


def test_logit_bias_moves_the_choice_and_not_the_reported_probability() -> None:
    row = one(logits_of(2, 1, 0), SamplingParams(logit_bias=((2, 5.0), (9, 1.0)), logprobs=1))
    assert row.token == 2
    assert row.logprob == pytest.approx(-2.4076, abs=1e-3)
    assert row.top[0][0] == 0


def test_logprobs_are_the_models_own_sorted_with_equals_by_id() -> None:
    logits = logits_of(1.0, 3.0, 3.0, 0.0)
    row = one(logits, SamplingParams(logprobs=3))
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    assert [token for token, _ in row.top] == [1, 2, 0]
    for token, value in row.top:
        assert value == pytest.approx(float(expected[token]), abs=1e-6)
    assert row.logprob == row.top[0][1]
    assert one(logits, SamplingParams(logprobs=0)).top == ()
    assert one(logits, SamplingParams(logprobs=0)).logprob == row.logprob
    assert len(one(logits, SamplingParams(logprobs=20)).top) == 4


def test_a_row_that_is_not_finite_fails_alone() -> None:
    rows = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [float("inf"), 0.0], [-math.inf] * 2])
    picked = sample(rows, [GREEDY] * 4, [0] * 4, [None] * 4)
    assert [row is None for row in picked] == [False, True, True, True]


# ----------------------------------------------------------------------- case A7: seeds


def random_rows(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).normal(size=(count, 300)).astype(np.float32))


def test_a_seeded_request_draws_the_same_alone_beside_unseeded_and_beside_seeded() -> None:
    rows = random_rows(16)
    seeded = SamplingParams(temperature=0.8, seed=42)
    alone = [one(rows[at : at + 1], seeded, at).token for at in range(16)]
    assert alone == [one(rows[at : at + 1], seeded, at).token for at in range(16)]
    for other in (SamplingParams(temperature=1.0, seed=7), GREEDY, seeded):
        together = []
        for at in range(16):
            mixed = torch.cat((rows[15 - at : 16 - at], rows[at : at + 1], rows[:3]))
            params = [other, seeded, other, GREEDY, other]
            picked = sample(mixed, params, [3, at, 9, 9, 1], [None] * 5)
            assert picked[1] is not None
            together.append(picked[1].token)
        assert together == alone


def test_other_seeds_and_positions_draw_other_tokens() -> None:
    row = random_rows(1)
    by_seed = {one(row, SamplingParams(temperature=1.0, seed=seed)).token for seed in range(40)}
    by_place = {one(row, SamplingParams(temperature=1.0), place).token for place in range(40)}
    assert len(by_seed) > 15
    assert len(by_place) > 15


def test_uniform_numbers_are_even_independent_and_fixed_for_ever() -> None:
    values = uniform(7, 0, 20_000)
    assert 0 < values.min() < values.max() < 1
    counts = Counter((values * 20).astype(int).tolist())
    assert max(abs(count - 1000) for count in counts.values()) < 150
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03
    for other in (uniform(8, 0, 20_000), uniform(7, 1, 20_000)):
        assert abs(np.corrcoef(values, other)[0, 1]) < 0.03
    assert uniform(-1, 3, 5).tolist() == uniform((1 << 64) - 1, 3, 5).tolist()
    assert uniform(7, 0, 10).tolist() == values[:10].tolist()
    # A change here changes users' answers.
    assert uniform(42, 10, 2).tolist() == [0.8538987496098266, 0.014297231551325784]


def test_logits_that_a_replay_rounds_otherwise_draw_the_same_tokens() -> None:
    chance = np.random.default_rng(1)
    logits = (chance.standard_normal((1, 49_152)) * 3).astype(np.float32)
    rounding = (chance.standard_normal(logits.shape) * 1e-5).astype(np.float32)
    before, after = torch.from_numpy(logits), torch.from_numpy(logits + rounding)
    params = SamplingParams(temperature=0.8, seed=4)
    changed = [at for at in range(800) if one(before, params, at) != one(after, params, at)]
    assert not changed


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.01, 5),
    top_k=st.integers(0, 45),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, (1 << 64) - 1),
)
def test_whatever_is_asked_a_token_that_every_filter_keeps_is_drawn(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    token = one(logits_of(*values), params).token
    weights = np.exp((np.array(values, np.float32) - max(values)).astype(float) / temperature)
    larger = int((weights > weights[token]).sum())
    assert larger < (top_k or len(values))
    assert weights[token] >= min_p
    if top_k == 0:
        assert weights[weights > weights[token]].sum() <= top_p * weights.sum() * (1 + 1e-9)


# ------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be from 0.0 to 100.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5"),
        ({"presence_penalty": -2.5}, "presence_penalty is -2.5"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logit_bias": ((3, 101.0),)}, "token 3 is 101.0"),
        ({"logit_bias": ((-3, 1.0),)}, "token -3"),
        ({"logit_bias": ((3, math.nan),)}, "token 3 is nan"),
        ({"logit_bias": ((3, 1.0),) * (LOGIT_BIAS_MAX + 1)}, "has 301 tokens"),
    ],
)
def test_a_value_out_of_range_is_refused_with_name_value_and_range(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(SamplingError, match=text.replace(".", r"\.")):
        SamplingParams(**options)


def test_parameters_survive_a_message_and_bad_ones_do_not() -> None:
    full = SamplingParams(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1,
        frequency_penalty=0.5, presence_penalty=-0.5, seed=(1 << 64) - 1, logprobs=20,
        logit_bias=tuple((50_000 + n, 99.5) for n in range(LOGIT_BIAS_MAX)),
    )  # fmt: skip
    data = msgspec.msgpack.encode(full)
    assert len(data) <= SAMPLING_BYTES_MAX
    assert msgspec.msgpack.decode(data, type=SamplingParams) == full
    bad = data.replace(msgspec.msgpack.encode(0.7), msgspec.msgpack.encode(-0.7))
    with pytest.raises(msgspec.ValidationError, match=r"temperature is -0\.7"):
        msgspec.msgpack.decode(bad, type=SamplingParams)
