"""The figures above the panels: how far the run is, and to which line of its journal everything belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from heddle_dask.live.scheduler.dashboard import style
from heddle_dask.live.scheduler.dashboard.panel import Panel
from heddle_dask.live.scheduler.dashboard.view import View
from heddle_dask.views.history.engine_history import LIVING
from heddle_dask.views.history.reward_history import RewardView
from heddle_dask.views.history.run_snapshot import RunSnapshot

RATE_WINDOW_S = 10.0


def tokens_per_s(snapshot: RunSnapshot) -> float:
    """Generated tokens per second over the last `RATE_WINDOW_S` seconds."""
    series = snapshot.series
    since_s, since_tokens = 0.0, 0
    for at_s, tokens in zip(series.at_s, series.generated_tokens, strict=True):
        if at_s > snapshot.now_s - RATE_WINDOW_S:
            break
        since_s, since_tokens = at_s, tokens
    passed_s = snapshot.now_s - since_s
    return (snapshot.counts.generated_tokens - since_tokens) / passed_s if passed_s > 0 else 0.0


def headline_view(snapshot: RunSnapshot) -> View:
    if not snapshot.session:
        return View(
            '<div class="empty">No session is open on this cluster. A session opens when a rollout starts.</div>'
        )
    counts = snapshot.counts
    ended = sum(counts.ended.values())
    ready = [engine for engine in snapshot.engines if engine.state in LIVING]
    slots = sum(engine.slots for engine in ready)
    running = sum(min(engine.generating, engine.slots) for engine in ready)
    ahead = sum(engine.generating for engine in ready) - running
    lost = sum(engine.state == "lost" for engine in snapshot.engines)
    state = "open" if snapshot.is_open else "closed"
    others = {name: number for name, number in counts.ended.items() if name != "completed" and number}
    tiles = [
        _tile("submitted", counts.submitted, "trajectories"),
        _tile("waiting", counts.by_phase.get("admission", 0), "wait for admission"),
        _tile("live", counts.live, "live"),
        _tile(
            "ended",
            ended,
            "ended",
            ", ".join(f"{style.count(n)} {name}" for name, n in sorted(others.items())),
        ),
        _tile(
            "running",
            running,
            "steps running",
            f"of {style.count(slots)} slots{f', {style.count(ahead)} next' if ahead else ''}",
        ),
        _tile("queued", sum(e.queued for e in ready) + counts.steps_waiting, "queued"),
        _tile("steps", counts.steps, "steps finished"),
        _tile("tokens", counts.generated_tokens, "tokens", f"{style.short(tokens_per_s(snapshot))} tokens/s"),
        _tile("engines", len(ready), "engines", f"{style.count(lost)} lost" if lost else ""),
        _reward_tile(snapshot.rewards),
    ]
    title = f"{style.escape(snapshot.title)}, " if snapshot.title != snapshot.session else ""
    missing = (
        f' <span class="bad">{style.count(snapshot.lines_missing)} events are missing in these figures</span>'
        if snapshot.lines_missing
        else ""
    )
    about = (
        f'<div class="sub">{title}session {style.escape(snapshot.session)} ({state}), '
        f"strategy {style.escape(snapshot.strategy)}, {style.duration(snapshot.now_s)} since it began, journal offset "
        f'<b class="heddle-journal-offset" data-offset="{snapshot.journal_offset}">'
        f"{style.count(snapshot.journal_offset)}</b> events{missing}{_runs(snapshot)}</div>"
    )
    return View(f'<div class="tiles">{"".join(tiles)}</div>{about}')


def _runs(snapshot: RunSnapshot) -> str:
    """The runs that share the cluster; nothing for one that is alone."""
    if snapshot.only:
        return '<br>trajectories of this run alone, engines and pools of all: <a href="?">all runs</a>'
    if len(snapshot.runs) < 2:
        return ""
    told = (
        f'<a href="?run={quote(run.session)}">{style.escape(run.title)}</a> (weight {run.weight:g}, '
        f"live {style.count(run.live)}, ended {style.count(sum(run.ended.values()))} of {style.count(run.submitted)}, "
        f"held {style.count(run.held)}, {style.short(run.generated_tokens)} tokens"
        f"{_after_comma(run.rewards.line())})"
        for run in snapshot.runs
    )
    return f"<br>runs that share the cluster: {'; '.join(told)}"


def _after_comma(text: str) -> str:
    return f", {text}" if text else ""


def _reward_tile(rewards: RewardView) -> str:
    if rewards.mean is None:
        return ""
    _, _, more = rewards.line().partition(f"{rewards.mean:.3f} ")
    return (
        f'<span class="tile"><span class="n" data-figure="reward" data-value="{rewards.mean:.6g}">{rewards.mean:.3f}'
        f'</span><span class="u">reward</span><span class="more">{style.escape(more)}</span></span>'
    )


def _tile(name: str, number: int, unit: str, more: str = "") -> str:
    beside = f'<span class="more">{style.escape(more)}</span>' if more else ""
    return (
        f'<span class="tile"><span class="n" data-figure="{name}" data-value="{number}">{style.count(number)}</span>'
        f'<span class="u">{unit}</span>{beside}</span>'
    )


class Headline(Panel):
    """Figures of the run, in one line."""

    title = "Rollout"
    name = "headline"
    make = staticmethod(headline_view)

    def body(self) -> Sequence[Any]:
        return ()
