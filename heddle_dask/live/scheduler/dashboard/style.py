"""Colours, numbers as text, and the style of all panels.

No two phases have the same luminance: the page can be read in grey, too. Glyphs that mean the same have the same
colour in every panel.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from heddle_dask.views.history import phases

PHASE_COLOURS = {
    "admission": "#E6E3DE",
    "tool queue": "#C9DB8F",
    "quota": "#9CCBE3",
    "driver": "#AFB4BA",
    "llm queue": "#EB8F34",
    "service load": "#968FD6",
    "tool": "#3B9461",
    "reward": "#B0487A",
    "generating": "#1B5597",
    "migration": "#35104A",
}
"""By phase, from light to dark."""

GENERATING = PHASE_COLOURS["generating"]
QUEUED = PHASE_COLOURS["llm queue"]
RUNNING_TOOL = PHASE_COLOURS["tool"]
MOVE = PHASE_COLOURS["migration"]
FREE = "#ECEFF2"
EDGE = "#9AA3AD"
TEXT = "#22272E"
QUIET = "#5B6570"
FAILURE = "#B3261E"
ENDED = "#7B8794"
LIVE = "#A9C4E4"
FONT = "Helvetica, Arial, sans-serif"

PHASE_LABELS = {name: name for name in phases.PHASES} | {"llm queue": "LLM queue"}

CSS = f"""
:host {{ font-family: {FONT}; color: {TEXT}; font-size: 12.5px; line-height: 1.4; }}
:host > div {{ width: 100%; }}
h2 {{ font-size: 15px; margin: 0; font-weight: 600; display: inline; }}
.sub {{ color: {QUIET}; }}
.sub b {{ color: {TEXT}; font-weight: 600; font-variant-numeric: tabular-nums; }}
.chips {{ color: {QUIET}; }}
.chip {{ display: inline-block; white-space: nowrap; margin-right: 10px; }}
.chip i {{ display: inline-block; width: 10px; height: 10px; margin-right: 4px; border-radius: 2px;
           border: 1px solid rgba(0, 0, 0, 0.25); box-sizing: border-box; vertical-align: -1px; }}
.chip i.line {{ height: 0; border: 0; border-top: 2px dashed {TEXT}; vertical-align: 3px; border-radius: 0;
                width: 14px; }}
.chip i.ring {{ border-radius: 50%; background: none; border: 2px solid; }}
.chip i.dot {{ border-radius: 50%; }}
.empty {{ color: {QUIET}; font-style: italic; padding: 8px 0; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th {{ text-align: right; font-weight: 600; color: {QUIET}; padding: 2px 0 2px 12px; border-bottom: 1px solid #D5DAE0;
      white-space: nowrap; position: sticky; top: 0; background: #FAFAFA; }}
td {{ text-align: right; padding: 2px 0 2px 12px; white-space: nowrap; border-bottom: 1px solid #ECEFF2; }}
th.text, td.text {{ text-align: left; padding: 2px 12px 2px 0; }}
td.wide {{ width: 99%; max-width: 0; }}
td.wide, td.wide div {{ overflow: hidden; text-overflow: ellipsis; }}
td.bar {{ min-width: 90px; padding-left: 8px; }}
td.bar i {{ display: inline-block; height: 10px; border-radius: 2px; vertical-align: -1px; }}
.bad {{ color: {FAILURE}; font-weight: 600; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: 4px 26px; align-items: baseline; }}
.tile {{ white-space: nowrap; }}
.tile .n {{ font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; }}
.tile .u {{ color: {QUIET}; margin-left: 4px; }}
.tile .more {{ color: {QUIET}; margin-left: 6px; }}
"""


def escape(text: str) -> str:
    return html.escape(text, quote=True)


def chip(colour: str, label: str, shape: str = "") -> str:
    """One entry of a legend; `shape`: ``line``, ``dot``, ``ring``, or a square."""
    if shape == "line":
        drawn = '<i class="line"></i>'
    elif shape == "ring":
        drawn = f'<i class="ring" style="border-color:{colour}"></i>'
    else:
        drawn = f'<i class="{shape}" style="background:{colour}"></i>'
    return f'<span class="chip">{drawn}{escape(label)}</span>'


def phase_chips(names: Iterable[str]) -> str:
    return "".join(chip(PHASE_COLOURS[name], PHASE_LABELS[name]) for name in names)


def count(number: int | float) -> str:
    """A whole number with separators of thousands."""
    return f"{number:,.0f}"


def short(number: float) -> str:
    """A number in three digits: 9,500, 12.3 k, 4.56 M."""
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    for unit, size in (("k", 1e3), ("M", 1e6)):
        if abs(number) < 999.5 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e9:.3g} G"


def duration(seconds: float) -> str:
    """Seconds as text: 0.42 s, 12.3 s, 4 min 05 s, 3 h 12 min."""
    if seconds < 0.9995:
        return f"{seconds:.2g} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def plural(number: int, one: str, many: str = "") -> str:
    """``1 engine``, ``3 engines``."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def elide(names: Iterable[str], longest: int = 26) -> list[str]:
    """Names of at most so many characters, the middle left out; a name stays whole where two would be equal."""
    whole = list(names)
    half = (longest - 1) // 2
    cut = [name if len(name) <= longest else f"{name[:half]}…{name[-half:]}" for name in whole]
    seen: dict[str, int] = {}
    for name in cut:
        seen[name] = seen.get(name, 0) + 1
    return [long if seen[name] > 1 else name for long, name in zip(whole, cut, strict=True)]
