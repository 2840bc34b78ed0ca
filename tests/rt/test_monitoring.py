"""What watches Kvasir: its configuration is valid, every alert is tried, every metric exists."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvasir_rt.relay.meters import metrics_of
from kvasir_rt.wire import ExpertCounts
from tests.rt.bridge_thread import running_bridge
from tests.rt.hub.hubs import Coordinator, Worker, running_hub, wait_for
from tests.rt.scripted_engine import PieceTokenizer, ScriptedEngine

MONITORING = Path(__file__).parents[2] / "monitoring"
DASHBOARD = MONITORING / "grafana" / "kvasir.json"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool here: install Debian's package `prometheus`"
)
METRIC = re.compile(r"\bkvasir_[a-z0-9_]+")
SELECTED = re.compile(r"\b(kvasir_[a-z0-9_]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
GIVEN = {"instance", "job", "le"}  # By Prometheus itself, and of histograms.


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a bridge that has served and a hub that recruits say at `/metrics`."""
    found = {}
    engine = ScriptedEngine(lambda _: [97] * 5)
    engine.experts = (ExpertCounts(is_engaged=True, pairs_remote=3), ExpertCounts())
    with running_bridge(engine, PieceTokenizer()) as bridge:
        bridge.client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3})
        found["bridge"] = bridge.client.get("/metrics").text
    folder = tmp_path_factory.mktemp("hub")
    with running_hub(folder, has_relay=True) as hub, Coordinator(busy=3) as coordinator:
        hub.register(coordinator)
        wait_for(lambda: hub.model()["recruiting"], "recruiting")
        worker = Worker(hub).login()
        worker.volunteer()
        worker.cover([0, 0, 8])
        found["hub"] = hub.get("/metrics").text
    return found


@pytest.fixture(scope="module")
def labels(texts: dict[str, str]) -> dict[str, set[str]]:
    """Each series' labels."""
    found: dict[str, set[str]] = {}
    for text in texts.values():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def promtool(*arguments: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *arguments],
        input=given,
        cwd=MONITORING,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str, str]]:
    """Where, the expression, and its legend."""
    for rule in rules():
        yield rule["alert"], rule["expr"], ""
    for panel in panels():
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]


@needs_promtool
@pytest.mark.parametrize("whose", ["bridge", "hub"])
def test_promtool_finds_nothing_to_complain_of_in_the_metrics(
    texts: dict[str, str], whose: str
) -> None:
    result = promtool("check", "metrics", given=texts[whose])
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@needs_promtool
def test_the_scrape_configuration_and_the_rules_are_valid() -> None:
    for arguments in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        result = promtool("check", *arguments)
        assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_every_alert_fires_where_it_must_and_nowhere_else() -> None:
    result = promtool("test", "rules", "alerts_test.yml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    tried = {
        (case["alertname"], bool(case["exp_alerts"]))
        for test in cases
        for case in test["alert_rule_test"]
    }
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    assert tried == {(name, fires) for name in names for fires in (True, False)}
    for rule in rules():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}


def test_alerts_and_panels_ask_only_for_metrics_and_labels_that_exist(
    labels: dict[str, set[str]],
) -> None:
    count = 0
    for where, expression, legend in expressions():
        metrics = METRIC.findall(expression)
        assert metrics or "up{" in expression, where
        for name in metrics:
            assert name in labels, f"{where}: there is no metric {name}"
            count += 1
        known = set().union(*(labels[name] for name in metrics)) | GIVEN
        for name, selector in SELECTED.findall(expression):
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert asked <= labels[name] | GIVEN, f"{where}: {name} has no {asked}"
        for grouped in GROUPED.findall(expression):
            assert {part.strip() for part in grouped.split(",")} <= known, where
        assert set(re.findall(r"{{(\w+)}}", legend)) <= known, where
    assert count > 50


def test_the_dashboard_has_distinct_panels_that_do_not_lie_over_each_other() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    taken: dict[tuple[int, int], str] = {}
    for panel in found:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken[x, y]}"
                taken[x, y] = panel["title"]
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["targets"]


def test_a_relays_totals_are_counters_and_the_rest_gauges() -> None:
    kinds = {metric.name: metric.type for metric in metrics_of({"calls_total": 3, "workers": 2})}
    assert kinds == {"kvasir_relay_calls": "counter", "kvasir_relay_workers": "gauge"}
