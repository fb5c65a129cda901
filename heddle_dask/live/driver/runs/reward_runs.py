"""Rewards of a batch: each is dispatched when its program has ended, and overlaps the generation of the others."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heddle_dask.core.errors import BadInput, cut_text
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.environments.actions import ActionContext, FunctionCall, ServiceCall
from heddle_dask.environments.base import ActionFailed, Environment, Reward, Task
from heddle_dask.environments.rewards import Transcript, group_reward_hook, reward_hook
from heddle_dask.live.driver.programs.action_calls import ActionCalls
from heddle_dask.live.driver.programs.branch import Branch, BranchPort, BranchTree, Recorded, Services
from heddle_dask.live.driver.programs.service_calls import service_call
from heddle_dask.records.causes import message_of
from heddle_dask.records.trajectory import ActionRecord

REWARD_PATH = "!reward"
"""Under which the actions of a reward are journalled, as those of a branch."""

REWARD_RESULT = "reward"
"""Kind of the journal record of a reward that is known or has failed."""


@dataclass(frozen=True, slots=True)
class ComputedReward:
    """What came of a reward: its value, or the cause of its failure (`TrajectoryRecord.reward_cause`)."""

    reward: Reward
    cause: str = ""
    detail: str = ""

    @classmethod
    def of(cls, reward: Reward) -> ComputedReward:
        """A reward that was given, with the cause where some of it is not finite."""
        return cls(reward, reward.cause, reward.unknown)

    @classmethod
    def failed(cls, error: BaseException, metadata: Mapping[str, Any]) -> ComputedReward:
        """A reward that is unknown because of this error."""
        story = cut_text("".join(traceback.format_exception(error)))
        match error:
            case ActionFailed():
                cause, story = error.cause, f"{error}\n{error.detail}".rstrip()
            case TimeoutError():
                cause = "time"
            case _:
                cause, story = "hook", f"{message_of(story)}\n{story}"
        return cls(Reward(None, metadata=metadata), cause, story)

    def as_body(self) -> dict[str, Any]:
        reward = self.reward
        return {
            "value": reward.value,
            "parts": dict(reward.parts),
            "metadata": dict(reward.metadata),
            "cause": self.cause,
            "detail": self.detail,
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> ComputedReward:
        reward = Reward(body["value"], body["parts"], body["metadata"])
        return cls(reward, body["cause"], body["detail"])


class LiveRewardContext(ActionContext):
    """What the hook of one reward uses; implements `environments.rewards.RewardContext`."""

    def __init__(self, services: Services, spec: TrajectorySpec, name: str, seed: int, recorded: Recorded) -> None:
        branch = Branch(BranchTree(TrajectoryId(name), recorded.branches), REWARD_PATH)
        self._port = BranchPort(services, spec, branch.recorded, branch)
        self._port.announced = True  # its trajectory is
        self._calls = ActionCalls(self._port)
        self._seed = seed

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def actions(self) -> list[ActionRecord]:
        """Its actions, in the order of their calls."""
        return self._calls.records

    async def _perform(self, call: FunctionCall) -> Any:
        return await self._calls.run(replace(call, kind="reward"), after_step=-1)

    async def _ask_service(self, asked: ServiceCall) -> Any:
        # Its trajectory's tokens are the transcript's: the hook names those that it means.
        call = service_call(asked, self._port.services.pools, own_tokens=None)
        return await self._perform(call)

    def end(self) -> None:
        """The hook has ended: what it has left running is cancelled."""
        self._port.branch.tree.end()


@dataclass(slots=True)
class ScoredAttempt:
    """An attempt whose program has ended, while its reward is computed."""

    task: Task
    name: str  # its id in journal and store
    group: str  # tells the attempts that are rewarded together from others
    transcript: Transcript
    given: Reward  # what `solve` returned
    recorded: Recorded
    context: LiveRewardContext  # of its hooks


class Rewards:
    """The rewards of one environment's trajectories."""

    def __init__(self, environment: Environment, services: Services) -> None:
        self._own = reward_hook(environment)
        self._of_group = group_reward_hook(environment)
        self._services = services
        self._groups: dict[str, _Group] = {}

    def expect(self, group: str, attempts: int, members: int | None = None) -> None:
        """Attempts of a group are about to run.

        Parameters
        ----------
        members
            As many as are rewarded together: the first to end. None: all.
        """
        if self._of_group is not None:
            known = self._groups.setdefault(group, _Group())
            known.add(attempts, attempts if members is None else members)

    @property
    def follow(self) -> bool:
        """Whether the environment computes rewards after its programs."""
        return self._own is not None or self._of_group is not None

    def missing(self, group: str) -> None:
        """An attempt of this group has ended without a transcript: its group does not wait for it."""
        if self._of_group is not None:
            self._arrive(group, None)

    def _arrive(self, name: str, attempt: ScoredAttempt | None) -> _Group:
        group = self._groups[name]
        if group.arrive(attempt) == 0:
            del self._groups[name]
        return group

    async def compute(self, attempt: ScoredAttempt) -> ComputedReward:
        """The reward of an attempt, which is journalled; one that was journalled is taken as it is.

        A failure is a value: the reward is unknown then.
        """
        if attempt.recorded.reward is not None:
            self.missing(attempt.group)
            return ComputedReward.from_body(attempt.recorded.reward)
        try:
            own = ComputedReward.of(attempt.given)
            if self._own is not None:
                own = await self._guarded(attempt, self._reward(attempt))
            if self._of_group is None:
                self._journal(attempt, own)
                return own
        except asyncio.CancelledError:
            self.missing(attempt.group)
            raise
        attempt.transcript = replace(attempt.transcript, reward=own.reward.value)
        group = self._arrive(attempt.group, attempt)
        await group.complete.wait()
        leader = group.leader
        if leader is attempt:
            await self._reward_group(group)
        return await asyncio.shield(group.results[attempt.name])

    async def _guarded(self, attempt: ScoredAttempt, computing: Any) -> ComputedReward:
        """Within the time limit of a trajectory, which begins anew."""
        try:
            async with asyncio.timeout(self._services.budget.max_trajectory_s):
                return ComputedReward.of(await computing)
        except (Exception, SystemExit) as error:
            return ComputedReward.failed(error, attempt.given.metadata)

    async def _reward(self, attempt: ScoredAttempt) -> Reward:
        assert self._own is not None
        value = Reward.of(await self._own(attempt.task, attempt.transcript, attempt.context))
        return _with_metadata(value, attempt.given)

    async def _reward_group(self, group: _Group) -> None:
        """Compute the rewards of all members; whatever happens, each gets a result."""
        assert self._of_group is not None
        leader, members = group.leader, group.members
        assert leader is not None
        try:
            async with asyncio.timeout(self._services.budget.max_trajectory_s):
                transcripts = [member.transcript for member in members]
                values = list(await self._of_group(leader.task, transcripts, leader.context))
            if len(values) != len(members):
                raise BadInput(f"group_reward returned {len(values)} rewards for {len(members)} attempts")
            rewards = [_with_metadata(Reward.of(v), m.given) for v, m in zip(values, members, strict=True)]
            results = [ComputedReward.of(reward) for reward in rewards]
        except (Exception, SystemExit) as error:
            results = [ComputedReward.failed(error, member.given.metadata) for member in members]
        except asyncio.CancelledError:
            for result in group.results.values():
                result.cancel()
            raise
        # All of them, before the first one is stored: a run that is resumed needs no other member.
        # Each record has the whole group: after a crash in the middle, the first one is enough.
        names = [member.name for member in members]
        bodies = {name: computed.as_body() for name, computed in zip(names, results, strict=True)}
        for member, computed in zip(members, results, strict=True):
            self._journal(member, computed, bodies)
        for name, computed in zip(names, results, strict=True):
            group.results[name].set_result(computed)

    def _journal(
        self, attempt: ScoredAttempt, computed: ComputedReward, group: Mapping[str, Any] | None = None
    ) -> None:
        body = {"trajectory_id": attempt.name, **computed.as_body()}
        self._services.journal(REWARD_RESULT, body | ({"group": group} if group else {}))


