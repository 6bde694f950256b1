"""The parts of a page: tables whose cells may hold bars, tiles of figures, findings.

Bars stand in tables: their numbers can be read, sorted and heard, and fit a narrow screen. A curve
has a table or a sentence beside it. All text is escaped here, as names and failures come from the
host.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphrt.observe.findings import Finding

Pieces = Sequence[tuple[str, float, str]]
"""A bar: (class, share of the width, in words) of each of its pieces."""


@dataclass(frozen=True)
class Cell:
    """A cell: its text, the number it sorts by, its class, smaller text below it, and a bar."""

    text: str = ""
    number: float | None = None
    css: str = ""
    title: str = ""
    below: str = ""
    bar: Pieces = ()


def escaped(text: object) -> str:
    return html.escape(str(text), quote=True)


def table(
    label: str,
    heads: Sequence[tuple[str, str]],
    rows: Iterable[Sequence[Cell]],
    *,
    sortable: bool = False,
) -> str:
    """A table of (title, class) columns; the first cell of a row is its head."""
    first = "".join(_head(title, css, sortable=sortable) for title, css in heads)
    body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="group" aria-label="{escaped(label)}" tabindex="0">'
        f"<table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _head(title: str, css: str, *, sortable: bool) -> str:
    if not title:
        return f'<td class="{escaped(css)}"></td>'
    inner = escaped(title)
    if sortable:
        inner = f'<button class="sort" type="button">{inner}</button>'
    return f'<th scope="col" class="{escaped(css)}">{inner}</th>'


def _row(row: Sequence[Cell]) -> str:
    return "".join(_cell(cell, "td" if at else "th") for at, cell in enumerate(row))


def _cell(cell: Cell, tag: str) -> str:
    attributes = ' scope="row"' if tag == "th" else ""
    if cell.number is not None:
        attributes += f' data-v="{cell.number:.9g}"'
    if cell.title:
        attributes += f' title="{escaped(cell.title)}"'
    text = escaped(cell.text)
    if cell.below:
        text += f"<small>{escaped(cell.below)}</small>"
    if cell.bar:
        text += _bar(cell.bar)
    return f'<{tag} class="{escaped(cell.css)}"{attributes}>{text}</{tag}>'


def _bar(pieces: Pieces) -> str:
    # Drawn, as the page's policy allows no style in an element.
    rects, at = [], 0.0
    for css, share, title in pieces:
        width = 100 * max(0.0, min(share, 1.0))
        rects.append(
            f'<rect class="{escaped(css)}" x="{at:.2f}" width="{width:.2f}" height="1">'
            f"<title>{escaped(title)}</title></rect>"
        )
        at += width
    return (
        '<div class="track" aria-hidden="true"><svg viewBox="0 0 100 1" preserveAspectRatio="none">'
        f"{''.join(rects)}</svg></div>"
    )


Points = Sequence[tuple[float, float, str]]
"""A curve: how far right and how high each of its points is, 0 to 1, and what it is in words."""

_LEAST_GAP = 0.09
"""Names below a curve that are nearer to one another than this part of its width would touch."""


def curves(
    label: str,
    lines: Iterable[tuple[str, Points]],
    below: Iterable[tuple[float, str]],
    heights: Sequence[str],
) -> str:
    """A drawing of (class, curve) pairs. `below` names places from the left to the right, of which
    the last one is shown and those that there is room for; `heights` are the values at the bottom,
    at the middle and at the top. Text and dots have the same size at every width."""
    parts = []
    for high, text in enumerate(heights):
        y = _down(high / (len(heights) - 1))
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="-10" y="{y}" dy="4">{escaped(text)}</text>')
    shown = 2.0
    for right, text in reversed([*below]):
        if shown - right >= _LEAST_GAP:
            parts.append(f'<text class="below" x="{_across(right)}" y="98%">{escaped(text)}</text>')
            shown = right
    for css, points in lines:
        at = [(_across(right), _down(high), title) for right, high, title in points]
        for (x1, y1, _), (x2, y2, _) in pairwise(at):
            parts.append(f'<line class="{css}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')
        for x, y, title in at:
            parts.append(
                f'<circle class="{css}" cx="{x}" cy="{y}" r="3.5">'
                f"<title>{escaped(title)}</title></circle>"
            )
    drawn = "".join(parts)
    return f'<svg class="curves" role="img" aria-label="{escaped(label)}">{drawn}</svg>'


def _across(right: float) -> str:
    return f"{100 * right:.2f}%"


def _down(high: float) -> str:
    return f"{86 - 74 * max(0.0, min(high, 1.0)):.2f}%"


def keys(*named: tuple[str, str]) -> str:
    """The legend of bars: (class, what it is)."""
    each = "".join(
        f'<span class="key"><i class="{escaped(css)}"></i>{escaped(name)}</span>'
        for css, name in named
    )
    return f'<p class="soft">{each}</p>'


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Figures that count most: (name, value, remark)."""
    each = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}"
        + (f"<small>{escaped(remark)}</small>" if remark else "")
        + "</dd></div>"
        for name, value, remark in figures
    )
    return f'<dl class="tiles">{each}</dl>'


_LEVELS = {"error": "Fault", "warning": "Costs time", "note": "Note"}


def findings(found: Sequence[Finding]) -> str:
    """The list of findings, each with what to try."""
    if not found:
        return '<p><span class="level good">Nothing stands out.</span></p>'
    each = "".join(
        f'<li class="finding {one.level}">'
        f'<span class="level {one.level}">{_LEVELS[one.level]}</span>'
        f"<strong>{escaped(one.what)}</strong>"
        f"<pre>{escaped(one.why)}</pre><p><b>Try:</b> {escaped(one.advice)}</p></li>"
        for one in found
    )
    return f'<ul class="findings">{each}</ul>'
