"""A headless Chromium for pages: Debian's package, driven by Playwright. Absent, tests skip."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.e2e.serving import wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: install Debian's package `chromium`"
)
LOAD_MS = 90_000  # On a crowded machine; nothing waits so long unless it fails.
expect.set_options(timeout=30_000)
WIDTHS = (400, 1600)
SCREENSHOTS = os.environ.get("KVASIR_SCREENSHOTS")
"""Where tests leave their screenshots, e.g. docs/img; by default nowhere."""

OVERLAPS = """
(selector) => {
  const boxes = Array.from(document.querySelectorAll(selector), (node) => {
    const box = node.getBoundingClientRect();
    return { name: node.tagName + " " + node.textContent.slice(0, 30),
      left: box.left, right: box.right, top: box.top, bottom: box.bottom, node };
  }).filter((box) => box.right > box.left && box.bottom > box.top);
  const found = [];
  boxes.forEach((a, index) => {
    for (const b of boxes.slice(index + 1)) {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      const nested = a.node.contains(b.node) || b.node.contains(a.node);
      if (!nested && wide > 1 && high > 1) found.push(a.name + " / " + b.name);
    }
  });
  return found;
}
"""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with no profile of its own."""
    with sync_playwright() as play:
        running = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield running
        finally:
            running.close()


@contextlib.contextmanager
def tab(running: Browser, width: int, problems: list[str]) -> Iterator[Page]:
    """An empty tab of this width; what goes wrong in it is added to `problems`."""
    context = running.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.set_default_timeout(LOAD_MS)
    page.on(
        "console",
        lambda said: problems.append(said.text) if said.type in {"error", "warning"} else None,
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    try:
        yield page
    finally:
        context.close()


def overlaps(page: Page, selector: str) -> list[str]:
    """Pairs of elements that lie over each other, neither inside the other."""
    found: list[str] = page.evaluate(OVERLAPS, selector)
    return found


def fits(page: Page) -> bool:
    """Whether nothing sticks out to the right."""
    is_fitting: bool = page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    return is_fitting


def wait_for_messages(page: Page, more: int) -> None:
    """Waits until the page has had so many more; its policy lets no test's condition run in it."""
    body = page.locator("body")
    seen = int(body.get_attribute("data-messages") or 0)
    wait_for(lambda: int(body.get_attribute("data-messages") or 0) >= seen + more, "messages")


def is_expected(problem: str) -> bool:
    """The browser itself writes a line when a server cannot be reached or refuses."""
    return (
        "ERR_CONNECTION" in problem
        or "Failed to load resource" in problem
        or ("ERR_INCOMPLETE_CHUNKED" in problem)
    )


def keep_screenshot(page: Page, name: str, height: int | None = None) -> None:
    """Saves what the tab shows where `KVASIR_SCREENSHOTS` says."""
    if SCREENSHOTS is None:
        return
    path = Path(SCREENSHOTS) / f"{name}.png"
    if height is None:
        page.screenshot(path=path, full_page=True)
    else:
        width = page.evaluate("window.innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height}
        page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
