"""Rewards that are computed after the program has ended: hooks of an environment, and what they are given.

An environment may have, beside `solve`, either or both of

- ``async def reward(self, task, transcript, ctx)``: the reward of one attempt;
- ``async def group_reward(self, task, transcripts, ctx)``: one reward for each attempt at a task, in their order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from heddle_dask.environments.actions import ActionContext
from heddle_dask.environments.base import Reward, Task
from heddle_dask.environments.input_identity import code_digest


@dataclass(frozen=True, slots=True)
class Transcript:
    """One finished attempt, as its reward sees it. Can be pickled, for arguments of an action.

    Attributes
    ----------
    status
        ``"completed"`` or ``"truncated"``.
    replies
        The text of each step of the main branch, in order.
    text
        The whole main branch decoded, prompts and tool results included.
    reward
        What `solve` returned, or for a `group_reward` the result of `reward`; None: nothing.
    metadata
        What the program has set, and the metadata of that reward.
    token_ids
        The tokens of the main branch, prompts and tool results included.
    """

    trajectory_id: str
    task_id: str
    sample_index: int
    status: str
    replies: tuple[str, ...]
    text: str
    reward: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """JSON-able form without the tokens, which `HttpReward` sends."""
        return {
            "trajectory_id": self.trajectory_id,
            "task_id": self.task_id,
            "sample_index": self.sample_index,
            "status": self.status,
            "replies": list(self.replies),
            "text": self.text,
            "reward": self.reward,
            "metadata": dict(self.metadata),
        }


class RewardContext(ActionContext, Protocol):
    """What the hook of a reward may use. The trajectory holds no engine any more, so there is no `generate`."""

    @property
    def seed(self) -> int:
        """That of `Context.seed` in its program."""


RewardHook = Callable[[Task, Transcript, RewardContext], Awaitable[float | Reward | None]]
GroupRewardHook = Callable[[Task, Sequence[Transcript], RewardContext], Awaitable[Sequence[float | Reward | None]]]


def reward_hook(environment: object) -> RewardHook | None:
    """The environment's hook for the reward of one attempt, if it has one."""
    hook: RewardHook | None = getattr(environment, "reward", None)
    return hook if callable(hook) else None


def reward_identity(environment: object) -> dict[str, str]:
    """What computes the rewards of an environment, or of the parts of a mix: a digest of each hook.

    An environment may have an attribute `reward_identity`, a text, which then stands for its hook.
    """
    found: dict[str, str] = {}
    parts = getattr(environment, "parts", None)
    if isinstance(parts, Mapping):
        found = {
            f"{name}: {hook}": text for name, part in parts.items() for hook, text in reward_identity(part).items()
        }
    for name, hook in (("reward", reward_hook(environment)), ("group_reward", group_reward_hook(environment))):
        if hook is not None:
            stated = getattr(environment, "reward_identity", "") if name == "reward" else ""
            found[name] = str(stated) or code_digest(hook)
    return found


def group_reward_hook(environment: object) -> GroupRewardHook | None:
    """The environment's hook for the rewards of all attempts at a task, if it has one."""
    hook: GroupRewardHook | None = getattr(environment, "group_reward", None)
    return hook if callable(hook) else None
