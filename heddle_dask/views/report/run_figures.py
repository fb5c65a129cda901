"""The figures of a finished run, folded from its records and from what its journal tells.

One pass, and bounded for what is drawn one by one: of all trajectories a row of numbers is kept, of the longest and of
an even sample also their segments. Sessions have clocks of their own; `Axis` puts them one after another.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.records.causes import CauseCounts, Ended
from heddle_dask.records.trajectory import ActionRecord, StepRecord, TrajectoryOutline
from heddle_dask.views.accounts import (
    NS_PER_S,
    Account,
    ControlFacts,
    Phase,
    account_of,
    work_began_s,
    worked_here,
)
from heddle_dask.views.report.intervals import Intervals
from heddle_dask.views.report.journal_facts import SessionFacts
from heddle_dask.views.report.reasons import Typical

LONGEST = 40
SAMPLED = 60


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory in numbers.

    Attributes
    ----------
    session
        Number of the session by whose clock its times are; None where nobody knows.
    begin_s, end_s
        By that clock, the wait for admission included.
    phases_ns
        By `Phase`, in its order.
    """

    trajectory_id: str
    status: str
    cause: str
    reward: float | None
    session: int | None
    begin_s: float
    end_s: float
    duration_ns: int
    phases_ns: tuple[int, ...]
    tokens: int
    steps: int
    actions: int
    preemptions: int
    migrations: int
    losses: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A trajectory that is drawn: its row, record and account."""

    row: Row
    record: TrajectoryOutline
    account: Account


@dataclass(slots=True)
class EngineUse:
    """What one engine did, by the clock of a session; weights of `held` are context tokens."""

    running: Intervals = field(default_factory=Intervals)
    queued: Intervals = field(default_factory=Intervals)
    held: Intervals = field(default_factory=Intervals)
    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class ActionUse:
    kind: str
    statuses: Counter[str] = field(default_factory=Counter)
    run_s: list[float] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    quota_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


class RunFigures:
    """Feed it with `add`.

    Parameters
    ----------
    sessions
        What the journal tells, oldest session first; empty where the journal is gone.
    one_clock
        Whether all times are of one session: known from the metadata of the run where there is no journal.
    over_time
        Whether what is drawn over time is kept; totals do not need it.
    """

    def __init__(self, sessions: Sequence[SessionFacts], one_clock: bool, over_time: bool = True) -> None:
        self.sessions = sessions
        self._one_clock = one_clock
        self._over_time = over_time
        self._session_of = {name: number for number, each in enumerate(sessions) for name in each.trajectories}
        self.rows: list[Row] = []
        self.totals_ns: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.earlier_s = 0.0
        self.admission_unknown = 0
        self.waits_unknown = 0
        self.causes = CauseCounts()
        self.states: dict[tuple[int, Phase], Intervals] = defaultdict(Intervals)
        self.engines: dict[tuple[int, str], EngineUse] = defaultdict(EngineUse)
        self.actions: dict[str, ActionUse] = {}
        self.running_actions: dict[int, Intervals] = defaultdict(Intervals)
        self.queued_actions: dict[int, Intervals] = defaultdict(Intervals)
        self.offsets: dict[int, list[float]] = {}
        self.main_step_tokens: dict[str, tuple[int, ...]] = {}
        self._longest: list[tuple[int, int, Shown]] = []
        self._sample: list[Shown] = []
        self._stride = 1

    def add(self, record: TrajectoryOutline) -> Account:
        session = self._session_of.get(record.trajectory_id)
        facts = None if session is None else self.sessions[session].trajectories[record.trajectory_id]
        if session is None and self._one_clock and len(self.sessions) <= 1:
            session = 0
        account = account_of(record, facts)
        self._count(record, account)
        row = _row(record, account, facts, session)
        self.rows.append(row)
        self._keep(Shown(row, record, account))
        if session is not None:
            if facts is not None and account.admission_known:
                self.offsets.setdefault(session, []).append(record.started_s - facts.admitted_s)
            if self._over_time:
                self._add_times(record, account, session)
        return account

    @property
    def longest(self) -> list[Shown]:
        """The longest trajectories, from submission to end; the longest first."""
        return [shown for _, _, shown in sorted(self._longest, key=lambda each: (-each[0], each[1]))]

    @property
    def drawn(self) -> list[Shown]:
        """The longest trajectories and an even sample of all, in order of their start; all of them in a small run."""
        chosen = {shown.row.trajectory_id: shown for shown in (*self._sample, *self.longest)}
        return sorted(chosen.values(), key=lambda shown: (shown.row.session or 0, shown.record.started_s))

    @property
    def typical(self) -> Typical:
        parts = list(Phase)
        rows = [dict(zip(parts, row.phases_ns, strict=True)) for row in self.rows]
        return Typical.of(rows, [row.tokens for row in self.rows])

    def _count(self, record: TrajectoryOutline, account: Account) -> None:
        for phase, length in account.phases_ns.items():
            self.totals_ns[phase] += length
        self.earlier_s += account.earlier_s
        self.admission_unknown += not account.admission_known
        self.waits_unknown += not account.waits_known
        self.causes.add(Ended(record.trajectory_id, record.status, record.cause, record.detail))

    def _keep(self, shown: Shown) -> None:
        number = len(self.rows)
        entry = (shown.row.duration_ns, -number, shown)
        if len(self._longest) < LONGEST:
            heapq.heappush(self._longest, entry)
        elif entry[:2] > self._longest[0][:2]:
            heapq.heapreplace(self._longest, entry)
        if (number - 1) % self._stride == 0:
            self._sample.append(shown)
            if len(self._sample) > SAMPLED:
                self._sample, self._stride = self._sample[::2], 2 * self._stride

    def _add_times(self, record: TrajectoryOutline, account: Account, session: int) -> None:
        for start, stop, phase in account.segments:
            self.states[session, phase].add(start / NS_PER_S, stop / NS_PER_S)
        self._add_steps(record, session)
        for action in record.actions:
            self._add_action(action, session)

    def _add_steps(self, record: TrajectoryOutline, session: int) -> None:
        next_of: dict[int, StepRecord] = {}
        for step in reversed(record.steps):
            use = self.engines[session, step.engine_id]
            use.steps += 1
            use.tokens += step.generated_tokens
            use.prompt_tokens += step.prompt_tokens
            use.cached_tokens += step.cached_tokens
            until = next_of.get(step.branch)
            next_of[step.branch] = step
            if worked_here(step):
                began_s = work_began_s(step)
                use.running.add(began_s, step.finished_s)
                use.queued.add(step.submitted_s, began_s)
            held_until_s = record.finished_s if until is None else until.submitted_s
            use.held.add(step.submitted_s, held_until_s, step.prompt_tokens + step.generated_tokens)
        main = [step for step in record.steps if step.branch == 0]
        if all(worked_here(step) for step in main):
            self.main_step_tokens[record.trajectory_id] = tuple(step.generated_tokens for step in main)

    def _add_action(self, action: ActionRecord, session: int) -> None:
        use = self.actions.get(action.label)
        if use is None:
            use = self.actions[action.label] = ActionUse(action.kind)
        use.statuses[action.status] += 1
        if math.isnan(action.run_s) or not worked_here(action):
            return
        use.run_s.append(action.run_s)
        use.queue_s.append(action.queue_s)
        use.quota_s.append(action.quota_s)
        use.load_s.append(action.load_s)
        use.cpu_s += action.run_s * action.cpus
        begun_s = action.finished_s - action.run_s
        self.running_actions[session].add(begun_s, action.finished_s)
        self.queued_actions[session].add(action.submitted_s, begun_s)


def _row(record: TrajectoryOutline, account: Account, facts: ControlFacts | None, session: int | None) -> Row:
    admission_s = account.seconds(Phase.ADMISSION)
    return Row(
        trajectory_id=record.trajectory_id,
        status=record.status,
        cause=record.cause,
        reward=record.reward,
        session=session,
        begin_s=record.started_s - admission_s,
        end_s=record.finished_s,
        duration_ns=account.duration_ns,
        phases_ns=tuple(account.phases_ns.get(phase, 0) for phase in Phase),
        tokens=record.generated_tokens,
        steps=len(record.steps),
        actions=len(record.actions),
        preemptions=sum(step.preemptions for step in record.steps),
        migrations=sum(step.migrations for step in record.steps),
        losses=0 if facts is None else facts.losses,
    )


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of time for all sessions, one after another; the time between two sessions is left out.

    Attributes
    ----------
    begins_s
        First submission or start of each session, by its clock.
    places_s
        Where each session begins on the axis.
    """

    begins_s: Mapping[int, float]
    places_s: Mapping[int, float]
    until_s: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Axis:
        """From the first begin of each session to its last end."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for row in rows:
            if row.session is not None and math.isfinite(row.begin_s) and math.isfinite(row.end_s):
                first[row.session] = min(first.get(row.session, math.inf), row.begin_s)
                last[row.session] = max(last.get(row.session, -math.inf), row.end_s)
        places, reached = {}, 0.0
        for session in sorted(first):
            places[session] = reached
            reached += max(0.0, last[session] - first[session])
        return cls(first, places, reached)

    def at(self, session: int, seconds: float) -> float:
        return seconds - self.begins_s[session] + self.places_s[session]

    def ends(self, session: int) -> float:
        later = [place for other, place in self.places_s.items() if other > session]
        return min(later, default=self.until_s)


def session_offset_s(figures: RunFigures, session: int) -> float | None:
    """What to add to the clock of the scheduler's session to get that of the records; None if it is unknown."""
    offsets = figures.offsets.get(session)
    return statistics.median(offsets) if offsets else None
