"""Figures of a run, counted while trajectories finish, without keeping them.

The lower bound of the makespan is a *measured* one: no calibrated cost model is assumed. It takes each trajectory's
own engine time (prefill and decode; decode alone where the engine's own queue is part of the time to a first token) and
tool time as they were, without any queueing, and is the larger of

- the longest trajectory: the time during which its steps or its actions ran, overlaps counted once;
- all engine time over all slots, and all CPU seconds of actions over all tool CPUs.

A schedule cannot beat it with these durations. It is None if no engine reported its times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from rich import box
from rich.table import Table
from rich.text import Text

from heddle_dask.environments.mix import MixShare
from heddle_dask.records.causes import CauseCounts, Ended
from heddle_dask.records.trajectory import Status, TrajectoryOutline
from heddle_dask.views.history.reward_history import RewardTally

STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(slots=True)
class EngineShare:
    steps: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Tally:
    """Counts over trajectories; feed it with `add`.

    Attributes
    ----------
    slots, tool_cpus
        Capacity for the bound; 0 where unknown.
    lost
        Trajectories without a record, because the run ended before them; ``--resume`` runs them.
    queued_inside
        Whether the time to a first token includes the wait in the engine's own queue: vLLM does not tell them apart.
    longest_s, critical_s
        Of one trajectory: from its start to its end, and without queueing.
    mix
        What was sampled and consumed of each environment, by name; empty where there is one.
    """

    slots: int = 0
    tool_cpus: int = 0
    lost: int = 0
    queued_inside: bool = False
    statuses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    causes: CauseCounts = field(default_factory=CauseCounts)
    steps: int = 0
    actions: int = 0
    tokens: int = 0
    preemptions: int = 0
    migrations: int = 0
    rewards: RewardTally = field(default_factory=RewardTally)
    engines: dict[str, EngineShare] = field(default_factory=dict)
    durations: list[tuple[float, str]] = field(default_factory=list)
    first_start_s: float = math.inf
    last_end_s: float = -math.inf
    timed_tokens: int = 0
    critical_s: float = 0.0
    engine_s: float = 0.0
    tool_cpu_s: float = 0.0
    mix: dict[str, MixShare] = field(default_factory=dict)
    sessions_s: tuple[float, ...] = ()  # of a run that several sessions wrote, each with its own clock

    @property
    def failed(self) -> int:
        return self.statuses["failed"]

    def add(self, record: TrajectoryOutline, timed: bool = True) -> None:
        """Count one trajectory; its times only when `timed`: clocks of two sessions do not compare."""
        self.statuses[record.status] += 1
        self.causes.add(Ended(record.trajectory_id, record.status, record.cause, record.detail))
        if record.environment in self.mix:
            self.mix[record.environment].consumed += record.status in ("completed", "truncated")
        self.steps += len(record.steps)
        self.actions += len(record.actions)
        self.rewards.add(record.group_id, record.reward)
        for step in record.steps:
            self.tokens += step.generated_tokens
            self.preemptions += step.preemptions
            self.migrations += step.migrations
            share = self.engines.setdefault(step.engine_id, EngineShare())
            share.steps += 1
            share.tokens += step.generated_tokens
        if timed:
            self._add_times(record)

    def _add_times(self, record: TrajectoryOutline) -> None:
        self.first_start_s = min(self.first_start_s, record.started_s)
        self.last_end_s = max(self.last_end_s, record.finished_s)
        self.timed_tokens += record.generated_tokens
        self.durations.append((record.finished_s - record.started_s, record.trajectory_id))
        # Results that a resumed run took from the journal lie before its start: they took no time in it.
        services = ((s.finished_s, s.decode_s + (0.0 if self.queued_inside else s.prefill_s), 1) for s in record.steps)
        engine = _clipped(services, record)
        tools = _clipped(((a.finished_s, a.run_s, a.cpus) for a in record.actions), record)
        self.engine_s += sum(stop - start for start, stop, _ in engine)
        self.tool_cpu_s += sum((stop - start) * cpus for start, stop, cpus in tools)
        self.critical_s = max(self.critical_s, _covered([*engine, *tools]))

    @property
    def trajectories(self) -> int:
        return sum(self.statuses.values())

    @property
    def failure(self) -> str | None:
        """One line about a run in which every trajectory failed, else None."""
        if not self.trajectories or self.statuses["failed"] < self.trajectories:
            return None
        most = self.causes.rows()[0]
        return (
            f"all {self.trajectories} trajectories failed; {most.count} {most.title}, "
            f"the first {most.first_trajectory}: {most.first_message}"
        )

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end, or the sum over all sessions; 0 when nothing was timed."""
        return self.last_end_s - self.first_start_s if self.durations else sum(self.sessions_s)

    @property
    def tokens_per_s(self) -> float | None:
        tokens = self.timed_tokens if self.durations else self.tokens
        return tokens / self.makespan_s if self.makespan_s > 0 else None

    @property
    def reward_mean(self) -> float | None:
        return self.rewards.mean

    @property
    def bound_s(self) -> float | None:
        """Lower bound of the makespan; see the module."""
        if not self.engine_s:
            return None
        engines = self.engine_s / self.slots if self.slots else 0.0
        tools = self.tool_cpu_s / self.tool_cpus if self.tool_cpus else 0.0
        return max(self.critical_s, engines, tools)

    def result(self, out: str | None) -> dict[str, Any]:
        bound_s, makespan_s = self.bound_s, self.makespan_s
        return {
            "trajectories": self.trajectories,
            **self.statuses,
            "lost": self.lost,
            "steps": self.steps,
            "actions": self.actions,
            "tokens": self.tokens,
            "makespan_s": _rounded(makespan_s) if makespan_s or self.durations else None,
            "tokens_per_s": _rounded(self.tokens_per_s),
            "reward_mean": self.reward_mean,
            "preemptions": self.preemptions,
            "migrations": self.migrations,
            "bound_s": _rounded(bound_s),
            "bound_share": _rounded(bound_s / makespan_s) if bound_s and makespan_s else None,
            "out": out,
            "causes": [row.as_json() for row in self.causes.rows()],
            "mix": {name: asdict(share) for name, share in self.mix.items()},
        }