class _Group:
    """Attempts that are rewarded together: complete when enough have arrived, with or without a transcript."""

    def __init__(self) -> None:
        self._left = 0
        self._members = 0
        self._arrived: list[ScoredAttempt] = []
        self.complete = asyncio.Event()
        self.members: Sequence[ScoredAttempt] = ()
        self.results: dict[str, asyncio.Future[ComputedReward]] = {}

    def add(self, attempts: int, members: int) -> None:
        self._left += attempts
        self._members += members

    @property
    def leader(self) -> ScoredAttempt | None:
        """The member that computes the rewards, the same after a crash."""
        return next(iter(self.members), None)

    def arrive(self, attempt: ScoredAttempt | None) -> int:
        """An attempt has ended; how many are left. One that comes after the group is complete has no reward."""
        self._left -= 1
        if attempt is not None:
            self._arrived.append(attempt)
            self.results[attempt.name] = asyncio.get_running_loop().create_future()
        if not self.complete.is_set() and (self._left <= 0 or len(self._arrived) >= self._members):
            # By the position in their group.
            self.members = sorted(self._arrived, key=lambda each: each.transcript.sample_index)
            self.complete.set()
        return self._left


def _with_metadata(value: Reward, given: Reward) -> Reward:
    return replace(value, metadata={**given.metadata, **value.metadata})
