"""A page of charts that stands alone: one file, no request to anywhere, light and dark.

Its script switches the theme, saves a chart as SVG, and sorts, searches and pages a table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from heddle_dask.views.drawing.colours import DARK, LIGHT, variables

SCRIPT = """
(() => {
  const root = document.documentElement;
  document.getElementById("theme").onclick = () => {
    const wanted = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const dark = (root.dataset.theme || wanted) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
  };
  for (const figure of document.querySelectorAll("figure")) {
    const chart = figure.querySelector("svg");
    if (!chart) continue;
    const button = document.createElement("button");
    button.className = "save tools-save"; button.type = "button"; button.textContent = "SVG";
    button.title = "Save this chart as an SVG file, in the light colours";
    button.onclick = () => {
      const before = root.dataset.theme; root.dataset.theme = "light";
      const style = getComputedStyle(root);
      const value = (_, name) => style.getPropertyValue(name).trim();
      const text = chart.outerHTML.replace(/var\\((--[\\w-]+),[^)]*\\)/g, value)
        .replace(">", '><style>text{font:11px sans-serif;fill:' + style.getPropertyValue("--ink") + '}</style>');
      if (before) root.dataset.theme = before; else delete root.dataset.theme;
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], {type: "image/svg+xml"}));
      const heading = figure.closest("section")?.querySelector("h2,h3");
      link.download = (heading ? heading.textContent : "chart").toLowerCase().replace(/[^a-z0-9]+/g, "-") + ".svg";
      link.click();
    };
    figure.prepend(button);
  }
  const data = document.getElementById("rows-data");
  if (!data) return;
  const {columns, rows} = JSON.parse(data.textContent);
  const place = document.getElementById("rows"), size = 25;
  let shown = rows, from = 0, by = -1, down = true;
  const head = place.querySelector("thead tr"), body = place.querySelector("tbody");
  const count = document.getElementById("rows-count"), search = document.getElementById("rows-search");
  const cell = (value, column) => {
    const td = document.createElement("td");
    if (column.text) td.className = "text";
    td.textContent = value === null ? "" : column.text ? value
      : value.toLocaleString("en", {minimumFractionDigits: column.digits, maximumFractionDigits: column.digits});
    return td;
  };
  const draw = () => {
    body.replaceChildren(...shown.slice(from, from + size).map(row => {
      const tr = document.createElement("tr");
      tr.append(...row.map((value, i) => cell(value, columns[i])));
      return tr;
    }));
    const last = Math.min(from + size, shown.length);
    count.textContent = shown.length ? `${from + 1} to ${last} of ${shown.length}` : "none";
  };
  columns.forEach((column, i) => {
    const th = document.createElement("th");
    th.textContent = column.name; th.className = column.text ? "sorts text" : "sorts"; th.tabIndex = 0;
    th.onclick = () => {
      down = by === i ? !down : !column.text; by = i; from = 0;
      const sign = down ? -1 : 1;
      const order = (x, y) => x === y ? 0 : x === null ? 1 : y === null ? -1 : x < y ? -sign : sign;
      shown = [...shown].sort((a, b) => order(a[i], b[i]));
      for (const other of head.children) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", down ? "descending" : "ascending");
      draw();
    };
    th.onkeydown = event => { if (event.key === "Enter") th.click(); };
    head.append(th);
  });
  search.oninput = () => {
    const words = search.value.toLowerCase();
    const has = value => String(value ?? "").toLowerCase().includes(words);
    shown = rows.filter(row => row.some((value, i) => columns[i].text && has(value)));
    from = 0; draw();
  };
  document.getElementById("rows-before").onclick = () => { from = Math.max(0, from - size); draw(); };
  document.getElementById("rows-after").onclick = () => { if (from + size < shown.length) from += size; draw(); };
  draw();
})();
"""


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
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure>{chart}{below}</figure>"


def section(title: str, *parts: str, level: int = 2) -> str:
    """A section with a heading (plain text)."""
    return f"<section><h{level}>{escape(title)}</h{level}>{''.join(parts)}</section>"


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Key figures: (name, value), plain text."""
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in figures
    )
    return f'<div class="tiles">{boxes}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    """A table of HTML cells; `texts` are the columns that are read and not compared."""
    assert all(len(row) == len(head) for row in rows), head

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if number in texts else ''}>{cell}</{tag}>" for number, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{line(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def _json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
