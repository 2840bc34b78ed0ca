"""The bridge's live page in a browser: the values of `/api/ring`, the key, a restart, two widths."""

import re
import threading
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from kvasir_rt.wire import ExpertCounts
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
from tests.e2e.serving import Server, serving
from tests.rt.bridge_thread import running_bridge
from tests.rt.scripted_engine import PieceTokenizer, ScriptedEngine
from tests.rt.tiny_models import TinyModel, write_tiny_model

pytestmark = needs_chromium
BLOCKS = "header > *, main > *, .tiles > div, .stage, .stage > *"


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("live")
    path = write_tiny_model(folder / "tiny.gguf", TinyModel(layers=4))
    with serving(folder / "run", str(path), "--stages", "3", "--running-max", "8") as it:
        yield it


@pytest.fixture
def loaded(server: Server) -> Iterator[Server]:
    """Under load until the test ends."""
    is_over = threading.Event()
    body = {"prompt": "a river", "max_tokens": 60, "ignore_eos": True}

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not is_over.is_set():
                client.post("/v1/completions", json=body)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_working_ring_is_shown_without_overlaps(
    running: Browser, loaded: Server, width: int
) -> None:
    problems: list[str] = []
    with tab(running, width, problems) as page:
        page.goto(loaded.url + "/")
        wait_for_messages(page, 4)
        keep_screenshot(page, f"live_ring_{width}")
        assert page.locator(".stage").count() == 3
        assert "looking" not in page.locator("#verdict").inner_text()
        assert float(page.locator("#tokens-per-s").inner_text().replace(",", "")) > 0
        assert fits(page)
        assert overlaps(page, BLOCKS) == []
        assert problems == []


def test_the_page_has_the_values_of_the_ring(running: Browser, server: Server) -> None:
    httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 5}, timeout=60)
    problems: list[str] = []
    with tab(running, 1600, problems) as page:
        page.goto(server.url + "/")
        wait_for_messages(page, 3)
        ring = server.ring()
        counts = ring["counts"]

        def shown(name: str) -> str:
            return page.locator(f"#{name}").inner_text()

        assert shown("model") == ring["model"]
        assert shown("state") == ring["state"] == "ready"
        for name in ("offered", "finished", "refused", "cancelled", "failed"):
            assert shown(name) == f"{counts[name]:,}"
        assert shown("running") == f"{counts['running']} of {ring['plan']['running_max']}"
        assert shown("waiting") == str(counts["waiting"])
        assert shown("window") == f"{ring['open']} of {ring['window']}"
        assert shown("kv") == f"{ring['kv']['blocks_in_use']} of {ring['kv']['blocks_total']:,}"
        assert shown("output-tokens") == f"{ring['output_tokens']:,}"
        assert shown("micro-batches") == f"{ring['micro_batches']:,}"
        cards = page.locator(".stage").all_inner_texts()
        for stage, card in zip(ring["stages"], cards, strict=True):
            first, last = stage["layers"]
            assert f"layers [{first}, {last}) of 4" in card
            assert stage["state"] in card
            assert f"{stage['rows']:,} rows in {stage['micro_batches']:,} micro-batches" in card
            shares = re.search(r"busy ([\d.]+)%, blocked ([\d.]+)%, starved ([\d.]+)%", card)
            assert shares is not None
            assert sum(map(float, shares.groups())) == pytest.approx(100, abs=0.3)
        limits = {
            row.split("\t")[0].replace(" ", "_"): int(row.split("\t")[2].replace(",", ""))
            for row in page.locator("#limits tr").all_inner_texts()
        }
        assert limits == {name: n for name, n in ring["binding_limits"].items() if n}
        assert problems == []