def table(tally: Tally, out: str | None) -> Table:
    """The same figures as a table for the terminal."""
    shown = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    shown.add_column(style="bold")
    shown.add_column()
    for name, value in _rows(tally):
        shown.add_row(name, Text(value))  # no markup: messages are the user's
    if out is not None:
        shown.add_row("stored in", Text(out))
    return shown


def _rows(tally: Tally) -> Iterable[tuple[str, str]]:
    ends = ", ".join(f"{count} {status}" for status, count in tally.statuses.items() if count)
    yield "trajectories", f"{tally.trajectories} ({ends})" if ends else "none"
    sampled = max(1, sum(part.sampled for part in tally.mix.values()))
    for name, part in tally.mix.items():
        shares = f"{part.sampled / sampled:.0%} sampled, {part.share:.0%} asked"
        yield f"mix {name}", f"{part.consumed} of {part.sampled} ended ({shares})"
    if tally.reward_mean is None:
        yield "reward", "unknown"
    else:
        yield "reward", f"mean {tally.reward_mean:.3f} (known for {tally.rewards.known})"
    for row in tally.causes.rows():
        yield row.title, f"{row.count}, first {row.first_trajectory}: {row.first_message}"
    yield "steps, actions", f"{tally.steps}, {tally.actions}"
    rate = f" ({tally.tokens_per_s:,.0f} per second)" if tally.tokens_per_s else ""
    yield "tokens generated", f"{tally.tokens:,}{rate}"
    bound = ""
    if tally.bound_s and tally.makespan_s:
        bound = f" (lower bound {tally.bound_s:.1f} s, {tally.bound_s / tally.makespan_s:.0%} reached)"
    if tally.sessions_s:
        bound = f" in {len(tally.sessions_s)} sessions"
    yield "makespan", f"{tally.makespan_s:.1f} s{bound}" if tally.makespan_s or tally.durations else "unknown"
    if tally.durations:
        longest_s, name = max(tally.durations)
        median_s = statistics.median(seconds for seconds, _ in tally.durations)
        yield "longest", f"{longest_s:.1f} s ({name}); median {median_s:.1f} s"
    if tally.preemptions or tally.migrations:
        yield "preemptions, migrations", f"{tally.preemptions}, {tally.migrations}"
    for engine_id, share in sorted(tally.engines.items()):
        yield f"engine {engine_id}", f"{share.steps} steps, {share.tokens:,} tokens"


def _clipped(spans: Iterable[tuple[float, float, int]], record: TrajectoryOutline) -> list[tuple[float, float, int]]:
    """(end, length, weight) as (start, end, weight) within the trajectory, without what is unknown."""
    kept = []
    for end_s, length_s, weight in spans:
        if not (math.isnan(end_s) or math.isnan(length_s)):
            start = max(end_s - length_s, record.started_s)
            kept.append((start, max(start, min(end_s, record.finished_s)), weight))
    return kept


def _covered(spans: list[tuple[float, float, int]]) -> float:
    covered, reached = 0.0, -math.inf
    for start, stop, _ in sorted(spans):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
