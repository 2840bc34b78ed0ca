"""What the coordinators of a ring's stages do, as the bridge shows it."""

from prometheus_client.parser import text_string_to_metric_families

from kvasir_core.swarm.words import Failure, Standing
from kvasir_core.units import Epoch
from kvasir_rt import wire
from kvasir_rt.wire import ExpertCounts
from tests.rt.bridge_thread import running_bridge
from tests.rt.scripted_engine import PieceTokenizer, ScriptedEngine

ONE = ExpertCounts(
    is_connected=True, is_engaged=True, decided="engaged", engaged_ns=2_500_000_000, engagements=1,
    busy=3, slots=4, threshold=2, reading="ok", workers_known=5, workers_attached=3,
    standings={"proven": 2, "new": 1}, pairs_computed=60, pairs_remote=30, pairs_verified=4,
    pairs_fallback=2, calls=12, hedges=1, mismatches=1, refused={"busy": 7},
)  # fmt: skip
OTHER = ExpertCounts(pairs_computed=10, workers_known=1, refused={"busy": 1, "closed": 2})


def test_a_ring_without_a_hub_has_no_swarm() -> None:
    with running_bridge(ScriptedEngine(lambda _: []), PieceTokenizer()) as bridge:
        assert bridge.client.get("/api/ring").json()["swarm"] is None
        assert "kvasir_swarm" not in bridge.client.get("/metrics").text


def test_coordinators_are_summed_and_shown_one_by_one() -> None:
    engine = ScriptedEngine(lambda _: [])
    engine.experts = (ONE, OTHER)
    with running_bridge(engine, PieceTokenizer()) as bridge:
        swarm = bridge.client.get("/api/ring").json()["swarm"]
    assert swarm["is_engaged"] is True
    assert swarm["workers_known"] == 5
    assert swarm["pairs"] == {"remote": 30, "computed": 70, "verified": 4, "fallback": 2}
    assert swarm["share_remote_pairs"] == 0.3
    assert swarm["calls"] == 12
    assert swarm["refused"] == {"busy": 8, "closed": 2, "error": 0}
    first, second = swarm["coordinators"]
    assert first["stage"] == 0
    assert first["decided"] == "engaged"
    assert first["engaged_s"] == 2.5
    assert first["saturation"] == {"busy": 3, "slots": 4, "threshold": 2, "reading": "ok"}
    assert first["standings"] == dict.fromkeys(map(str, Standing), 0) | {"proven": 2, "new": 1}
    assert second["decided"] is None
    assert set(first) == set(second)
    assert set(first["refused"]) == set(map(str, Failure))


def test_metrics_are_by_stage_and_their_labels_bounded() -> None:
    engine = ScriptedEngine(lambda _: [])
    engine.experts = (ONE, OTHER)
    with running_bridge(engine, PieceTokenizer()) as bridge:
        text = bridge.client.get("/metrics").text
    series = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("kvasir_swarm_")
    }
    assert series["kvasir_swarm_pairs_total", "0", "remote"] == 30
    assert series["kvasir_swarm_refused_total", "1", "closed"] == 2
    assert series["kvasir_swarm_workers", "0", "proven"] == 2
    assert series["kvasir_swarm_engaged", "0"] == 1
    assert series["kvasir_swarm_engaged_seconds_total", "0"] == 2.5
    assert len(series) == 2 * (6 + 6 + 12 + 4 + 3)  # Whatever workers there are.


def test_counts_travel_with_a_beat() -> None:
    beat = wire.Beat(Epoch(1), None, 0, 0, {}, ONE)
    assert wire.decode_to_bridge(wire.encode(beat)) == beat
