"""Case O3: what clients send never becomes a series; numbers are as the core has them."""

import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvasir_rt.hub.limits import HubLimits
from tests.rt.hub.hubs import MODEL, Coordinator, RunningHub, Worker, running_hub, wait_for


def series(hub: RunningHub) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = hub.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_series_stay_few_whatever_clients_send(tmp_path: Path) -> None:
    limits = HubLimits(stranger_rate_per_s=10_000, stranger_burst=10_000, node_burst=1000)
    with running_hub(tmp_path, limits=limits) as hub, Coordinator() as coordinator:
        hub.register(coordinator)
        worker = Worker(hub).login()
        worker.cover([0, 0, 8])
        worker.volunteer()
        before = series(hub)
        for number in range(100):
            hub.client.get(f"/bogus-path-{number}")
            hub.post("/api/expert-volunteer", worker.token, max_experts=1, model=f"bogus-{number}")
        for number in range(20):
            hub.get("/api/expert-demand", model=f'bogus"\n{number}' + "x" * 1000)
            hub.client.request(f"BOGUS{number}", "/api/swarm")
        for _ in range(10):
            Worker(hub).login().volunteer()
        started = time.process_time()
        text = hub.get("/metrics").text
        assert time.process_time() - started < 1.0
        assert len(text) < 100_000
        assert "bogus" not in text.lower()
        after = series(hub)
        assert len(set(after) - set(before)) <= 20
        assert worker.node not in text


def test_numbers_follow_the_core(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub, Coordinator(busy=3) as coordinator:
        hub.register(coordinator)
        wait_for(lambda: hub.model()["recruiting"], "recruiting")
        Worker(hub).login().volunteer()
        found = series(hub)
        of_model = (("model", MODEL),)
        assert found["kvasir_hub_model_busy", of_model] == 3
        assert found["kvasir_hub_model_recruiting", of_model] == 1
        assert found["kvasir_hub_model_effective_target", of_model] == 1
        assert found["kvasir_hub_claims_granted_total", ()] == 1
        assert found["kvasir_hub_claims_open", ()] == 1
        assert found["kvasir_hub_coordinators", ()] == 1
        route = (("method", "POST"), ("route", "/api/expert-volunteer"), ("status", "200"))
        assert found["kvasir_hub_http_requests_total", route] == 1


def test_the_live_snapshot_tells_the_story_and_no_secret(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub, Coordinator(busy=3) as coordinator:
        hub.register(coordinator)
        worker = Worker(hub).login()
        wait_for(lambda: hub.model()["recruiting"], "recruiting")
        worker.volunteer()
        swarm = wait_for(
            lambda: (
                (s := hub.get("/api/swarm").json()) and s["events"][-1]["kind"] == "assigned" and s
            ),
            "the assignment",
        )
        kinds = [event["kind"] for event in swarm["events"]]
        assert kinds.index("coordinator_attached") < kinds.index("assigned")
        assert swarm["recruitment"]["models"][0]["recruiting"] is True
        assert swarm["statistics"]["claims_open"] == 1
        assert swarm["policy"]["claim_ttl_s"] == 120
        assert swarm["coordinators"][0]["coordinator"] == "c"
        text = hub.get("/api/swarm").text
        for secret in (hub.token, worker.token, worker.identity._secret.hex(), coordinator.url):
            assert secret not in text
