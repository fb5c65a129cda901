"""Feeds a driver with the attempts of groups: pulls tasks when there is room, and delivers finished groups.

What the ledger decides is carried out here. Groups are journalled when they open and when they close, so that a resumed
run goes on with those between, and with the next position of the source.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.core.events import GroupEnded, TrajectoryRedundant
from heddle_dask.core.ids import FIRST_RUN, GroupId, TrajectoryId
from heddle_dask.core.run_description import REDUNDANT
from heddle_dask.environments.rewards import group_reward_hook
from heddle_dask.environments.splits import prompt_key
from heddle_dask.environments.task_sources import SourcedTask, TaskSource
from heddle_dask.live.driver.files.run_files import RunFiles
from heddle_dask.live.driver.programs.attempts import Attempt, group_attempts
from heddle_dask.live.driver.runs.endings import TaskKey
from heddle_dask.live.driver.runs.program_runs import EndedAttempt
from heddle_dask.live.driver.runs.runner import Driver
from heddle_dask.live.driver.session.open_session import OpenSession
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report
from heddle_dask.live.wire.transport import send
from heddle_dask.records.trajectory import Cause
from heddle_dask.records.trajectory_prefix import PREFIX, TrajectoryPrefix
from heddle_dask.training.group_ledger import (
    CancelMember,
    DeliverGroup,
    DropGroup,
    GroupLedger,
    GroupStart,
    LedgerDecision,
)
from heddle_dask.training.groups import FinishedGroup, GroupPlan
from heddle_dask.training.prefix_sampling import PrefixSampler

_MOST_QUARANTINED_IN_A_ROW = 1000


@dataclass(frozen=True, slots=True)
class GroupPort:
    """What a feed of groups uses of an open session and its driver."""

    client: Client
    open_session: OpenSession
    driver: Driver
    note: Callable[[str], None] = lambda line: None  # takes a line for the user

    @property
    def slots(self) -> int:
        """Of all engines; 0 where none is known."""
        return int(self.open_session.channel.counts.get("slots", 0))

    def report(self, event: GroupEnded | TrajectoryRedundant) -> None:
        if self.client.status == "running":
            send(self.client, Report(self.open_session.session_id, event))


class GroupFeed:
    """The groups of one stream; implements `runner.AttemptFeed`."""

    def __init__(
        self,
        source: TaskSource,
        plan: GroupPlan,
        seed: int,  # of the run
        # `counts`, `counted`: as for `GroupLedger`; `counted` None: as the journal of a resumed run says.
        counts: Callable[[FinishedGroup], bool] = lambda group: True,
        counted: int | None = None,
    ) -> None:
        self._source = source
        self._plan = plan
        self._seed = seed
        self._given_counted = counted
        self.ledger = GroupLedger(plan, counts, counted or 0)
        # `mix_sampled`, `mix_consumed`: groups that were begun, and that counted for a batch, by environment.
        self.mix_sampled: Counter[str] = Counter()
        self.mix_consumed: Counter[str] = Counter()
        self.generated_tokens = 0
        self.finished: deque[FinishedGroup] = deque()  # groups to deliver, oldest first
        self._port: GroupPort | None = None
        self._files: RunFiles | None = None
        self._prefix = ""
        self._position = 0
        self._has_ended = False
        self._resumed: list[Attempt] = []
        self._running = 0
        self._evicted_before = 0  # groups, before there was a scheduler to tell
        self._quarantined: set[TaskKey] = set()
        self._opened_before: set[str] = set()  # groups of earlier sessions: what follows them may have begun there
        self._delivered: FinishedGroup | None = None
        self._counting: dict[str, bool] = {}
        self._sampler = None if plan.prefixes is None else PrefixSampler(plan.prefixes)
        self._starts: dict[str, GroupStart] = {}  # of groups that run
        self._skewed: deque[GroupStart] = deque()  # groups whose tasks are to be asked again, behind a prefix
        self._on_finished: Callable[[], None] = lambda: None
        # `on_begun`, `on_dropped`: take the id of a group that begins, and of one that will not be delivered.
        self.on_begun: Callable[[str], None] = lambda group_id: None
        self.on_dropped: Callable[[str], None] = lambda group_id: None
        for environment in source.environments:
            if plan.late_members == "keep" and plan.extra_members and group_reward_hook(environment):
                raise BadInput(
                    f"environment {environment.name!r} rewards a group as a whole: late members cannot be kept, use "
                    "late_members cancel"
                )

    @property
    def plan(self) -> GroupPlan:
        """How many groups and members run."""
        return self._plan

    def first_attempts(self) -> Sequence[Attempt]:
        """Those of the first batch, for whom engines are planned."""
        sourced = [self._source.task(position) for position in range(self._plan.groups_per_batch)]
        return [
            attempt
            for each in sourced
            if each is not None
            for attempt in group_attempts(each.environment, each.task, "", self._plan.attempts, self._seed)
        ]

    @property
    def is_connected(self) -> bool:
        return self._port is not None

    def connect(self, port: GroupPort, files: RunFiles, prefix: str, on_finished: Callable[[], None]) -> None:
        """Begin, or go on where the journal of a resumed run ends.

        Parameters
        ----------
        prefix
            Of the ids of this stream's groups.
        on_finished
            Called when there is a group to deliver.

        Raises
        ------
        BadInput
            The source has no task at a position that the journal names.
        """
        self._port, self._files, self._prefix, self._on_finished = port, files, prefix, on_finished
        opened: dict[str, GroupStart] = {}
        behind: dict[str, Mapping[str, Any] | None] = {}
        counted = 0
        for kind, body, _ in files.group_lines():
            if kind == "task-quarantined":
                task = (body.get("environment", ""), body["task_id"])  # an older run names no environment
                port.driver.failures.quarantine(task, body["message"])
                self._quarantined.add(task)
            elif not body["group_id"].startswith(f"{prefix}g"):
                continue
            elif kind == "group-opened":
                start = GroupStart(body["position"], body["repeat"], prefix, body.get("continuation", 0))
                opened[start.group_id] = start
                behind[start.group_id] = body.get(PREFIX)
                self._opened_before.add(start.group_id)
                self._position = max(self._position, start.position + 1)
            elif kind == "groups-evicted":
                counted -= body["groups"]
            else:
                opened.pop(body["group_id"].removesuffix("+late"), None)
                counted += body["counts"]
                if body.get("repeated"):
                    again = GroupStart(body["position"], body["repeated"], prefix, body.get("continuation", 0))
                    self.ledger.repeats.append(again)
        if self._given_counted is None:
            self.ledger.evicted(-counted)
        if self._evicted_before:
            self._tell_evicted(self._evicted_before)
        for start in opened.values():
            self._resume(start, behind[start.group_id])
        for environment in self._source.environments:
            if self._sampler is not None and not getattr(environment, "can_replay", True):
                self._refuse_prefixes(environment.name, "it says that it cannot be replayed")

    def _resume(self, start: GroupStart, behind: Mapping[str, Any] | None) -> None:
        """Go on with a group: members that are stored count as ended, the others run from their journalled steps."""
        sourced = self._source.task(start.position)
        if sourced is None:
            raise BadInput(f"the source of tasks ends before position {start.position}, which the run has begun")
        assert self._files is not None
        prefix = None
        if behind is not None:
            source = self._files.stored_records({behind["source"]})
            if not source:
                raise BadInput(f"the run lacks {behind['source']}, from which group {start.group_id} goes on")
            prefix = TrajectoryPrefix.of(source[0], behind["steps"])
        attempts = self._attempts(start, sourced, prefix)
        left = self._files.unfinished(attempts)
        self._resumed += left
        self._running += len(left)
        for record in self._files.stored_records({attempt.name for attempt in attempts}):
            self._carry_out(self.ledger.ended(record))

    # -- as the feed of a driver -------------------------------------------------------------------

    @property
    def is_exhausted(self) -> bool:
        return self._has_ended and not (self.ledger.repeats or self._skewed or self._resumed)

    def pull(self) -> Sequence[Attempt]:
        """Whole groups, at most one of which waits for admission."""
        attempts, self._resumed = self._resumed, []
        while self._has_room(len(attempts)):
            start = self._next_start()
            if start is None:
                break
            sourced = self._source.task(start.position)
            assert sourced is not None
            prefix = self._prefix_of(sourced)
            self._journal(
                "group-opened",
                start.group_id,
                position=start.position,
                repeat=start.repeat,
                task_id=sourced.task.task_id,
                **({"continuation": start.continuation} if start.continuation else {}),
                **({PREFIX: prefix.facts} if prefix is not None else {}),
            )
            begun = self._attempts(start, sourced, prefix)
            self._running += len(begun)
            self.mix_sampled[sourced.environment.name] += 1
            attempts = [*attempts, *begun]
        return attempts

    def _has_room(self, pulled: int) -> bool:
        assert self._port is not None
        attempts = self._plan.attempts
        most = self._plan.max_running or max(2 * self._port.slots, attempts)
        return (
            self._port.driver.waiting + pulled < attempts
            and self._running + attempts <= most
            and len(self.finished) < self._plan.groups_per_batch
            and self.ledger.wants_group()
        )

    def _next_start(self) -> GroupStart | None:
        """What comes next: a task that is asked for again, else the next one that is not quarantined."""
        assert self._port is not None
        while self.ledger.repeats:
            again = self.ledger.repeats.pop(0)
            if again.group_id not in self._opened_before:
                return again
        if (start := self._next_skewed()) is not None:
            return start
        for _ in range(_MOST_QUARANTINED_IN_A_ROW):
            sourced = None if self._has_ended else self._source.task(self._position)
            if sourced is None:
                self._has_ended = True
                return None
            self._position += 1
            if (sourced.environment.name, sourced.task.task_id) not in self._port.driver.failures.quarantined:
                return GroupStart(self._position - 1, prefix=self._prefix)
        raise BadInput(
            f"the last {_MOST_QUARANTINED_IN_A_ROW} tasks are quarantined since their environments failed: see the log"
        )

    def _next_skewed(self) -> GroupStart | None:
        """The task that is asked again because its pass rate is far from one half, if it still has a prefix."""
        while self._skewed:
            last = self._skewed.popleft()
            start = replace(last, repeat=0, continuation=last.continuation + 1)
            sourced = self._source.task(start.position)
            if sourced is None or start.group_id in self._opened_before:
                continue
            if self._prefix_of(sourced) is not None:
                return start
        return None

    def _prefix_of(self, sourced: SourcedTask) -> TrajectoryPrefix | None:
        if self._sampler is None:
            return None
        return self._sampler.prefix_for(sourced.environment.name, prompt_key(sourced.environment.name, sourced.task))

    def _refuse_prefixes(self, environment: str, why: str) -> None:
        assert self._port is not None
        if self._sampler is not None and self._sampler.refuse(environment):  # None: of an earlier session's groups
            self._port.note(f"prefix sampling: groups of {environment} begin from scratch: {why}")

    def _attempts(
        self, start: GroupStart, sourced: SourcedTask, prefix: TrajectoryPrefix | None = None
    ) -> Sequence[Attempt]:
        attempts = [
            attempt.behind(prefix)
            for attempt in group_attempts(
                *(sourced.environment, sourced.task, start.group_id, self._plan.attempts, self._seed)
            )
        ]
        self._starts[start.group_id] = start
        names = [attempt.name for attempt in attempts]
        self.ledger.start(start, sourced.task.task_id, sourced.environment.name, names)
        self.on_begun(start.group_id)
        return attempts

    def ended(self, ended: EndedAttempt) -> None:
        self._running -= 1
        self.generated_tokens += ended.lost_tokens + ended.dropped_tokens + ended.record.generated_tokens
        self._journal_quarantined()
        if ended.record.cause == PREFIX:
            self._refuse_prefixes(ended.record.environment, ended.record.detail)
        self._carry_out(self.ledger.ended(ended.record, ended.lost_tokens, ended.dropped_tokens))

    def discarded(self, name: str, tokens: int) -> None:
        self.generated_tokens += tokens
        self.ledger.discarded(name, tokens)

    def _journal_quarantined(self) -> None:
        assert self._port is not None and self._files is not None
        for task, message in self._port.driver.failures.quarantined.items():
            if task not in self._quarantined:
                self._quarantined.add(task)
                body = {"environment": task[0], "task_id": task[1], "message": message}
                self._files.journal("task-quarantined", body)

    def _carry_out(self, decisions: Sequence[LedgerDecision]) -> None:
        assert self._port is not None
        for decision in decisions:
            match decision:
                case CancelMember(name, cause):
                    if cause == REDUNDANT:
                        self._port.report(TrajectoryRedundant(UNSTAMPED, TrajectoryId(name)))
                    self._port.driver.cancel(name, _CAUSES[cause])
                case DeliverGroup(group, counts):
                    self._deliver(group, counts)
                case DropGroup(group_id, cause, _):
                    self._starts.pop(group_id, None)
                    self._report_ended(group_id, 0)
                    self.on_dropped(group_id)
                    if cause != "unfinished":
                        again = self._repeat_of(group_id)
                        extra = {} if again is None else {"position": again.position, "repeated": again.repeat}
                        if again is not None and again.continuation:
                            extra["continuation"] = again.continuation
                        self._journal("group-closed", group_id, counts=0, cause=cause, **extra)

    def _repeat_of(self, group_id: str) -> GroupStart | None:
        for start in self.ledger.repeats:
            if replace(start, repeat=start.repeat - 1).group_id == group_id:
                return start
        return None

    def _deliver(self, group: FinishedGroup, counts: bool) -> None:
        # A batch takes groups: one that counts is worth a whole group of credits, also if a member has failed.
        self._report_ended(group.late_for or group.group_id, self._plan.members if counts else 0)
        if counts:
            self.mix_consumed[group.environment] += 1
        self._counting[group.group_id] = counts
        self.finished.append(group)
        start = self._starts.pop(group.group_id, None)  # none of late members
        late = start is None
        if self._sampler is not None and self._sampler.observe(group.records, late=late) and start is not None:
            self._skewed.append(start)
        self._on_finished()

    def _report_ended(self, group_id: str, accepted: int) -> None:
        assert self._port is not None
        self._port.report(GroupEnded(UNSTAMPED, FIRST_RUN, GroupId(group_id), accepted))

    # -- as the source of a stream -----------------------------------------------------------------

    def take(self) -> FinishedGroup:
        """The oldest finished group. It is journalled as delivered when the next one is asked for (`confirm`)."""
        assert self._port is not None
        self._delivered = self.finished.popleft()
        self._port.driver.look_again()
        return self._delivered

    def confirm(self) -> None:
        """The consumer has what `take` gave it."""
        group, self._delivered = self._delivered, None
        if group is not None:
            counts = self._counting.pop(group.group_id)
            self._journal("group-closed", group.group_id, counts=int(counts))

    def open_batches(self, through: int) -> None:
        self.ledger.open_batches(through)
        if self._port is not None:
            self._port.driver.look_again()

    def evicted(self, groups: int) -> None:
        self.ledger.evicted(groups)
        if self._port is None:
            self._evicted_before += groups
        else:
            self._tell_evicted(groups)
            self._port.driver.look_again()

    def _tell_evicted(self, groups: int) -> None:
        self._journal("groups-evicted", f"{self._prefix}g", groups=groups)
        self._report_ended(f"{self._prefix}evicted", -groups * self._plan.members)

    def _journal(self, kind: str, group_id: str, **body: Any) -> None:
        if self._files is not None:
            self._files.journal(kind, {"group_id": group_id, **body})


# A dropped group's cause is that of its members' records.
_CAUSES: Mapping[str, Cause] = {
    "stale": "stale",
    "redundant": "redundant",
    "environment": "environment",
    "prefix": "prefix",
}
