"""The notebooks as pages: pictures, tables and words can be read at the width of a phone."""

import json
from html import escape
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tests.e2e.browser import (
    WIDTHS,
    chromium,
    fits,
    keep_screenshot,
    needs_chromium,
    overlaps,
    tab,
)

pytestmark = needs_chromium
FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
FIGURE_DPI, FONT_POINTS = 110, 10  # As every notebook sets them; matplotlib's font.
LETTERS_MIN = 7.0  # CSS pixels: smaller than this nobody reads on a phone.
STYLE = """
body { max-width: 900px; margin: 0 auto; padding: 0 10px; font: 16px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
pre, .table { overflow-x: auto; background: #f5f5f5; padding: 8px; font-size: 13px; }
.table { overflow-wrap: normal; }
img { max-width: 100%; } table { border-collapse: collapse; } td, th { padding: 2px 8px; }
"""


def page_of(notebook: dict[str, Any]) -> str:
    """Cells and their outputs as a viewer shows them."""
    parts = [f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>"]
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(f"<section>{MarkdownIt().render(source)}</section>")
            continue
        parts.append(f"<pre>{escape(source)}</pre>")
        parts += [shown(output) for output in cell["outputs"]]
    return "\n".join(parts)


def shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        return f"<div class=table>{''.join(data['text/html'])}</div>"
    return f"<pre>{escape(''.join(output.get('text', data.get('text/plain', ''))))}</pre>"


@pytest.mark.parametrize("width", WIDTHS)
def test_every_notebook_can_be_read(width: int, tmp_path: Path) -> None:
    problems: list[str] = []
    with chromium() as running, tab(running, width, problems) as page:
        for name in NAMES:
            notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
            path = tmp_path / f"{name}.html"
            path.write_text(page_of(notebook))
            page.goto(path.as_uri())
            keep_screenshot(page, f"notebook_{name[:2]}_{width}", 2000)
            assert fits(page), name
            assert overlaps(page, "body > *") == [], name
            scales = page.locator("img").evaluate_all(
                "all => all.map(img => img.clientWidth / img.naturalWidth)"
            )
            letters = [scale * FONT_POINTS * FIGURE_DPI / 72 for scale in scales]
            assert len(letters) >= 2
            assert min(letters) >= LETTERS_MIN, name
    assert problems == []
