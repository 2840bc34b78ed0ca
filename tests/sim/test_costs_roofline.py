"""Roofline costs: what each part of a stage's hold follows, on machines of different kinds."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvasir_core.errors import ScenarioError
from kvasir_sim.costs import build_costs
from kvasir_sim.costs.attention import AttentionCost
from kvasir_sim.costs.base import CostModel
from kvasir_sim.costs.efficiency import FITTED
from kvasir_sim.costs.roofline import DeviceCosts
from kvasir_sim.costs.routing import ROUTING_EXPONENT, distinct_experts, zipf_shares
from kvasir_sim.costs.shape import ModelShape
from kvasir_sim.devices import device_of
from tests.sim.cost_inputs import data_file, micro_batch, scenario

LLAMA = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
    dtype="bfloat16", element_bytes=2,
)  # fmt: skip


def built(
    *,
    model: str = "preset: llama-3-8b",
    devices: str = "gpu: {preset: h100-sxm}",
    ring: str = "stages: 2, device: gpu, kv_tokens: 65536",
    costs: str = "kind: roofline",
    rest: str = "",
) -> CostModel:
    made, plan = scenario(
        f"model: {{{model}}}\ndevices: {{{devices}}}\nring: {{{ring}}}\ncosts: {{{costs}}}\n{rest}"
    )
    return build_costs(made, plan)


def test_the_shape_has_the_published_number_of_parameters() -> None:
    parameters = LLAMA.stage_bytes(32, is_head=True, is_tail=True) / 2
    assert parameters == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA.kv_bytes * 32 == 131072  # 128 KiB a token, as published.
    mixture = replace(LLAMA, experts=8, experts_used=2, expert_ffn=14336, vocab=32000)
    assert mixture.stage_bytes(32, is_head=True, is_tail=True) / 2 == pytest.approx(
        46.7e9, rel=0.001
    )


def test_a_lone_decode_is_bound_by_reading_the_weights_once() -> None:
    """8 billion 16-bit weights at 3.35 TB/s: 4.5 ms (the embedding is not read)."""
    total_s = sum(built().holds(micro_batch((500,)))) / 1e9
    floor_s = 15.0e9 / 3.35e12
    assert floor_s < total_s < 1.6 * floor_s


def test_eight_decodes_cost_hardly_more_than_one_but_a_long_chunk_does() -> None:
    costs = built()
    one, eight = (sum(costs.holds(micro_batch((500,) * n))) for n in (1, 8))
    chunk = sum(costs.holds(micro_batch((), ((0, 512),), 1)))
    assert one < eight < 1.1 * one
    assert chunk > 2 * eight


def test_a_long_chunk_is_bound_by_arithmetic() -> None:
    """Two FLOPs a weight and row at 989 TFLOP/s; a layer's matrices alone."""
    part = DeviceCosts(LLAMA, device_of("h100-sxm"), FITTED).matrix(2048, 4096, 28672)
    assert part.bound == "compute"
    assert part.compute_s == pytest.approx(2 * 2048 * 4096 * 28672 / (989.4e12 * 0.62))
    assert (
        DeviceCosts(LLAMA, device_of("h100-sxm"), FITTED).matrix(8, 4096, 28672).bound == "memory"
    )


def test_decode_attention_grows_by_the_kv_it_reads() -> None:
    costs = built(ring="stages: 2, device: gpu, kv_tokens: 200000")
    short, long, longer = (
        costs.holds(micro_batch((context,) * 16))[0] for context in (1000, 2000, 3000)
    )
    assert long - short == pytest.approx(longer - long, abs=2)
    kv_s = 16 * 16000 * LLAMA.kv_bytes / (0.83 * 3.35e12)  # 16 layers, 16 x 1000 positions.
    assert (long - short) / 1e9 == pytest.approx(kv_s, rel=1e-3)


def test_a_chunk_behind_a_long_context_costs_more_than_one_in_front() -> None:
    costs = built()
    near, far = (costs.holds(micro_batch((), ((start, 256),)))[0] for start in (0, 7000))
    assert far > 1.1 * near


def test_the_head_embeds_and_the_tail_samples_only_output_rows() -> None:
    costs = built(
        ring="stages: 3, device: gpu, kv_tokens: 65536", model="preset: llama-3-8b, layers: 33"
    )
    head, body, tail = costs.holds(micro_batch((), ((0, 256),)))
    assert body < head < 1.05 * body
    assert tail == body  # No output row.
    output_tail = costs.holds(micro_batch((), ((0, 256),), 1))[2]
    matrix_s = LLAMA.vocabulary_bytes / (0.91 * 3.35e12)
    assert (output_tail - body) / 1e9 == pytest.approx(matrix_s, rel=0.1)