@pytest.mark.parametrize("width", WIDTHS)
def test_expert_workers_are_shown_where_there_is_a_hub(running: Browser, width: int) -> None:
    engine = ScriptedEngine(lambda _: [97])
    problems: list[str] = []
    with running_bridge(engine, PieceTokenizer()) as bridge, tab(running, width, problems) as page:
        page.goto(bridge.url + "/")
        wait_for_messages(page, 1)
        assert page.locator("#swarm").is_hidden(), "a ring without a hub"
        engine.experts = (
            ExpertCounts(
                is_connected=True, is_engaged=True, busy=3, slots=4, workers_known=5,
                workers_attached=3, pairs_computed=1060, pairs_remote=3030, pairs_fallback=2,
                hedges=1, mismatches=4,
            ),
            ExpertCounts(pairs_computed=10, workers_known=1),
        )  # fmt: skip
        expect(page.locator("#swarm")).to_be_visible(timeout=30_000)
        keep_screenshot(page, f"live_ring_swarm_{width}")
        shown = {
            name: page.locator(f"#{name}").inner_text()
            for name in (
                "workers-known", "workers-attached", "pairs-remote", "pairs-share",
                "pairs-computed", "pairs-fallback", "hedges", "mismatches",
            )
        }  # fmt: skip
        assert list(shown.values()) == ["5", "3", "3,030", "73.9%", "1,070", "2", "1", "4"]
        assert page.locator("#swarm-mode").inner_text().startswith("Engaged")
        first, second = page.locator("#coordinators tr").all_inner_texts()
        assert first.split("\t") == ["0", "engaged", "3 of 4", "3,030", "1,060", "2", "1"]
        assert second.split("\t") == ["1", "no line to workers", "0 of 0", "0", "10", "0", "0"]
        assert fits(page)
        assert overlaps(page, BLOCKS) == []
    assert problems == []


def test_a_key_is_asked_for_and_kept_in_memory_only(running: Browser) -> None:
    engine = ScriptedEngine(lambda _: [97])
    problems: list[str] = []
    with (
        running_bridge(engine, PieceTokenizer(), api_key="open-sesame") as bridge,
        tab(running, 400, problems) as page,
    ):
        page.goto(bridge.url + "/")
        expect(page.locator("#ask")).to_be_visible()
        page.fill("#key", "wrong")
        page.click("#ask button")
        expect(page.locator("#ask")).to_be_visible()
        page.fill("#key", "open-sesame")
        page.click("#ask button")
        expect(page.locator("#connection")).to_have_text("live")
        assert page.locator("#ask").is_hidden()
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        assert page.evaluate("document.cookie") == ""
        assert "sesame" not in page.content()
        assert fits(page)
        page.reload()
        expect(page.locator("#ask")).to_be_visible()
    assert [each for each in problems if not is_expected(each)] == []


def test_the_page_survives_a_restart_of_its_server(running: Browser) -> None:
    problems: list[str] = []
    with tab(running, 1600, problems) as page:
        with running_bridge(ScriptedEngine(lambda _: [97] * 9), PieceTokenizer()) as bridge:
            page.goto(bridge.url + "/")
            expect(page.locator("#connection")).to_have_text("live")
            bridge.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
            expect(page.locator("#offered")).to_have_text("1")
            port = bridge.port
        expect(page.locator("#connection")).not_to_have_text("live")
        assert "stale" in (page.locator("body").get_attribute("class") or "")
        engine = ScriptedEngine(lambda _: [97])
        with running_bridge(engine, PieceTokenizer(), is_loaded=True, port=port):
            expect(page.locator("#connection")).to_have_text("live", timeout=30_000)
            expect(page.locator("#offered")).to_have_text("0")
    assert [each for each in problems if not is_expected(each)] == []


def test_what_a_server_says_never_becomes_markup(running: Browser) -> None:
    engine = ScriptedEngine(lambda _: [97])
    hostile = "<img src=x onerror=document.title='caught'>"
    problems: list[str] = []
    with (
        running_bridge(engine, PieceTokenizer()) as bridge,
        tab(running, 1600, problems) as page,
    ):
        ready = bridge.bridge._ready
        assert ready is not None
        ready.view._model = hostile
        page.goto(bridge.url + "/")
        expect(page.locator("#model")).to_have_text(hostile)
        assert page.locator("img").count() == 0
        assert page.title() == f"{hostile} · Kvasir ring"
    assert [each for each in problems if not is_expected(each)] == []
