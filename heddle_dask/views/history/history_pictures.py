"""Frozen pictures of a history, in the form of `run_snapshot`."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice

from heddle_dask.core.ids import RunId
from heddle_dask.core.run_record import plain_name
from heddle_dask.views.history.action_history import OTHER_LABEL
from heddle_dask.views.history.lanes import Lane
from heddle_dask.views.history.phases import LLM_QUEUE, MIGRATION, PHASES
from heddle_dask.views.history.run_history import RunHistory
from heddle_dask.views.history.run_shares import RunShare
from heddle_dask.views.history.run_snapshot import (
    SNAPSHOT_FORMAT,
    ActionView,
    EngineSeries,
    EngineView,
    MoveView,
    PoolView,
    RunCounts,
    RunSeries,
    RunSnapshot,
    TrajectoryView,
)


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """How much of a history one picture shows: what a person can read, and what a browser can draw every second."""

    longest: int = 60
    latest_ended: int = 40
    segments: int = 100


def picture_of(
    history: RunHistory,
    *,
    session: str,
    is_open: bool,
    strategy: str,
    now_s: float,
    name: str = "",
    environment: str = "",
    runs: tuple[RunShare, ...] = (),
    lines_missing: int = 0,
    taken_unix_s: float = 0.0,
    heddle_version: str = "",
    limits: PictureLimits | None = None,
) -> RunSnapshot:
    """A frozen picture of the history; O(live trajectories + samples of the series)."""
    limits = limits or PictureLimits()
    return RunSnapshot(
        format=SNAPSHOT_FORMAT,
        heddle_version=heddle_version,
        session=session,
        is_open=is_open,
        strategy=strategy,
        journal_offset=history.events + lines_missing,
        at_s=history.at_s,
        now_s=now_s,
        taken_unix_s=taken_unix_s,
        counts=counts_of(history),
        engines=engines_of(history),
        pools=pools_of(history),
        actions=actions_of(history),
        failures=history.failures.rows(),
        moves=moves_of(history),
        longest=longest_of(history, limits.longest, limits.segments),
        latest_ended=latest_ended_of(history, limits.latest_ended, limits.segments),
        series=series_of(history),
        lengths=history.lengths.pairs(),
        lengths_seen=history.lengths.seen,
        lines_missing=lines_missing,
        training=history.training.view(),
        runs=runs,
        name=name,
        environment=environment,
        rewards=history.rewards.view(),
    )


def picture_of_run(picture: RunSnapshot, name: str) -> RunSnapshot:
    """The picture with the trajectories of one open run alone, by its name or session; engines and pools of all.

    Raises
    ------
    KeyError
        No open run has that name.
    """
    mine = [run for run in picture.runs if name in (run.name, run.session)]
    if not mine:
        raise KeyError(name)
    ids = {run.run_id for run in mine}

    def of_mine(all_of_them: tuple[TrajectoryView, ...]) -> tuple[TrajectoryView, ...]:
        return tuple(each for each in all_of_them if plain_name(each.trajectory_id)[0] in ids)

    counts = replace(
        picture.counts,
        submitted=sum(run.submitted for run in mine),
        live=sum(run.live for run in mine),
        ended=dict(sum((Counter(run.ended) for run in mine), Counter())),
    )
    return replace(
        picture,
        counts=counts,
        longest=of_mine(picture.longest),
        latest_ended=of_mine(picture.latest_ended),
        runs=tuple(mine),
        rewards=mine[0].rewards,
        only=name,
    )


def counts_of(history: RunHistory) -> RunCounts:
    waiting = history.by_phase[LLM_QUEUE] + history.by_phase[MIGRATION]
    return RunCounts(
        submitted=history.submitted,
        live=history.live,
        ended=dict(history.ended),
        by_phase=dict(zip(PHASES, history.by_phase, strict=True)),
        steps_waiting=waiting - sum(row.queued for row in history.engines.rows.values()),
        steps=history.steps,
        generated_tokens=history.generated_tokens,
        cached_tokens=history.cached_tokens,
        prompt_tokens=history.prompt_tokens,
        preemptions=history.preemptions,
        requeues=history.requeues,
        phase_seconds=dict(zip(PHASES, history.phase_seconds, strict=True)),
    )


def engines_of(history: RunHistory) -> tuple[EngineView, ...]:
    names = [field.name for field in fields(EngineView) if field.name != "is_idle"]
    rows = history.engines.rows.values()
    some_wait = any(row.queued for row in rows)
    return tuple(
        EngineView(
            **{name: getattr(row, name) for name in names},
            is_idle=some_wait and row.state == "ready" and not (row.resident_tokens or row.generating),
        )
        for row in rows
    )


def pools_of(history: RunHistory) -> tuple[PoolView, ...]:
    """Hosts and actions by pool, also a pool in which actions wait and no host is."""
    hosts = list(history.actions.hosts.values())
    waiting = Counter(action.pool for action in history.actions.open.values() if action.host is None)
    pools = dict.fromkeys([*(host.pool for host in hosts), *waiting])
    return tuple(
        PoolView(
            pool=pool,
            hosts=sum(host.pool == pool for host in hosts),
            cpus=sum(host.cpus for host in hosts if host.pool == pool),
            free_cpus=sum(host.free_cpus for host in hosts if host.pool == pool),
            running=sum(len(host.running) for host in hosts if host.pool == pool),
            waiting=waiting[pool],
        )
        for pool in pools
    )


def actions_of(history: RunHistory) -> tuple[ActionView, ...]:
    actions = history.actions
    running: Counter[tuple[str, str]] = Counter()
    waiting: Counter[tuple[str, str]] = Counter()
    for action in actions.open.values():
        key = (action.kind, action.label)
        if key not in actions.labels:
            key = (action.kind, OTHER_LABEL)
        (waiting if action.host is None else running)[key] += 1
    return tuple(
        ActionView(label, kind, waiting[kind, label], running[kind, label], **asdict(counts))
        for (kind, label), counts in actions.labels.items()
    )


def moves_of(history: RunHistory) -> tuple[MoveView, ...]:
    return tuple(MoveView(kind, **asdict(counts)) for kind, counts in history.engines.moves.items())


def series_of(history: RunHistory) -> RunSeries:
    """The counts over time, and a last sample of now."""
    series, engines = history.series, history.engines
    columns = series.columns
    slots, resident, capacity = engines.sums()
    by_index = {row.index: row for row in engines.rows.values()}

    def ints(column: object, now: int) -> tuple[int, ...]:
        return (*map(int, columns[column]), now)

    charted = []
    for index in engines.charted:
        row = by_index.get(index)
        now = (0, 0, 0) if row is None else (row.generating, row.queued, row.resident_tokens)
        names = ("generating", "queued", "resident")
        charted.append(EngineSeries(index, *(ints((index, name), n) for name, n in zip(names, now, strict=True))))
    return RunSeries(
        at_s=(*series.at_s, history.at_s),
        live=ints("live", history.live),
        ended=ints("ended", history.ended_count),
        steps=ints("steps", history.steps),
        generated_tokens=ints("generated_tokens", history.generated_tokens),
        by_phase=tuple(ints(phase, history.by_phase[phase]) for phase in range(len(PHASES))),
        slots=ints("slots", slots),
        resident_tokens=ints("resident_tokens", resident),
        kv_capacity_tokens=ints("kv_capacity_tokens", capacity),
        engines=tuple(charted),
        moves=ints("moves", engines.moves_started),
        preemptions=ints("preemptions", history.preemptions),
    )


def longest_of(history: RunHistory, most: int, segments: int) -> tuple[TrajectoryView, ...]:
    """Live trajectories with most work, generated and predicted; the earliest submitted first among equals.

    Of several runs, the longest of each in equal parts: each can be looked at alone.
    """
    admitted: dict[RunId, list[Lane]] = {}
    for lane in history.lanes.values():
        if lane.admitted_s is not None:
            admitted.setdefault(plain_name(lane.trajectory_id)[0], []).append(lane)
    parts = [heapq.nlargest(most // len(admitted), lanes, key=Lane.work_tokens) for lanes in admitted.values()]
    chosen = sorted((lane for part in parts for lane in part), key=Lane.work_tokens, reverse=True)
    return tuple(trajectory_of(lane, history.at_s, segments) for lane in chosen)


def latest_ended_of(history: RunHistory, most: int, segments: int) -> tuple[TrajectoryView, ...]:
    return tuple(trajectory_of(lane, history.at_s, segments) for lane in islice(reversed(history.ended_lanes), most))


def trajectory_of(lane: Lane, now_s: float, segments: int) -> TrajectoryView:
    """A lane with its latest segments; its seconds run up to `now_s` while it lives."""
    seconds = list(lane.seconds)
    if lane.ended_s is None:
        seconds[lane.phase] += now_s - lane.since_s
    remaining = lane.expected_remaining_tokens()
    engine = lane.engine or lane.home
    starts_s, phases, engines, omitted = lane.segments(segments)
    return TrajectoryView(
        trajectory_id=lane.trajectory_id,
        group_id=lane.group_id,
        domain=lane.domain,
        parent=lane.parent,
        phase=PHASES[lane.phase] if lane.ended_s is None else "ended",
        engine=-1 if engine is None else engine.index,
        submitted_s=lane.submitted_s,
        admitted_s=lane.admitted_s,
        ended_s=lane.ended_s,
        status=lane.status,
        cause=lane.cause,
        steps=lane.steps,
        generated_tokens=lane.generated_tokens,
        context_tokens=lane.context_tokens,
        remaining_tokens=remaining if remaining == remaining else None,
        preemptions=lane.preemptions,
        moves=lane.moves,
        seconds=tuple(seconds),
        segment_starts_s=starts_s,
        segment_phases=phases,
        segment_engines=engines,
        segments_omitted=omitted,
    )
