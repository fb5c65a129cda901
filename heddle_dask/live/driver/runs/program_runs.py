"""Runs the agent program of one attempt, and turns it into exactly one record.

A program that raises, is stopped, or loses its engine becomes a record with a status and a cause. One whose environment
failed runs again in a fresh one, with back-off, as a new trajectory for the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distributed import Client

from heddle_dask.core.events import ProgramEnded, TrajectoryEnded
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.environments.base import Reward, stored_metadata
from heddle_dask.environments.rewards import Transcript
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.live.driver.programs.branch import Services
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.live.driver.runs.announcer import Announcer
from heddle_dask.live.driver.runs.endings import (
    Ending,
    EnvironmentFailures,
    ending_of,
    ending_of_return,
    unfinished_reward,
)
from heddle_dask.live.driver.runs.reward_runs import LiveRewardContext, Rewards, ScoredAttempt
from heddle_dask.live.wire.driver_messages import EndedTrajectory, TrajectoriesEndedReport
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report
from heddle_dask.live.wire.transport import send
from heddle_dask.records.causes import message_of
from heddle_dask.records.trajectory import ActionRecord, Cause, TrajectoryRecord
from heddle_dask.records.trajectory_prefix import PREFIX


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    attempt: Attempt
    record: TrajectoryRecord
    lost_tokens: int = 0  # sampled before its environment failed, in attempts that do not count
    # Sampled in the attempt that counts, in steps that were cancelled after a part of them was answered.
    dropped_tokens: int = 0


class ProgramRuns:
    def __init__(
        self,
        client: Client,
        services: Services,
        admission: Announcer,
        failures: EnvironmentFailures,
        *,
        # Whether an action whose machines were lost is a failure of the environment; else it fails the trajectory.
        retry_lost_tools: bool,
    ) -> None:
        self._client = client
        self._services = services
        self._admission = admission
        self._failures = failures
        self._retry_lost_tools = retry_lost_tools
        self._contexts: dict[str, LiveContext] = {}
        self._cancelled: dict[str, Cause] = {}
        self._rewards: dict[str, Rewards] = {}
        self._ended: list[EndedTrajectory] = []
        self.interrupted = False
        self.generated_tokens = 0

    @property
    def live_tokens(self) -> int:
        """Tokens generated so far, unfinished trajectories included."""
        return self.generated_tokens + sum(c.generated_tokens for c in self._contexts.values())

    def expect(self, attempts: Sequence[Attempt], members: int | None = None) -> None:
        """Attempts are about to run; of each group, the first `members` to end are rewarded together (None: all)."""
        groups: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            groups.setdefault(_group_of(attempt), []).append(attempt)
        for name, mine in groups.items():
            self._rewards_of(mine[0]).expect(name, len(mine), members)

    def interrupt(self) -> None:
        """The run is ending: steps that are cancelled from now on are not the program's doing."""
        for context in self._contexts.values():
            context.interrupt()

    def cancel(self, name: str, cause: Cause) -> None:
        """The attempt will be cancelled, for this cause."""
        self._cancelled.setdefault(name, cause)
        context = self._contexts.get(name)
        if context is not None:
            context.interrupt()

    async def run(self, attempt: Attempt) -> EndedAttempt:
        """Run an attempt to its end, in fresh environments where those before have failed."""
        lost_tokens = 0
        if attempt.recorded is not None:
            lost_tokens = attempt.recorded.lost_tokens + attempt.recorded.interrupted_tokens
        while True:
            record, sampled, is_scored = await self._run_once(attempt)
            task = (attempt.environment.name, attempt.task.task_id)
            if record.cause != "environment":
                if record.status != "aborted":
                    self._failures.succeeded(task)
                break
            again = attempt.in_fresh_environment()
            failures = again.failures - again.begun_again
            if not self._failures.failed(task, failures, message_of(record.detail)):
                break
            lost_tokens += sampled
            self._services.journal(
                "environment-failed",
                {"trajectory_id": attempt.name, "failures": again.failures, "tokens": sampled},
            )
            # Its results are not replayed; those of the fresh environment have a path of their own.
            attempt = again
            await self._back_off(attempt)
        if not is_scored:
            self._rewards_of(attempt).missing(_group_of(attempt))
        self._cancelled.pop(attempt.name, None)
        return EndedAttempt(attempt, record, lost_tokens, sampled - record.generated_tokens)

    async def _back_off(self, attempt: Attempt) -> None:
        """Wait, then announce the attempt again. One that is cancelled meanwhile ends when it is run."""
        try:
            await asyncio.sleep(self._failures.backoff_s(attempt.failures))
            self._admission.expect([attempt])
            await self._admission.announce([attempt])
        except asyncio.CancelledError:
            self._cancelled.setdefault(attempt.name, "user")

    async def _run_once(self, attempt: Attempt) -> tuple[TrajectoryRecord, int, bool]:
        """The record, the tokens sampled in all branches and steps, and whether a reward was asked for."""
        context = LiveContext(
            *(self._services, attempt.spec, attempt.seed, attempt.replayed, attempt.branch(), attempt.prefix)
        )
        if self._services.tools:
            context.set_template(tools=self._services.tools)
        ending, started_s = await self._run_program(attempt, context)
        context.end()
        self._contexts.pop(attempt.name, None)
        self._admission.forget(attempt.spec.trajectory_id)
        self.generated_tokens += context.generated_tokens
        sampled = context.generated_tokens + context.dropped_tokens
        scored = self._scored(attempt, context, ending)
        main = attempt.spec.trajectory_id
        for branch in context.branches():
            if branch.announced is not None and (scored is None or branch.announced != main):
                self._tell_ended(branch.announced, ending)
        if scored is None:
            return self._record(attempt, context, ending, started_s), sampled, False
        ending = await self._score(attempt, scored, ending)
        self._tell_ended(main, ending)
        record = self._record(attempt, context, ending, started_s, scored.context.actions)
        return record, sampled, True

    async def _run_program(self, attempt: Attempt, context: LiveContext) -> tuple[Ending, float]:
        """How the program of an attempt ended, and when it began."""
        started_s = self._services.clock()
        limit: asyncio.Timeout | None = None
        try:
            if self.interrupted or attempt.name in self._cancelled:
                raise asyncio.CancelledError
            message = self._failures.quarantined.get((attempt.environment.name, attempt.task.task_id))
            if message is not None:
                return Ending("failed", "environment", f"its task is quarantined: {message}"), started_s
            await self._admission.wait(attempt.spec.trajectory_id)
            started_s = self._services.clock()
            self._contexts[attempt.name] = context
            async with asyncio.timeout(self._services.budget.max_trajectory_s) as limit:
                returned = await attempt.environment.solve(attempt.task, context)
            context.check_prefix()
            reward = Reward.of(returned)
            reward = replace(reward, metadata={**stored_metadata(context.metadata), **reward.metadata})
            ending = ending_of_return(reward, was_stopped=context.was_stopped)
        # A program that exits ends its trajectory: as an error of its task, it would end the event loop and the run.
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            ending = self._ending_of(attempt, error)
            if limit is not None and limit.expired() and isinstance(error, TimeoutError):
                ending = Ending(
                    "truncated", "time", f"it took longer than {self._services.budget.max_trajectory_s:g} s"
                )
            ending = replace(ending, reward=unfinished_reward(context.metadata))
        return ending, started_s

    def _ending_of(self, attempt: Attempt, error: BaseException) -> Ending:
        """How a program ended that raised this; whatever a cancelled one raises, it was cancelled."""
        cause = self._cancelled.get(attempt.name, "user")
        if cause != "user":
            return Ending("aborted", cause, f"cancelled: {cause}")
        return ending_of(error, lost_tools=self._retry_lost_tools)

    def _rewards_of(self, attempt: Attempt) -> Rewards:
        name = attempt.environment.name
        if name not in self._rewards:
            self._rewards[name] = Rewards(attempt.environment, self._services)
        return self._rewards[name]

    def _scored(self, attempt: Attempt, context: LiveContext, ending: Ending) -> ScoredAttempt | None:
        """The attempt as its reward sees it; None without one: a program that did not return has no reward."""
        if not self._rewards_of(attempt).follow or not ending.returned:
            return None
        recorded = attempt.replayed
        texts = context.transcript_texts()
        transcript = Transcript(
            attempt.name,
            attempt.task.task_id,
            attempt.spec.sample_index,
            ending.status,
            *texts,
            reward=ending.reward.value,
            metadata=ending.reward.metadata,
            token_ids=tuple(context.finished_record.token_ids.tolist()),
        )
        whole = attempt.recorded or recorded
        hooks = LiveRewardContext(self._services, attempt.spec, attempt.name, context.seed, whole)
        return ScoredAttempt(attempt.task, attempt.name, _group_of(attempt), transcript, ending.reward, whole, hooks)

    async def _score(self, attempt: Attempt, scored: ScoredAttempt, ending: Ending) -> Ending:
        """The ending with its reward; the trajectory holds no engine meanwhile."""
        name = attempt.spec.trajectory_id
        if self._client.status == "running":
            send(self._client, Report(self._services.session, ProgramEnded(UNSTAMPED, name)))
        try:
            computed = await self._rewards_of(attempt).compute(scored)
        except asyncio.CancelledError as error:
            # A resumed run replays the program and computes the reward only.
            ended = self._ending_of(attempt, error)
            return replace(ended, reward=unfinished_reward(scored.given.metadata))
        finally:
            scored.context.end()
        return replace(ending, reward=computed.reward, reward_cause=computed.cause, reward_detail=computed.detail)

    def _tell_ended(self, trajectory_id: TrajectoryId, ending: Ending) -> None:
        """Report the end to the controller, with all others of this turn of the loop."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._send_ended)
        event = TrajectoryEnded(UNSTAMPED, trajectory_id, ending.status)
        message = message_of(ending.detail)
        self._ended.append(EndedTrajectory(event, ending.cause, ending.reward.value, message))

    def _send_ended(self) -> None:
        ended, self._ended = self._ended, []
        if self._client.status == "running":
            send(self._client, TrajectoriesEndedReport(self._services.session, tuple(ended)))

    def _record(
        self,
        attempt: Attempt,
        context: LiveContext,
        ending: Ending,
        started_s: float,
        reward_actions: Sequence[ActionRecord] = (),
    ) -> TrajectoryRecord:
        branches = list(context.branches())
        own = len(branches[0].actions)
        last_step = len(branches[0].steps) - 1
        metadata: dict[str, Any] = dict(ending.reward.metadata)
        if attempt.prefix is not None:
            metadata[PREFIX] = attempt.prefix.facts
        if attempt.failures > attempt.begun_again:
            metadata["environment_failures"] = attempt.failures - attempt.begun_again
        if attempt.begun_again:
            metadata["begun_again"] = attempt.begun_again
        return TrajectoryRecord(
            trajectory_id=attempt.name,
            group_id=attempt.spec.group_id,
            task_id=attempt.task.task_id,
            environment=attempt.environment.name,
            sample_index=attempt.spec.sample_index,
            seed=attempt.seed,
            status=ending.status,
            cause=ending.cause,
            detail=ending.detail,
            reward=ending.reward.value,
            reward_parts=ending.reward.parts,
            metadata=metadata,
            branches=tuple(branch.finished_record for branch in branches),
            steps=tuple(
                replace(step, branch=number) for number, branch in enumerate(branches) for step in branch.steps
            ),
            actions=(
                *(
                    replace(action, branch=number)
                    for number, branch in enumerate(branches)
                    for action in branch.actions
                ),
                # Those of the reward follow the actions of the main branch.
                *(
                    replace(action, action_index=own + number, after_step=last_step)
                    for number, action in enumerate(reward_actions)
                ),
            ),
            started_s=started_s,
            finished_s=self._services.clock(),
            domain=attempt.spec.domain,
            message_tokens=attempt.spec.message_tokens,
            max_steps=attempt.spec.max_steps,
            prompt_key=attempt.spec.prompt_key,
            reward_cause=ending.reward_cause,
            reward_detail=ending.reward_detail,
        )


def _group_of(attempt: Attempt) -> str:
    """The attempts that are rewarded together: those at one task in one group."""
    return f"{attempt.spec.group_id}\0{attempt.task.task_id}"