def test_more_experts_are_touched_and_read_as_rows_grow() -> None:
    costs = built(
        model="preset: qwen3-30b-a3b", devices="gpu: {preset: rtx-pro-6000}",
        ring="stages: 2, device: gpu, kv_tokens: 65536",
    )  # fmt: skip
    holds = [costs.holds(micro_batch((64,) * n))[0] for n in (1, 4, 16, 64)]
    assert holds == sorted(holds)
    assert holds[3] > 4 * holds[0]  # From 8 to 127 of 128 experts; not 16 times, attention is flat.


def test_the_whole_model_decodes_as_fast_as_arithmetic_allows() -> None:
    """Qwen3-30B-A3B reads 3 of 30 billion weights for one token: about 4-8 ms on this device."""
    costs = built(
        model="preset: qwen3-30b-a3b", devices="gpu: {preset: rtx-pro-6000}",
        ring="stages: 2, device: gpu, kv_tokens: 65536",
    )  # fmt: skip
    assert 0.004 < sum(costs.holds(micro_batch((500,)))) / 1e9 < 0.010


def test_stages_on_different_devices_are_the_normal_case() -> None:
    costs = built(
        devices="fast: {preset: h200}, slow: {preset: rtx4090}",
        ring="kv_tokens: 20000, stages: [{layers: 20, device: fast}, {layers: 12, device: slow}]",
    )
    fast, slow = costs.holds(micro_batch((500,) * 4))
    per_layer = fast / 20, slow / 12
    assert per_layer[1] / per_layer[0] > 2.5  # 4.8 against 1.0 TB/s, less the floors.


def test_a_device_by_numbers_is_a_plain_roofline() -> None:
    plain = built(devices="gpu: {flops: 1e14, bandwidth_bytes_per_s: 1e12, overhead_s: 0}")
    hold_s = plain.holds(micro_batch((), ((0, 512),)))[0] / 1e9
    weights = sum(inputs * outputs for inputs, outputs in LLAMA.matrices)
    flops_s = 2 * 512 * weights * 16 / (0.62 * 1e14)
    assert flops_s < hold_s < 1.1 * flops_s


def test_overhead_is_added_once_a_pass() -> None:
    free, slow = (
        built(devices=f"gpu: {{preset: h100-sxm, overhead_s: {overhead}}}").holds(micro_batch((9,)))
        for overhead in (0, 0.25)
    )
    assert [b - a for a, b in zip(free, slow, strict=True)] == [250_000_000] * 2


def test_the_prediction_is_the_longest_stage_of_the_same_micro_batch() -> None:
    costs = built(
        devices="fast: {preset: h200}, slow: {preset: l40s}",
        ring="kv_tokens: 20000, stages: [{layers: 22, device: fast}, {layers: 10, device: slow}]",
    )
    batch = micro_batch((300,) * 5, ((128, 200),))
    assert costs.predict(5, 1500, 200, 128) == max(costs.holds(batch))


def test_a_stage_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ScenarioError, match=(
        r"case\.yaml:3: ring\.stages: stage 0 \(16 layers\) needs 7\.48 GiB of weights and 20\.00 "
        r"GiB of KV \(327680 tokens\), together 27\.48 GiB, but gpu has 24\.00 GiB; at most 2706\d\d "
        "KV tokens fit: set ring.kv_tokens"
    )):  # fmt: skip
        built(devices="gpu: {preset: rtx4090}", ring="stages: 2, device: gpu, kv_tokens: 327680")


def test_weights_that_do_not_fit_alone_say_so() -> None:
    with pytest.raises(ScenarioError, match=r"phone has 8\.00 GiB; add stages"):
        built(
            model="preset: llama-3-70b", devices="phone: {preset: phone}",
            ring="stages: 2, device: phone, kv_tokens: 16",
        )  # fmt: skip


def test_memory_that_is_not_known_is_not_checked_and_the_report_says_so() -> None:
    costs = built(
        model="preset: llama-3-70b", devices="gpu: {flops: 1e14, bandwidth_bytes_per_s: 1e12}"
    )
    assert "memory not known, not checked" in costs.describe()[-1]


def test_only_the_fitted_device_with_fitted_numbers_counts_as_fitted() -> None:
    def provenance(
        device: str, costs: str = "kind: roofline", model: str = "preset: llama-3-8b"
    ) -> str:
        return built(devices=f"gpu: {{{device}}}", costs=costs, model=model).provenance

    assert provenance("preset: rtx-pro-6000") == "fitted"
    assert provenance("preset: h100-sxm") == "assumed"
    assert provenance("preset: rtx-pro-6000, flops: 1e15") == "assumed"
    assert provenance("preset: rtx-pro-6000", "kind: roofline, matmul_efficiency: 0.5") == "assumed"
    assert (
        provenance("preset: rtx-pro-6000", model="preset: llama-3-8b, dtype: float16") == "assumed"
    )


