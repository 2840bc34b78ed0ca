"""The hub's live page in a browser: the values of `/api/swarm`, the token, a restart, two widths."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from kvasir_rt.hub.limits import HubLimits
from tests.e2e.browser import (
    WIDTHS,
    chromium,
    fits,
    is_expected,
    keep_screenshot,
    needs_chromium,
    overlaps,
    tab,
    wait_for_messages,
)
from tests.rt.hub.hubs import (
    EXPERTS,
    LAYERS,
    MODEL,
    Coordinator,
    RunningHub,
    Worker,
    running_hub,
    wait_for,
)

pytestmark = needs_chromium
BLOCKS = "header > *, main > *, .tiles > div, .map > *"
LIMITS = HubLimits(stranger_rate_per_s=10_000, stranger_burst=10_000, node_burst=1000)


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """A saturated model, five workers of different standing, claims that are on their way."""
    with (
        running_hub(tmp_path_factory.mktemp("hub"), limits=LIMITS) as it,
        Coordinator(busy=3) as coordinator,
    ):
        it.register(coordinator)
        wait_for(lambda: it.model()["recruiting"], "recruiting")
        for layer in range(LAYERS):
            worker = Worker(it).login()
            answer = worker.volunteer()
            if layer < 3:
                covered = worker.cover([layer, 0, EXPERTS // (1 + layer)])
                if layer < 2:
                    worker.dial(covered["relay_session"])
            assert answer
        Worker(it).login().cover([3, 2, 6])
        yield it


@pytest.mark.parametrize("width", WIDTHS)
def test_a_busy_market_is_shown_without_overlaps(
    running: Browser, hub: RunningHub, width: int
) -> None:
    problems: list[str] = []
    with tab(running, width, problems) as page:
        page.goto(hub.url + "/")
        wait_for_messages(page, 2)
        keep_screenshot(page, f"live_hub_{width}")
        expect(page.locator("#verdict")).to_have_text("recruiting for 1 of 1 models")
        assert fits(page)
        assert overlaps(page, BLOCKS) == []
        assert problems == []


def test_the_page_has_the_values_of_the_swarm(running: Browser, hub: RunningHub) -> None:
    problems: list[str] = []
    with tab(running, 1600, problems) as page:
        page.goto(hub.url + "/")
        wait_for_messages(page, 2)
        swarm = hub.get("/api/swarm").json()
        counts = swarm["statistics"]
        for name, key in (
            ("claims", "claims_open"),
            ("lapsed", "claims_lapsed"),
            ("target-changes", "target_changes"),
            ("lost", "workers_lost"),
        ):
            assert page.locator(f"#{name}").inner_text() == str(counts[key])
        assert page.locator("#worker-count").inner_text() == str(swarm["workers"]) == "4"
        model = swarm["recruitment"]["models"][0]
        cells = page.locator("#models tr").first.inner_text().split("\t")
        assert cells[0] == MODEL
        assert cells[1] == f"{model['busy']} of {model['slots']}"
        assert cells[3:6] == [
            str(model["effective_target"]), str(model["base_target"]), str(model["workers"]),
        ]  # fmt: skip
        titles = [part.get_attribute("title") for part in page.locator(".map .row span").all()]
        assert titles == [
            f"layer {layer['layer']}, experts [{s['experts'][0]}, {s['experts'][1]}): "
            f"{s['replicas']} replica{'s' * (s['replicas'] != 1)}, {s['claimed']} claimed, {s['target']} wanted"
            for layer in swarm["demand"]["models"][0]["layers"]
            for s in layer["segments"]
        ]
        nodes = counts["nodes"]
        connected = sum(node["is_connected"] for node in nodes)
        assert 0 < connected < len(nodes)
        words = page.locator("#standing-words").inner_text()
        assert words == f"0 proven, {connected} new, 0 doubted, 0 draining, {4 - connected} away"
        listed = {row.split("\t")[0] for row in page.locator("#workers tr").all_inner_texts()}
        assert listed == {node["worker"][:12] for node in nodes}
        assert problems == []


def test_a_hub_beyond_its_machine_asks_for_a_token(running: Browser, tmp_path: Path) -> None:
    problems: list[str] = []
    with (
        running_hub(tmp_path, limits=LIMITS, host="0.0.0.0", is_open=True) as hub,
        tab(running, 400, problems) as page,
    ):
        page.goto(hub.url + "/")
        expect(page.locator("#ask")).to_be_visible()
        page.fill("#key", "wrong")
        page.click("#ask button")
        expect(page.locator("#why")).to_contain_text("unknown")
        page.fill("#key", hub.token)
        page.click("#ask button")
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#verdict")).to_have_text("at rest")
        assert fits(page)
    assert [each for each in problems if not is_expected(each)] == []


def test_the_page_outlives_a_hub_that_is_started_again(running: Browser, tmp_path: Path) -> None:
    problems: list[str] = []
    with tab(running, 1600, problems) as page:
        with running_hub(tmp_path, limits=LIMITS) as hub, Coordinator(busy=0) as coordinator:
            page.goto(hub.url + "/")
            expect(page.locator("#coordinators")).to_have_text("0")
            hub.register(coordinator)
            expect(page.locator("#coordinators")).to_have_text("1")
            port = int(hub.url.rpartition(":")[2])
        expect(page.locator("#connection")).not_to_have_text("live")
        with running_hub(tmp_path, limits=LIMITS, listen_on=port):
            expect(page.locator("#connection")).to_have_text("live", timeout=30_000)
            expect(page.locator("#coordinators")).to_have_text("0")
    assert [each for each in problems if not is_expected(each)] == []
