"""Hops: latency, bytes over bandwidth, and the tail's way back."""

import json
from pathlib import Path

from kvasir_core.plan import RESULT_ROW_BYTES
from kvasir_sim.links import build_links
from tests.sim.cost_inputs import scenario
from tests.sim.profile_inputs import PROFILE

MODEL = "model: {layers: 8, hidden: 4096, dtype: bfloat16}\n"


def test_each_hop_has_its_own_figures_and_the_return_is_last() -> None:
    made, plan = scenario(
        MODEL + "ring:\n"
        "  stages: 3\n"
        "  links: [{latency_s: 0.001, bandwidth_bytes_per_s: 8.192e9}, {occupies_sender: true}]\n"
        "  return_link: {latency_s: 0.02, bandwidth_bytes_per_s: 1e6}\n"
    )
    first, second, back = build_links(made, plan)
    assert (first.latency_ns, first.transfer_ns(1), first.transfer_ns(512)) == (
        1_000_000, 1_000, 512_000,
    )  # fmt: skip
    assert (second.latency_ns, second.transfer_ns(512), second.occupies_sender) == (0, 0, True)
    assert back.latency_ns == 20_000_000
    assert back.transfer_ns(8) == 8 * RESULT_ROW_BYTES * 1000


def test_one_link_section_serves_every_hop_and_the_return() -> None:
    made, plan = scenario(MODEL + "ring: {stages: 4, link: {latency_s: 0.5}}\n")
    assert [link.latency_ns for link in build_links(made, plan)] == [500_000_000] * 4


def test_transfer_time_is_rounded_to_the_nearest_nanosecond() -> None:
    made, plan = scenario(
        "model: {layers: 8, hidden: 1, dtype: float32}\n"
        "ring: {stages: 2, link: {bandwidth_bytes_per_s: 3e9}}\n"
    )
    assert [build_links(made, plan)[0].transfer_ns(rows) for rows in (1, 2, 3)] == [1, 3, 4]


def profiled(path: Path, ring: str) -> str:
    file = path / "p.json"
    file.write_text(json.dumps(PROFILE))
    return (
        "model: {layers: 30, hidden: 576, dtype: float32}\n"
        f"ring: {{{ring}}}\ncosts: {{kind: profile, file: {file}}}\n"
    )


def test_a_profile_gives_the_links_that_the_ring_does_not(tmp_path: Path) -> None:
    made, plan = scenario(profiled(tmp_path, "stages: 2"))
    hop, back = build_links(made, plan)
    rows = 1_000_000 // (576 * 4)
    total = hop.latency_ns + hop.transfer_ns(rows)
    assert abs(total - (100_000 + rows * 576 * 4 / 2)) <= 1  # The table: 100 us + 2 bytes a ns.
    assert back.row_bytes == RESULT_ROW_BYTES


def test_a_link_in_the_ring_wins_over_the_profile(tmp_path: Path) -> None:
    made, plan = scenario(profiled(tmp_path, "stages: 2, link: {latency_s: 1}"))
    assert [link.latency_ns for link in build_links(made, plan)] == [10**9, 10**9]
