"""What objects show of themselves: one line, or in a notebook HTML, small, escaped, and without colours of its own.

A notebook's theme sets colours and fonts, light or dark; only lines and sizes are set here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

MOST_ROWS = 20
MOST_CHARACTERS = 160

_CELL = "text-align:left;padding:1px 12px 1px 0;vertical-align:top"


def named_repr(title: str, facts: Mapping[str, object]) -> str:
    """One line for `repr`: a title, and facts that are there."""
    shown = (f"{name}={value}" for name, value in facts.items() if value is not None and value != "")
    return f"<{title}: {', '.join(shown)}>"


def facts_html(title: str, facts: Mapping[str, object], *tables: str) -> str:
    """A title, a line per fact (empty ones are left out), and further HTML.

    Parameters
    ----------
    title, facts
        Plain text and values; they are escaped here.
    tables
        From `rows_html`.
    """
    shown = {name: value for name, value in facts.items() if value is not None and value != ""}
    lines = "".join(
        f'<tr style="background:none"><td style="{_CELL};opacity:.7">{escape(name)}</td>'
        f'<td style="{_CELL}">{_text(value)}</td></tr>'
        for name, value in shown.items()
    )
    return f'<div><b>{escape(title)}</b><table style="margin:2px 0">{lines}</table>{"".join(tables)}</div>'


def rows_html(head: Sequence[str], rows: Iterable[Sequence[object]], total: int | None = None) -> str:
    """A table of the first `MOST_ROWS` rows; says how many there are where more are left out."""
    shown = [row for row, _ in zip(rows, range(MOST_ROWS), strict=False)]
    heads = "".join(f'<th style="{_CELL};opacity:.7">{escape(name)}</th>' for name in head)
    lines = "".join(
        '<tr style="background:none">' + "".join(f'<td style="{_CELL}">{_text(cell)}</td>' for cell in row) + "</tr>"
        for row in shown
    )
    left = f"<p>… {total - len(shown):,} more</p>" if total is not None and total > len(shown) else ""
    return f'<table style="margin:2px 0"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>{left}'


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return escape({True: "yes", False: "no", None: ""}[value])
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return "" if value != value else f"{value:,.3f}".rstrip("0").rstrip(".")
    text = str(value)
    return escape(text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…")
