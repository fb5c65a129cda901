"""An evaluation as one page: the arms in figures, and side by side at each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from heddle_dask.evaluation.estimates import EvaluatedArm, TaskOutcome, arm_difference
from heddle_dask.evaluation.figures_text import per_attempt_texts, reward_interval_text, share_text
from heddle_dask.records.causes import CauseCount
from heddle_dask.views.drawing.page import page, section, table

_MOST_CAUSES = 2


def comparison_page(title: str, arms: Sequence[EvaluatedArm], passed_from: float) -> str:
    """The page; its table of tasks can be sorted by any arm, or by how far the arms are apart."""
    ks = sorted({k for arm in arms for k in arm.overall.pass_at})
    body = (
        f"<h1>{escape(title)}</h1>"
        f'<p class="soft">An attempt has passed with a reward of {passed_from:g} or more. Figures are means over '
        "tasks, with 95 % intervals over resampled tasks. Attempts that the infrastructure has ended are no samples; "
        "unknown rewards are in no figure.</p>"
        f"{section('Arms', _arms(arms, ks))}{_differences(arms)}{_domains(arms, ks)}"
        f"{section('Costs of an attempt', _costs(arms))}{_failures(arms)}{_tasks_section()}"
    )
    return page(f"{title}: evaluation", body, rows=_rows(arms))


def _arms(arms: Sequence[EvaluatedArm], ks: Sequence[int]) -> str:
    head = ["arm", "tasks", "samples", *(f"pass@{k} %" for k in ks), "mean reward", "unknown", "infrastructure"]
    rows = []
    for arm in arms:
        figures = arm.overall
        passes = [share_text(figures.pass_at.get(k)) for k in ks]
        apart = [f"{figures.unknown}", f"{figures.infrastructure}"]
        counts = [f"{figures.tasks}", f"{figures.samples}"]
        rows.append([escape(arm.name), *counts, *passes, reward_interval_text(figures.reward), *apart])
    return table(head, rows)


def _differences(arms: Sequence[EvaluatedArm]) -> str:
    rows = []
    for arm in arms[1:]:
        found = arm_difference(arms[0], arm)
        if found is not None:
            rows.append([escape(arm.name), share_text(found[0]), f"{found[1]}"])
    if not rows:
        return ""
    what = f"Pass@1 less that of {arms[0].name}, paired by task"
    return section(what, table(["arm", "difference in points", "tasks of both"], rows))


def _domains(arms: Sequence[EvaluatedArm], ks: Sequence[int]) -> str:
    rows = [
        [escape(domain or "other"), escape(arm.name), f"{each.tasks}", *(share_text(each.pass_at.get(k)) for k in ks)]
        for domain in sorted({name for arm in arms for name in arm.by_domain})
        for arm in arms
        for each in [arm.by_domain.get(domain)]
        if each is not None
    ]
    head = ["domain", "arm", "tasks", *(f"pass@{k} %" for k in ks)]
    return section("By domain", table(head, rows, texts=(1,))) if rows else ""


def _costs(arms: Sequence[EvaluatedArm]) -> str:
    head = ["arm", "attempts", *per_attempt_texts(arms[0].costs)]
    return table(head, [[escape(a.name), f"{a.costs.attempts}", *per_attempt_texts(a.costs).values()] for a in arms])


def _failures(arms: Sequence[EvaluatedArm]) -> str:
    rows = [
        [
            escape(arm.name),
            whose,
            f"{row.count}",
            escape(row.title),
            escape(f"{row.first_trajectory}: {row.first_message}"),
        ]
        for arm in arms
        for whose, found in (
            ("agent", arm.of_the_agent),
            ("infrastructure", arm.of_the_infrastructure),
            ("reward", arm.of_the_reward),
        )
        for row in found
    ]
    if not rows:
        return ""
    return section("Early ends", table(["arm", "whose", "number", "cause", "the first"], rows, texts=(1, 3, 4)))


def _tasks_section() -> str:
    return section(
        "Task by task",
        "<p>Share of samples that passed, for each arm; then the rest of each. A click on a heading sorts; “apart” is "
        "the distance between the best and the worst arm.</p>"
        '<div class="pager"><input id="rows-search" type="search" placeholder="task, domain, cause" '
        'aria-label="Search tasks"> <button id="rows-before" type="button">&lsaquo;</button> '
        '<button id="rows-after" type="button">&rsaquo;</button> <span id="rows-count" class="soft"></span></div>'
        '<div class="scroll"><table id="rows"><thead><tr></tr></thead><tbody></tbody></table></div>',
    )


def _rows(arms: Sequence[EvaluatedArm]) -> Mapping[str, Any]:
    """Pass rates of all arms beside each other, then the rest of each."""
    columns: list[dict[str, Any]] = [{"name": "task", "text": True}, {"name": "domain", "text": True}]
    if len(arms) > 1:
        columns.append({"name": "apart", "digits": 2})
    columns += [{"name": arm.name, "digits": 2} for arm in arms]
    for arm in arms:
        columns += [
            {"name": f"{arm.name}: samples", "digits": 0},
            {"name": "reward", "digits": 3},
            {"name": "tokens", "digits": 0},
            {"name": "wall s", "digits": 1},
            {"name": "early ends", "text": True},
        ]
    rows = []
    for name in sorted({task for arm in arms for task in arm.tasks}):
        found = [arm.tasks.get(name) for arm in arms]
        domain = next(task.domain for task in found if task is not None)
        rates = [None if task is None else task.pass_rate for task in found]
        apart = [_apart(rates)] if len(arms) > 1 else []
        rows.append([name, domain, *apart, *rates, *(cell for task in found for cell in _cells(task))])
    return {"columns": columns, "rows": rows}


def _cells(task: TaskOutcome | None) -> list[Any]:
    if task is None:
        return [None, None, None, None, ""]
    causes = ", ".join(map(_cause_text, task.causes[:_MOST_CAUSES]))
    return [task.samples, task.reward, task.generated_tokens, task.wall_s, causes]


def _cause_text(row: CauseCount) -> str:
    return f"{row.count} {row.title}"


def _apart(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return max(known) - min(known) if len(known) > 1 else None
