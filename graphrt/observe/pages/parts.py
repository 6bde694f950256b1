"""The parts of a page: tables whose cells may hold bars, tiles of figures, findings.

A chart is a table: its numbers can be read, sorted and heard, and it fits a narrow screen. All text
is escaped here, as names and failures come from the host.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
