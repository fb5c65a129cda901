"""A page of charts that stands alone: one file, no request to anywhere, light and dark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from heddle_dask.views.drawing.colours import DARK, LIGHT, variables
from heddle_dask.views.drawing.page_script import SCRIPT

# Not even by mistake: a browser refuses every request of such a page.
_NO_REQUESTS = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_STYLE = (
    f":root{{{variables(LIGHT)}color-scheme:light}}"
    f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{variables(DARK)}color-scheme:dark}}}}"
    f":root[data-theme=dark]{{{variables(DARK)}color-scheme:dark}}"
    f"@media print{{:root:root:root{{{variables(LIGHT)}}}.tools,.pager{{display:none!important}}"
    "section{break-inside:avoid}}"
    "body{font:14px/1.45 system-ui,sans-serif;max-width:1280px;margin:24px auto;padding:0 16px;"
    "color:var(--ink);background:var(--paper)}"
    "h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 6px}h3{font-size:15px;margin:18px 0 4px}"
    "p{margin:4px 0 8px;max-width:78em}.soft,figcaption{color:var(--soft)}figure{margin:0 0 8px;max-width:100%}"
    "figcaption{font-size:13px;max-width:78em}svg{max-width:100%;height:auto;vertical-align:middle}"
    "svg text{font:11px system-ui,sans-serif;fill:var(--ink)}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "td,th{padding:3px 10px;text-align:right;border-bottom:1px solid var(--grid);vertical-align:top}"
    "th{font-weight:600;color:var(--soft)}td.text,th.text,td:first-child,th:first-child{text-align:left}"
    ".scroll{overflow-x:auto}.side{display:flex;flex-wrap:wrap;gap:0 24px}.side>section{max-width:620px}"
    ".tiles{display:flex;flex-wrap:wrap;gap:8px;margin:14px 0}"
    ".tile{background:var(--panel);border:1px solid var(--grid);border-radius:8px;padding:8px 14px;min-width:96px}"
    ".tile b{display:block;font-size:19px;font-weight:600}.tile span{color:var(--soft);font-size:12px}"
    ".legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px}"
    ".legend i,td i{display:inline-block;width:11px;height:11px;margin-right:6px;border-radius:2px}"
    ".note{border-left:3px solid var(--c4);padding:2px 10px;background:var(--panel)}"
    ".tools{position:absolute;top:16px;right:20px;display:flex;gap:8px}"
    "button,input{font:inherit;color:var(--ink);background:var(--panel);border:1px solid var(--grid);"
    "border-radius:6px;padding:2px 10px}button{cursor:pointer}th.sorts{cursor:pointer;white-space:nowrap}"
    ".save{font-size:11px;padding:0 6px;float:right;opacity:.55}.save:hover,.save:focus{opacity:1}"
    "td:not(.text),td code{white-space:nowrap}code{font-size:12.5px}details>summary{cursor:pointer;color:var(--soft)}"
)


def page(title: str, body: str, *, rows: Mapping[str, Any] | None = None) -> str:
    """The whole page.

    Parameters
    ----------
    title
        Plain text.
    body
        HTML.
    rows
        JSON-able: `columns` and `rows` of the table with the id ``rows``, which can be sorted, searched and paged.
    """
    data = "" if rows is None else f'<script type="application/json" id="rows-data">{_json(rows)}</script>'
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_NO_REQUESTS}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        '<div class="tools"><button id="theme" type="button">light / dark</button></div>'
        f"{body}{data}<script>{SCRIPT}</script></body></html>\n"
    )


def figure(chart: str, caption: str = "") -> str:
    """A chart with its caption (HTML)."""
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure>{chart}{below}</figure>"


def section(title: str, *parts: str, level: int = 2) -> str:
    """A section with a heading (plain text)."""
    return f"<section><h{level}>{escape(title)}</h{level}>{''.join(parts)}</section>"


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Key figures: (name, value), plain text."""
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in figures
    )
    return f'<div class="tiles">{boxes}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    """A table of HTML cells; `texts` are the columns that are read and not compared."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if number in texts else ''}>{cell}</{tag}>"
            for number, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{line(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def _json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
