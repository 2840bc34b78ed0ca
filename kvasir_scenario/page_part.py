"""What a report page is put together from: tables and drawings, with everything escaped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from kvasir_scenario.tables import Floats
from kvasir_scenario.wording import UNDEFINED

DIGITS = 7  # Of numbers in drawings: far below a pixel, and half the bytes.


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: what is read, and what its column is sorted by (None goes last)."""

    text: str
    key: float | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table that sorts by any column."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    anchor: str = ""

    def html(self) -> str:
        first = self.rows[0] if self.rows else [Cell("")] * len(self.columns)
        heads = "".join(
            f"<th scope=col{' class=word' if isinstance(cell.key, str) else ''}>"
            f"<button type=button>{escape(name)}</button></th>"
            for name, cell in zip(self.columns, first, strict=True)
        )
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows)
        note = f"<p class=note>{escape(self.note)}</p>" if self.note else ""
        return (
            f"<section id={self.anchor}><h2>{escape(self.heading)}</h2>{note}"
            f'<div class=scroll tabindex=0 role=region aria-label="{escape(self.heading)}">'
            f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div></section>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One interactive plot: traces and layout as the plotting library reads them."""

    anchor: str
    heading: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 320
    notes: Sequence[str] = field(default=())

    def html(self) -> str:
        notes = "".join(f"<p class=note>{escape(note)}</p>" for note in self.notes)
        return (
            f"<section id={self.anchor}><h2>{escape(self.heading)}</h2>"
            f"<p class=note>{escape(self.caption)}</p>{notes}"
            f'<div class=plot data-drawing="{self.anchor}" role=img '
            f'aria-label="{escape(self.heading)}" data-height={self.height} '
            f'style="min-height:{self.height}px"></div></section>'
        )


def _cell(cell: Cell) -> str:
    key = cell.key
    if isinstance(key, str):
        return f'<td class=word data-key="{escape(key)}">{escape(cell.text)}</td>'
    found = "" if key is None else f' data-key="{key:.12g}"'
    return f"<td{found}>{escape(cell.text)}</td>"


def word(text: str) -> Cell:
    return Cell(text, text)


def count(value: float | None) -> Cell:
    if value is None:
        return Cell(UNDEFINED)
    return Cell(f"{value:,}" if isinstance(value, int) else f"{value:,.4g}", value)


def share(value: float | None) -> Cell:
    return Cell(UNDEFINED if value is None else f"{value:.1%}", value)


def number(value: float | None) -> float | None:
    """A number of a drawing; what is undefined is a gap."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def numbers(values: Floats) -> list[float | None]:
    return [number(value) for value in values.tolist()]
