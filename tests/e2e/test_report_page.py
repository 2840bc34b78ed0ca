"""The report page in a browser: nothing is fetched, everything fits, sorts, zooms and answers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from kvasir_scenario.dump import to_yaml
from kvasir_scenario.load import load_text
from kvasir_sim import run
from tests.e2e.browser import (
    WIDTHS,
    chromium,
    fits,
    keep_screenshot,
    needs_chromium,
    overlaps,
    tab,
)
from tests.sim.swarm.swarms import scenario_of

pytestmark = needs_chromium
SCENARIOS = Path(__file__).parents[2] / "scenarios"
BLOCKS = "header > *, nav, main > section, footer, .tiles > div, .plot, .scroll"
LETTERS = ".plot .xtick text, .plot .ytick text, .plot .legendtext"

INJECT = """() => {
  const script = document.createElement("script");
  script.textContent = "window.caught = true";
  document.body.append(script);
  return window.caught || null;
}"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ring of four stages with its variants, over 20 s instead of 300."""
    out = tmp_path_factory.mktemp("runs") / "ring"
    run(SCENARIOS / "4stage.yaml", out, overrides=["workload.requests=120"], plots=True)
    return out


@pytest.fixture(scope="module")
def swarm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small swarm beside a ring, and the ring alone."""
    out = tmp_path_factory.mktemp("runs") / "swarm"
    text = to_yaml(scenario_of())
    alone = "what_if: {alone: {experts.workers: []}}"
    run(load_text(text.replace("what_if: {}", alone)), out, plots=True, processes=0)
    return out


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def opened(page: Page, path: Path) -> list[str]:
    """Opens the file and waits for its plots; returns the addresses that were asked for."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn === 'yes'")
    return [url for url in asked if not url.startswith("data:")]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["run", "swarm"])
def test_the_page_fits_and_nothing_overlaps_and_nothing_is_fetched(
    running: Browser, request: pytest.FixtureRequest, kind: str, width: int
) -> None:
    path: Path = request.getfixturevalue(f"{kind}_dir") / "report.html"
    problems: list[str] = []
    with tab(running, width, problems) as page:
        asked = opened(page, path)
        keep_screenshot(page, f"report_{'page' if kind == 'run' else kind}_{width}", 4200)
        assert asked == [path.as_uri()]
        assert page.locator("#elastic .plot .main-svg").count() == (3 if kind == "swarm" else 0)
        assert problems == []
        assert fits(page)
        assert overlaps(page, BLOCKS) == []
        assert overlaps(page, LETTERS) == []
        assert page.locator(".plot .main-svg").count() > 6
        offered = page.locator(".modebar-btn").evaluate_all("all => all.map(b => b.dataset.title)")
        assert "Zoom in" in offered
        assert not [title for title in offered if "hare" in title or "dit" in title]


def test_the_page_can_be_used(running: Browser, run_dir: Path) -> None:
    problems: list[str] = []
    with tab(running, 1600, problems) as page:
        opened(page, run_dir / "report.html")
        # A table sorts, by number, both ways.
        heads = page.locator("#what-if th button")
        tokens = page.locator("#what-if tbody td:nth-child(3)")
        heads.nth(2).click()
        rising = [float(text.replace(",", "")) for text in tokens.all_inner_texts()]
        heads.nth(2).click()
        falling = [float(text.replace(",", "")) for text in tokens.all_inner_texts()]
        assert len(set(rising)) > 1
        assert rising == sorted(rising)
        assert falling == rising[::-1]
        # A micro-batch of the timeline says what it is.
        plot = page.locator("#timeline .plot")
        plot.scroll_into_view_if_needed()
        box = page.locator("#timeline .nsewdrag").bounding_box()
        assert box is not None
        said = page.locator("#timeline .hoverlayer .hovertext").first
        for share in (0.5, 0.52, 0.54, 0.56):  # A gap between two bars has nothing to say.
            page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 8, steps=3)
            page.wait_for_timeout(200)
            if said.count():
                break
        text = said.text_content() or ""
        for part in ("micro-batch", "rows", "request", "stopped by"):
            assert part in text
        # Dragging over it zooms in.
        view = "document.querySelector('#timeline .plot')._fullLayout.xaxis.range.map(Number)"
        before = page.evaluate(view)
        page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"], steps=5)
        page.mouse.up()
        page.wait_for_function(f"({view})[0] > {before[0]}")
        after = page.evaluate(view)
        assert after[1] - after[0] == pytest.approx(0.2 * (before[1] - before[0]), rel=0.1)
        assert problems == []


def test_the_page_prints_on_paper_that_is_narrower_than_a_screen(
    running: Browser, run_dir: Path
) -> None:
    problems: list[str] = []
    with tab(running, 680, problems) as page:
        opened(page, run_dir / "report.html")
        page.emulate_media(media="print")
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        assert fits(page)
        assert not page.locator("nav").is_visible()
        assert page.pdf(format="A4").startswith(b"%PDF")
        assert problems == []


def test_hostile_names_stay_words(running: Browser, run_dir: Path, tmp_path: Path) -> None:
    from kvasir_scenario.compare import read_run
    from kvasir_scenario.page import write_page

    hostile = "</script><img src=x onerror=document.title='caught'><b>&amp;"
    copy = tmp_path / "hostile"
    shutil.copytree(run_dir, copy)
    report = read_run(copy).report
    variant = report.variants[0].model_copy(update={"name": hostile})
    report = report.model_copy(update={"name": hostile, "notes": [hostile], "variants": [variant]})
    write_page(copy, report)
    problems: list[str] = []
    with tab(running, 1600, problems) as page:
        opened(page, copy / "report.html")
        assert page.title() == f"{hostile} (simulated)"
        assert page.locator("img").count() == 0
        assert hostile in page.locator("#what-if tbody").inner_text()
        labels = page.locator("#limits .ytick text").all_text_contents()
        assert any("onerror" in label for label in labels)  # As letters of a label.
        assert problems == []
        assert page.evaluate(INJECT) is None  # Nor would a script run that found its way in.
        assert "Content Security Policy" in problems[0]
