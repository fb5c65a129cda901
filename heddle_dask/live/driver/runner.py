"""The driver: runs the agent programs of a batch and turns every one of them into exactly one record.

A program that raises, is stopped, or loses its engine becomes a record with a status and a cause; it never ends the
run. Only a failure of the control plane, the journal or the store does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, assert_never

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec, joined_domain
from heddle_dask.environments.base import ActionFailed, Environment, Reward, Task, stored_metadata
from heddle_dask.live.driver.context import LiveContext
from heddle_dask.live.driver.control_channel import ClusterLost, ControlChannel
from heddle_dask.live.driver.program_errors import BudgetExhausted, ReplayDiverged, StepLost
from heddle_dask.live.driver.run_writer import RunWriter
from heddle_dask.live.driver.services import Recorded, Services
from heddle_dask.live.driver.submission import RESULT_LOST
from heddle_dask.live.wire.driver_messages import (
    ActionGivenUpNotice,
    ActionPayloadWantedNotice,
    ActionResultLostNotice,
    AdmittedNotice,
    EndedTrajectory,
    EngineLostNotice,
    Notice,
    StepGivenUpNotice,
    StepResultLostNotice,
    SubmittedTrajectory,
    SubmitTrajectories,
    TrajectoriesEndedReport,
)
from heddle_dask.live.wire.messages import action_key, step_key
from heddle_dask.live.wire.transport import ask_scheduler, send
from heddle_dask.records.trajectory import Cause, Status, TrajectoryRecord

# An estimate: the length of a rendered prompt is known when its first step is requested.
CHARACTERS_PER_TOKEN = 4
# Trajectories in one message: the scheduler answers polls in between.
SUBMITTED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Attempt:
    """One trajectory to run: a task, its identity, and its journalled results where the run is resumed."""

    task: Task
    spec: TrajectorySpec
    seed: int
    recorded: Recorded | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended."""

    status: Status
    cause: Cause = ""
    detail: str = ""
    reward: Reward = field(default_factory=lambda: Reward(None))


def trajectory_seed(run_seed: int, task_id: str, sample_index: int) -> int:
    """The seed of one trajectory; the same in every process."""
    digest = blake2b(f"{run_seed}/{task_id}/{sample_index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def attempts_of(
    environment: str, tasks: Sequence[Task], samples: int, seed: int, batch: str
) -> list[Attempt]:
    """`samples` attempts per task; `batch` prefixes the ids of later batches of one session."""
    attempts = []
    for task in tasks:
        estimated_tokens = len(task.prompt) // CHARACTERS_PER_TOKEN
        for sample in range(samples):
            spec = TrajectorySpec(
                trajectory_id=TrajectoryId(f"{batch}{task.task_id}/{sample}"),
                group_id=GroupId(f"{batch}{task.group or task.task_id}"),
                sample_index=sample,
                domain=joined_domain(environment, task.domain),
                prompt_tokens=task.prompt_tokens or estimated_tokens,
                message_tokens=task.message_tokens or estimated_tokens,
                max_steps=task.max_steps,
            )
            attempts.append(Attempt(task, spec, trajectory_seed(seed, task.task_id, sample)))
    return attempts


