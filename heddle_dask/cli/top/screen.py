"""A snapshot as text for a terminal: legible at 80 columns, with ten trajectories and with ten thousand.

It reads the JSON form, as it comes from the scheduler. Everything that a user named is printed without control
characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from heddle_dask.core.run_record import plain_name
from heddle_dask.live.driver.runs.progress import duration
from heddle_dask.views.history.engine_history import LIVING
from heddle_dask.views.history.reward_history import RewardView
from heddle_dask.views.history.run_shares import title_of

PHASE_STYLES: Final = {
    "admission": "bright_black",
    "driver": "white",
    "llm queue": "yellow",
    "generating": "green",
    "tool queue": "magenta",
    "quota": "bright_magenta",
    "service load": "bright_yellow",
    "tool": "blue",
    "reward": "cyan",
    "migration": "red",
}
RATE_WINDOW_S: Final = 10.0
WIDTH: Final = 80
_BARS: Final = " ▁▂▃▄▅▆▇█"
_LEAST_ROWS: Final = 3
_MOST_RUNS: Final = 4
_ENGINE_COLUMNS: Final = ("engine", "state", "TP", "slots", "running", "next", "queued", "KV", "steps")

Snapshot = Mapping[str, Any]


def screen(snapshot: Snapshot, height: int, width: int = WIDTH, note: str = "") -> RenderableType:
    """The snapshot in at most `height` lines, if these are at least 20."""
    side = [*_failures(snapshot["failures"], width), *_actions(snapshot, width), *_moves(snapshot, width)]
    head = _head(snapshot, width)
    left = max(2 * (_LEAST_ROWS + 2), height - len(head) - 1 - len(side) - (1 if note else 0))
    living = [engine for engine in snapshot["engines"] if engine["state"] in LIVING]
    # A heading and a line for those left out per table; engines get at most half of the room.
    engine_rows = min(len(living), max(_LEAST_ROWS, left // 2 - 2))
    lane_rows = max(_LEAST_ROWS, left - engine_rows - 4)
    parts: list[RenderableType] = [Text(note, style="bold red")] if note else []
    parts += head
    parts += _engines(snapshot, living, engine_rows)
    parts += _longest(snapshot, lane_rows, width)
    parts += side
    return Group(*parts)


def _line(text: str, width: int, style: str = "") -> Text:
    line = Text(clean(text), style=style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def clean(text: str) -> str:
    """The text in printable characters: a name that a user chose must not steer the terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shortened(text: str, width: int) -> str:
    """The text in at most `width` characters; the middle goes, since ids differ at both ends."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"


def _runs(snapshot: Snapshot, width: int) -> list[Text]:
    """The runs that share the cluster; nothing for one that is alone."""
    runs = snapshot.get("runs") or []
    if len(runs) < 2:
        return []
    tokens = sum(run["generated_tokens"] for run in runs) or 1
    return [
        _line(
            f"run {title_of(run['name'] or run['session'], run['environment'])}: weight {run['weight']:g}, "
            f"live {run['live']:,}, ended {sum(run['ended'].values()):,} of {run['submitted']:,}, "
            f"held {run['held']:,}, {run['generated_tokens'] / tokens:.0%} of tokens{_reward(run, ' · ')}",
            width,
        )
        for run in runs[:_MOST_RUNS]
    ]


def _reward(shown: Mapping[str, Any], before: str) -> str:
    line = RewardView(**shown["rewards"]).line()
    return f"{before}{line}" if line else ""


def _title(snapshot: Snapshot) -> str:
    if not snapshot["session"]:
        return "no session yet"
    runs = snapshot["runs"] or [snapshot]
    if len(runs) > 1:
        return f"{len(runs)} runs"
    name = title_of(runs[0]["name"] or runs[0]["session"], runs[0]["environment"])
    return name if snapshot["is_open"] else f"{name} (ended)"


def _head(snapshot: Snapshot, width: int) -> list[Text]:
    counts = snapshot["counts"]
    ended = sum(counts["ended"].values())
    others = ", ".join(f"{status} {n:,}" for status, n in counts["ended"].items() if status != "completed")
    failed = f" ({others})" if others else ""
    rates = rates_of(snapshot)
    cached = counts["cached_tokens"] / counts["prompt_tokens"] if counts["prompt_tokens"] else 0.0
    return [
        _line(
            f"heddle top · {_title(snapshot)} · {snapshot['strategy'] or '-'} · {duration(snapshot['now_s'])}"
            f" · journal line {snapshot['journal_offset']:,}",
            width,
            "bold",
        ),
        *_runs(snapshot, width),
        _line(
            f"trajectories: live {counts['live']:,} · ended {ended:,} of {counts['submitted']:,}{failed}"
            f"{_reward(snapshot, ' · ')}",
            width,
        ),
        _phases(counts["by_phase"], width),
        _line(
            f"{rates['steps']:,.1f} steps/s · {rates['generated_tokens']:,.0f} tokens/s · steps {counts['steps']:,}"
            f" · cached {cached:.0%} of prompts · preempted {counts['preemptions']:,}, requeued {counts['requeues']:,}",
            width,
        ),
        _tail(snapshot["series"], width),
    ]


def rates_of(snapshot: Snapshot) -> dict[str, float]:
    """Steps and tokens per second over the last seconds before the picture was taken; 0 after the session."""
    series, now_s = snapshot["series"], snapshot["now_s"]
    rates = {"steps": 0.0, "generated_tokens": 0.0}
    times = series["at_s"]
    if not times or not snapshot["is_open"]:
        return rates
    # The counts at a time are those of the last sample up to it.
    then_s = max(0.0, now_s - RATE_WINDOW_S)
    before = next((i for i in range(len(times) - 1, -1, -1) if times[i] <= then_s), None)
    since_s = then_s if before is not None else times[0]
    if now_s <= since_s:
        return rates
    for name in rates:
        start = series[name][before] if before is not None else 0
        rates[name] = (series[name][-1] - start) / (now_s - since_s)
    return rates


def _phases(by_phase: Mapping[str, int], width: int) -> Text:
    line = Text(no_wrap=True)
    for phase, number in by_phase.items():
        if number:
            line.append(f"{phase} ", style="dim").append(f"{number:,}  ", style=PHASE_STYLES[phase])
    if not line.plain:
        line.append("no trajectory is there", style="dim")
    line.truncate(width, overflow="ellipsis")
    return line


def _tail(series: Mapping[str, Any], width: int) -> Text:
    most = max(series["live"], default=0)
    label = f" live, peak {most:,}"
    bars = bars_of(series["at_s"], series["live"], max(8, width - len(label)))
    return Text(bars, style="green", no_wrap=True).append(label, style="dim")


def bars_of(times: Sequence[float], values: Sequence[int], width: int) -> str:
    """Values over time in `width` characters of equal time; each is the last value in it, or of before."""
    if not times or times[-1] <= times[0]:
        return ""
    most = max(values) or 1
    bars, place, span = [], 0, times[-1] - times[0]
    for column in range(width):
        end = times[0] + span * (column + 1) / width
        while place + 1 < len(times) and times[place + 1] <= end:
            place += 1
        level = values[place] / most * (len(_BARS) - 1)
        # A single trajectory among thousands is what the tail is about: it is never invisible.
        bars.append(_BARS[max(1, round(level)) if values[place] else 0])
    return "".join(bars)


def _engines(snapshot: Snapshot, living: Sequence[Any], rows: int) -> list[RenderableType]:
    lost = sum(engine["state"] == "lost" for engine in snapshot["engines"])
    if not living:
        return [Text(f"engines: none{f', {lost} lost' if lost else ''}", style="yellow")]
    table = Table.grid(padding=(0, 2))
    justifies: tuple[JustifyMethod, ...] = (
        "right",
        "left",
        "right",
        "left",
        "right",
        "right",
        "right",
        "right",
        "right",
    )
    for justify in justifies:
        table.add_column(justify=justify, no_wrap=True)
    table.add_row(*(Text(name, style="bold") for name in _ENGINE_COLUMNS))
    # The busiest first: where something waits is where one looks.
    first = sorted(living, key=lambda e: (-(e["generating"] + e["queued"]), e["seat"]))[:rows]
    for engine in sorted(first, key=lambda e: e["seat"]):
        slots = engine["slots"]
        running = min(engine["generating"], slots)
        kv = engine["resident_tokens"] / engine["kv_capacity_tokens"] if engine["kv_capacity_tokens"] else None
        table.add_row(
            str(engine["seat"]),
            Text("idle", style="yellow") if engine["is_idle"] else engine["state"],
            str(engine["tp_degree"]),
            _meter(running, slots),
            f"{running}/{slots}",
            str(engine["generating"] - running),
            Text(str(engine["queued"]), style="yellow" if engine["queued"] else ""),
            "-" if kv is None else f"{kv:.0%}",
            f"{engine['steps']:,}",
        )
    more = []
    if len(living) > rows:
        rest = [e for e in living if e not in first]
        more.append(f"{len(rest)} more: {sum(min(e['generating'], e['slots']) for e in rest):,} running")
    if lost:
        more.append(f"{lost} lost")
    return [table, Text("  " + " · ".join(more), style="dim")] if more else [table]


def _meter(running: int, slots: int, width: int = 8) -> Text:
    full = round(min(1.0, running / slots) * width) if slots else 0
    return Text("█" * full, style="green").append("·" * (width - full), style="dim")


def _longest(snapshot: Snapshot, rows: int, width: int) -> list[RenderableType]:
    shown = snapshot["longest"][:rows]
    live = snapshot["counts"]["live"]
    if not shown:
        return []
    table = Table.grid(padding=(0, 2))
    name_width = max(16, width - 58)
    justifies: tuple[JustifyMethod, ...] = ("left", "left", "right", "right", "right", "right", "right")
    for justify in justifies:
        table.add_column(justify=justify, no_wrap=True)
    head = ("most work", "phase", "engine", "steps", "tokens", "to come", "age")
    names = {run["run_id"]: run["name"] or run["session"] for run in snapshot["runs"]}
    table.add_row(*(Text(name, style="bold") for name in head))
    seats = {engine["index"]: str(engine["seat"]) for engine in snapshot["engines"]}
    for lane in shown:
        remaining = lane["remaining_tokens"]
        table.add_row(
            shortened(clean(_row_name(lane["trajectory_id"], names)), name_width),
            Text(lane["phase"], style=PHASE_STYLES.get(lane["phase"], "")),
            seats.get(lane["engine"], "-"),
            str(lane["steps"]),
            f"{lane['generated_tokens']:,}",
            "-" if remaining is None else f"{remaining:,.0f}",
            duration(snapshot["now_s"] - (lane["admitted_s"] or lane["submitted_s"])),
        )
    rest = live - len(shown)
    return [table, Text(f"  {rest:,} more live", style="dim")] if rest > 0 else [table]


def _row_name(trajectory_id: str, names: Mapping[str, str]) -> str:
    """The id behind the name of its run, where there are several."""
    run_id, own = plain_name(trajectory_id)
    return f"{names.get(run_id, run_id)}: {own}" if len(names) > 1 else own


def _actions(snapshot: Snapshot, width: int) -> list[Text]:
    lines = [
        _line(
            f"pool {pool['pool']}: {pool['hosts']} worker(s), {pool['cpus'] - pool['free_cpus']:,}/"
            f"{pool['cpus']:,} CPUs in use, {pool['running']:,} actions run, {pool['waiting']:,} wait",
            width,
        )
        for pool in snapshot["pools"]
    ]
    actions = sorted(snapshot["actions"], key=lambda a: -a["finished"])[:3]
    told = [
        f"{a['label']} {a['finished']:,}"
        + (f" ({a['run_s'] / a['finished']:.2g} s)" if a["finished"] else "")
        + (f", {a['failed']:,} failed" if a["failed"] else "")
        for a in actions
    ]
    return [*lines, *([_line(f"actions: {' · '.join(told)}", width)] if told else [])]


def _failures(failures: Sequence[Any], width: int) -> list[Text]:
    most = 4
    lines = [
        _line(f"failures, {f['boundary']}: {f['count']:,} {f['cause']} {f['message']}".rstrip(), width, "red")
        for f in failures[:most]
    ]
    if len(failures) > most:
        lines.append(_line(f"  {len(failures) - most} more causes of failures", width, "dim"))
    return lines


def _moves(snapshot: Snapshot, width: int) -> list[Text]:
    return [
        _line(
            f"moves by {move['kind']}: {move['started']:,} started ({move['from_leaving']:,} from engines that leave), "
            f"{move['running']} run, {move['failed']:,} failed, steps waited {move['exposed_s']:.1f} s",
            width,
        )
        for move in snapshot["moves"]
    ]