def test_given_efficiencies_replace_the_fitted_ones() -> None:
    chunk = micro_batch((), ((0, 512),))
    decode = micro_batch((2000,) * 8)
    usual = built()
    slower = built(costs="kind: roofline, matmul_efficiency: 0.31")
    assert slower.holds(chunk)[0] > 1.7 * usual.holds(chunk)[0]
    assert slower.holds(decode) == usual.holds(decode)
    thin = built(costs="kind: roofline, bandwidth_efficiency: 0.4")
    assert thin.holds(decode)[0] > 1.8 * usual.holds(decode)[0]
    attention = built(costs="kind: roofline, attention_efficiency: 0.1")
    far = micro_batch((), ((7000, 512),))
    assert attention.holds(far)[0] > 1.2 * usual.holds(far)[0]


def test_the_report_names_sources_bounds_and_memory() -> None:
    lines = built().describe()
    assert "roofline, assumed" in lines[0]
    assert "NVIDIA H100 data sheet" in lines[1]
    assert lines[2].startswith("gpu, 1 row: ")
    assert "memory-bound" in lines[2] or "memory" in lines[2]
    assert "512 rows" in lines[3]
    assert "compute" in lines[3]
    assert "16 layers on gpu: 7.48 GiB weights + 4.00 GiB KV of 80.0 GiB" in lines[4]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            {"model": "layers: 8, hidden: 64"},
            r"case\.yaml:1: model\.heads: missing; costs of kind roofline",
        ),
        ({"devices": "gpu: {preset: h300}"}, r"devices\.gpu.*'h300' is not in the catalogue"),
        ({"ring": "stages: 2"}, r"ring\.device: missing"),
    ],
)
def test_what_is_missing_is_named(change: dict[str, str], what: str) -> None:
    with pytest.raises(ScenarioError, match=what):
        built(**change)


def attention_s(decodes: int, context: int, *chunks: tuple[int, int]) -> float:
    cost = AttentionCost(LLAMA, device_of("a100-80g"), FITTED)
    return cost.seconds(
        decodes, context, [start for start, _ in chunks], [rows for _, rows in chunks]
    )


def test_a_short_chunk_is_no_faster_than_its_longest_tile() -> None:
    assert attention_s(0, 0, (8000, 1)) == pytest.approx(attention_s(0, 0, (8000, 16)), rel=0.01)
    assert attention_s(0, 0, (8000, 512)) > 2 * attention_s(0, 0, (8000, 16))


def test_decodes_beside_a_chunk_cost_whole_tiles() -> None:
    alone = attention_s(64, 64 * 4000) + attention_s(0, 0, (0, 64))
    assert attention_s(64, 64 * 4000, (0, 64)) > 1.5 * alone


def test_kv_beyond_the_cache_is_read_again() -> None:
    per_position = [attention_s(128, 128 * c, (0, 16)) / c for c in (1000, 8000)]
    assert per_position[1] > 1.2 * per_position[0]


def test_attention_never_becomes_cheaper_by_more_work() -> None:
    for base in ((4, 4000, (0, 64)), (0, 0, (512, 100)), (200, 900_000, (64, 16))):
        decodes, context, (start, rows) = base
        now = attention_s(decodes, context, (start, rows))
        assert attention_s(decodes, context + 5000 * bool(decodes), (start, rows)) >= now
        assert attention_s(decodes, context, (start + 1000, rows)) >= now
        assert attention_s(decodes, context, (start, rows + 64)) >= now


def test_uniform_routing_touches_the_textbook_number_of_experts() -> None:
    uniform = zipf_shares(8, 0)
    assert uniform == (0.125,) * 8
    assert [round(distinct_experts(n, 2, uniform), 3) for n in (1, 2, 4, 8)] == [
        2,
        3.5,
        5.469,
        7.199,
    ]


def test_skewed_routing_touches_fewer_and_never_less_than_one_tokens_choice() -> None:
    for exponent in (0.5, 1.0, 3.0):
        shares = zipf_shares(64, exponent)
        assert sum(shares) == pytest.approx(1)
        assert 8 <= distinct_experts(1, 8, shares) <= 8 + 1e-9
        assert distinct_experts(32, 8, shares) < distinct_experts(32, 8, zipf_shares(64, 0))


def test_the_expected_number_is_that_of_independent_draws() -> None:
    shares = zipf_shares(16, 0.7)
    chosen = 4 * np.asarray(shares)
    dice = np.random.default_rng(3)
    counts = (dice.random((4000, 6, 16)) < chosen).any(axis=1).sum(axis=1)
    assert distinct_experts(6, 4, shares) == pytest.approx(counts.mean(), rel=0.02)


def test_the_default_skew_gives_mixtrals_counted_experts() -> None:
    stats = json.loads(data_file("traces", "moe_routing", "mixtral_derived_stats.json").read_text())
    shares = zipf_shares(8, ROUTING_EXPONENT)
    for log in stats["data"].values():
        for batch, counted in log["by_batch"].items():
            assert distinct_experts(int(batch), 2, shares) == pytest.approx(
                counted["distinct_mean"], rel=0.03
            )