class Driver:
    """Runs attempts of one environment through one session.

    Parameters
    ----------
    channel
        Its `failed` becomes done with an exception when the control plane has failed.
    """

    def __init__(
        self,
        client: Client,
        services: Services,
        environment: Environment,
        writer: RunWriter | None,
        channel: ControlChannel,
    ) -> None:
        self._client = client
        self._services = services
        self._environment = environment
        self._writer = writer
        self._channel = channel
        self._failed = channel.failed
        self._admitted: dict[str, asyncio.Event] = {}
        self._contexts: dict[str, LiveContext] = {}
        self._running: dict[asyncio.Task[TrajectoryRecord], None] = {}
        self._ended: list[EndedTrajectory] = []
        self._interrupted = False
        self._to_resume = False
        self._begun = False
        self.ended = asyncio.Event()
        self.finished = 0
        self.unfinished = 0
        self.generated_tokens = 0

    @property
    def live_tokens(self) -> int:
        """Tokens generated so far, unfinished trajectories included."""
        return self.generated_tokens + sum(c.generated_tokens for c in self._contexts.values())

    def on_notice(self, notice: Notice) -> None:
        """Take one notice of the scheduler plugin."""
        submitter, session = self._services.submitter, self._services.session
        match notice:
            case AdmittedNotice(trajectory_id):
                event = self._admitted.get(trajectory_id)
                if event is not None:
                    event.set()
            case StepGivenUpNotice(step_id, cause):
                submitter.interrupt(step_key(session, step_id), "given-up", cause)
            case ActionGivenUpNotice(action_id, cause):
                submitter.interrupt(action_key(session, action_id), "given-up", cause)
            case StepResultLostNotice(step_id):
                submitter.interrupt(step_key(session, step_id), "result-lost", RESULT_LOST)
            case ActionResultLostNotice(action_id):
                submitter.interrupt(action_key(session, action_id), "result-lost", RESULT_LOST)
            case ActionPayloadWantedNotice(action_id, address):
                submitter.send_payload(action_id, address)
            case EngineLostNotice():
                pass  # its steps report by themselves
            case _:
                assert_never(notice)

    def interrupt(self, to_resume: bool = False) -> None:
        """Stop admitting and abort what runs; every trajectory still yields its record.

        Parameters
        ----------
        to_resume
            Aborted trajectories are not stored: a resumed run goes on with them from their journalled steps.
        """
        self._interrupted = True
        self._to_resume = to_resume
        if self._begun:
            self._cancel_running()

    def limit_run(self, on_limit: Callable[[str], None]) -> asyncio.TimerHandle:
        """Interrupt the run, and say so, when it has taken as long as its budget allows; cancel it at the run's end."""
        most_s = self._services.budget.max_run_s
        limit_s = math.inf if most_s is None else most_s

        def end() -> None:
            on_limit(f"the run has reached its limit of {limit_s:g} s: it ends, and can be resumed")
            self.interrupt(to_resume=True)

        return asyncio.get_running_loop().call_later(limit_s, end)

    async def run(self, attempts: Sequence[Attempt]) -> AsyncIterator[TrajectoryRecord]:
        """Run all attempts; yields each record when it is journalled, in order of completion.

        Raises
        ------
        ControlPlaneFailed
            The scheduler plugin failed, or the cluster is lost. Records yielded before are safe.
        """
        self.unfinished = len(attempts)
        ended: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()
        for attempt in attempts:
            self._admitted[attempt.spec.trajectory_id] = asyncio.Event()
        for attempt in attempts:
            task = asyncio.create_task(self._run_one(attempt))
            task.add_done_callback(ended.put_nowait)
            self._running[task] = None
        self._failed.add_done_callback(ended.put_nowait)
        # A task that is cancelled before its first step never runs at all, and would yield no record.
        await asyncio.sleep(0)
        self._begun = True
        if self._interrupted:
            self._cancel_running()
        try:
            await self._announce(attempts)
            while self._running:
                first = await ended.get()
                if first is self._failed:
                    await self._failed
                self._running.pop(first, None)  # type: ignore[call-overload]
                yield self._keep(first.result())
        finally:
            self._failed.remove_done_callback(ended.put_nowait)
            await self._cancel_all()
            self.ended.set()

    async def _announce(self, attempts: Sequence[Attempt]) -> None:
        submitted = tuple(_submitted(attempt) for attempt in attempts)
        session = self._services.session
        for start in range(0, len(submitted), SUBMITTED_AT_ONCE):
            part = submitted[start : start + SUBMITTED_AT_ONCE]
            try:
                request = ask_scheduler(self._client, SubmitTrajectories(session, part))
                await self._channel.unless_failed(request)
            except (OSError, RuntimeError) as error:
                raise ClusterLost(f"the trajectories were not submitted: {error}") from None

    def _cancel_running(self) -> None:
        for context in self._contexts.values():
            context.interrupt()
        for task in self._running:
            task.cancel()

    async def _cancel_all(self) -> None:
        self._cancel_running()
        if self._running:
            await asyncio.wait(self._running)
            for task in self._running:
                task.exception()  # `run` raises the failure of the control plane; these follow from it
            self._running.clear()

    def _keep(self, record: TrajectoryRecord) -> TrajectoryRecord:
        self.finished += 1
        self.unfinished -= 1
        if self._writer is not None and self.stores(record):
            self._writer.finish(record)
        return record

    def stores(self, record: TrajectoryRecord) -> bool:
        """Whether a record of this run goes to its store, if there is one."""
        return self._writer is not None and not self.is_left_to_resume(record)

    def is_left_to_resume(self, record: TrajectoryRecord) -> bool:
        """Whether a resumed run will go on with this trajectory."""
        return self._to_resume and record.status == "aborted"

    async def _run_one(self, attempt: Attempt) -> TrajectoryRecord:
        trajectory_id = attempt.spec.trajectory_id
        context = LiveContext(self._services, attempt.spec, attempt.seed, attempt.recorded)
        started_s = self._services.clock()
        limit: asyncio.Timeout | None = None
        try:
            if self._interrupted:
                raise asyncio.CancelledError
            await self._admitted[trajectory_id].wait()
            started_s = self._services.clock()
            self._contexts[trajectory_id] = context
            async with asyncio.timeout(self._services.budget.max_trajectory_s) as limit:
                returned = await self._environment.solve(attempt.task, context)
            reward = Reward.of(returned)
            reward = replace(reward, metadata={**stored_metadata(context.metadata), **reward.metadata})
            ending = Ending("truncated" if context.was_stopped else "completed", reward=reward)
        # A program that exits ends its trajectory: as an error of its task, it would end the event loop and the run.
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            ending = self._ending_of(error)
            if limit is not None and limit.expired() and isinstance(error, TimeoutError):
                ending = Ending(
                    "truncated", "time", f"it took longer than {self._services.budget.max_trajectory_s:g} s"
                )
            ending = replace(ending, reward=_unfinished(context.metadata))
        context.end()
        self._contexts.pop(trajectory_id, None)
        self._admitted.pop(trajectory_id, None)
        self.generated_tokens += context.generated_tokens
        for branch in context.branches():
            if branch.announced is not None:
                self._tell_ended(branch.announced, ending)
        return self._record(attempt, context, ending, started_s)

    def _ending_of(self, error: BaseException) -> Ending:
        story = "".join(traceback.format_exception(error))
        match error:
            case BudgetExhausted():
                return Ending("truncated", "context", str(error))
            case StepLost():
                return Ending("failed", "engine", str(error))
            case ActionFailed():
                return Ending("failed", "action", f"{story}\n{error.detail}".rstrip())
            case asyncio.CancelledError():
                return Ending("aborted", "user", "interrupted")
            case ReplayDiverged():
                return Ending("failed", "driver", story)
            case _:
                # What is wrong comes first: a report may show one line.
                (what, *_) = f"{type(error).__name__}: {error}".splitlines()
                return Ending("failed", "agent", f"{what}\n{story}")

    def _tell_ended(self, trajectory_id: TrajectoryId, ending: Ending) -> None:
        """Report the end to the controller, with all others of this turn of the loop."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._send_ended)
        end = self._services.submitter.take_piggybacked_end(trajectory_id)
        self._ended.append(EndedTrajectory(trajectory_id, ending.status, end, ending.cause))

    def _send_ended(self) -> None:
        ended, self._ended = self._ended, []
        if self._client.status == "running":
            send(self._client, TrajectoriesEndedReport(self._services.session, tuple(ended)))

    def _record(
        self, attempt: Attempt, context: LiveContext, ending: Ending, started_s: float
    ) -> TrajectoryRecord:
        branches = list(context.branches())
        return TrajectoryRecord(
            trajectory_id=attempt.spec.trajectory_id,
            group_id=attempt.spec.group_id,
            task_id=attempt.task.task_id,
            environment=self._environment.name,
            sample_index=attempt.spec.sample_index,
            seed=attempt.seed,
            status=ending.status,
            cause=ending.cause,
            detail=ending.detail,
            reward=ending.reward.value,
            reward_parts=ending.reward.parts,
            metadata=ending.reward.metadata,
            branches=tuple(branch.finished_record for branch in branches),
            steps=tuple(
                replace(step, branch=number)
                for number, branch in enumerate(branches)
                for step in branch.steps
            ),
            actions=tuple(
                replace(action, branch=number)
                for number, branch in enumerate(branches)
                for action in branch.actions
            ),
            started_s=started_s,
            finished_s=self._services.clock(),
            domain=attempt.spec.domain,
            message_tokens=attempt.spec.message_tokens,
            max_steps=attempt.spec.max_steps,
        )


def progress_of(driver: Driver | None) -> dict[str, int]:
    """Trajectories that have and have not ended, and tokens generated; zeros before the first batch."""
    if driver is None:
        return dict.fromkeys(("finished", "unfinished", "tokens"), 0)
    return {"finished": driver.finished, "unfinished": driver.unfinished, "tokens": driver.live_tokens}


def _unfinished(metadata: Mapping[str, Any]) -> Reward:
    """No reward, with what the program had set before it ended early; where that cannot be stored, nothing."""
    with contextlib.suppress(BadInput):
        return Reward(None, metadata=metadata)
    return Reward(None)


def _submitted(attempt: Attempt) -> SubmittedTrajectory:
    """The trajectory with the work that is left to this session, where its task knows the whole."""
    task, done = attempt.task, attempt.recorded or Recorded()
    return SubmittedTrajectory(
        attempt.spec,
        known_tokens=max(task.known_tokens - done.generated_tokens, 0),
        known_tools_s=max(task.known_tools_s - done.tools_s, 0),
        known_observed_tokens=max(task.known_observed_tokens - done.observed_tokens, 0),
    )
