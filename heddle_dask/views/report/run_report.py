"""The report of a stored run as one page: its views, and where each second went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from heddle_dask.views.accounts import NS_PER_S, PHASE_TITLE, Phase
from heddle_dask.views.drawing.page import page, section, table, tiles
from heddle_dask.views.report.run_charts import (
    RunAxis,
    engines_section,
    live_section,
    longest_section,
    pools_section,
    seconds_section,
    timeline_section,
)
from heddle_dask.views.report.run_events import failures_section, moves_section, predictions_section
from heddle_dask.views.report.run_figures import RunFigures

_MADE_WITH = ("environment", "model", "strategy", "samples", "seed", "heddle_dask", "distributed", "python")


@dataclass(frozen=True, slots=True)
class About:
    """What stands above the views.

    Attributes
    ----------
    tiles
        Key figures: (name, value).
    notes
        What a reader must know: recovered trajectories, a missing journal; plain text.
    """

    title: str
    tiles: Sequence[tuple[str, str]]
    metadata: Mapping[str, Any]
    notes: Sequence[str] = ()


def run_report(figures: RunFigures, about: About) -> str:
    axis = RunAxis(figures)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in (*about.notes, *unknown_notes(figures)))
    body = (
        f"<h1>{escape(about.title)}</h1>{_made_with(about.metadata)}{tiles(about.tiles)}{notes}"
        f"{seconds_section(figures)}{longest_section(figures)}{timeline_section(figures, axis)}"
        f"{live_section(figures, axis)}{engines_section(figures, axis)}{predictions_section(figures)}"
        f"{pools_section(figures, axis)}{failures_section(figures)}{moves_section(figures, axis)}"
        f"{_all_section(figures)}{_conditions(about.metadata)}"
    )
    return page(f"{about.title}: report", body, rows=_rows(figures))


def unknown_notes(figures: RunFigures) -> list[str]:
    """What the figures cannot tell, in sentences."""
    notes = []
    total = len(figures.rows)
    if figures.admission_unknown:
        notes.append(
            f"The wait for admission is unknown for {figures.admission_unknown:,} of {total:,} trajectories: "
            "the journal does not tell it, so their time is counted from the start of their program."
        )
    if figures.waits_unknown:
        notes.append(
            f"Moves and lost attempts are unknown for {figures.waits_unknown:,} of {total:,} trajectories: "
            f"the waits for them are in “{PHASE_TITLE[Phase.LLM_QUEUE]}” and “{PHASE_TITLE[Phase.DRIVER]}”."
        )
    unplaced = sum(row.session is None for row in figures.rows)
    if unplaced:
        notes.append(
            f"{unplaced:,} trajectories are not drawn over time: several sessions wrote this run, each with a clock of "
            "its own, and nothing says which session they are of."
        )
    if figures.totals_ns[Phase.GENERATION]:
        notes.append("Some engines do not report prefill and decode: their steps are not split.")
    if figures.earlier_s:
        notes.append(
            f"{figures.earlier_s:,.0f} s of steps and actions were done in an earlier session and taken from the "
            "journal when the run was resumed; they are in no duration."
        )
    missing = sum(session.missing for session in figures.sessions)
    if missing:
        notes.append(f"The journal lacks {missing:,} events of the controller: what they told is missing here.")
    return notes


def totals_json(figures: RunFigures) -> dict[str, Any]:
    """Where the seconds of all trajectories went: the object ``seconds`` of ``heddle show --json``."""
    return {
        "total_s": round(sum(figures.totals_ns.values()) / NS_PER_S, 6),
        **{f"{phase.value}_s": round(figures.totals_ns[phase] / NS_PER_S, 6) for phase in PHASE_TITLE},
        "earlier_sessions_s": round(figures.earlier_s, 6),
        "admission_unknown": figures.admission_unknown,
        "waits_unknown": figures.waits_unknown,
    }


def _made_with(metadata: Mapping[str, Any]) -> str:
    known = {name: metadata[name] for name in _MADE_WITH if metadata.get(name) not in (None, "")}
    if "model" in known:
        # The whole path is among the conditions; above the views it would say more of the machine than of the run.
        known["model"] = "/".join(str(known["model"]).rstrip("/").split("/")[-2:])
    said = " · ".join(f"{name} {value}" for name, value in known.items())
    return f'<p class="soft">{escape(said)}</p>'


def _all_section(figures: RunFigures) -> str:
    if not figures.rows:
        return ""
    return section(
        "All trajectories",
        "<p>Seconds, of each trajectory from its submission to its end. A click on a heading sorts.</p>"
        '<div class="pager"><input id="rows-search" type="search" placeholder="id, status, cause" '
        'aria-label="Search trajectories"> <button id="rows-before" type="button">&lsaquo;</button> '
        '<button id="rows-after" type="button">&rsaquo;</button> <span id="rows-count" class="soft"></span></div>'
        '<div class="scroll"><table id="rows"><thead><tr></tr></thead><tbody></tbody></table></div>',
    )


def _rows(figures: RunFigures) -> Mapping[str, Any] | None:
    if not figures.rows:
        return None
    order = list(Phase)
    used = [phase for phase in PHASE_TITLE if figures.totals_ns[phase]]
    places = [order.index(phase) for phase in used]
    columns: list[dict[str, Any]] = [
        *({"name": name, "text": True} for name in ("trajectory", "status", "cause")),
        {"name": "reward", "digits": 3},
        {"name": "seconds", "digits": 2},
        *({"name": PHASE_TITLE[phase], "digits": 2} for phase in used),
        *({"name": name, "digits": 0} for name in ("tokens", "steps", "actions", "preempted", "moved")),
    ]
    rows = [
        [
            *(row.trajectory_id, row.status, row.cause, row.reward),
            round(row.duration_ns / NS_PER_S, 3),
            *(round(row.phases_ns[place] / NS_PER_S, 3) for place in places),
            *(row.tokens, row.steps, row.actions, row.preemptions, row.migrations),
        ]
        for row in sorted(figures.rows, key=lambda row: -row.duration_ns)
    ]
    return {"columns": columns, "rows": rows}


def _conditions(metadata: Mapping[str, Any]) -> str:
    rows = [
        [f"<code>{escape(str(name))}</code>", f"<code>{escape(_plain(value))}</code>"]
        for name, value in sorted(metadata.items())
        if name != "batch_facts"
    ]
    shown = table(["name", "value"], rows, texts=(0, 1))
    return section("Conditions", f"<details><summary>metadata of the run</summary>{shown}</details>")


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
