"""How a program ended, and what that says of its environment: what is attempted again, which tasks are quarantined."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.core.errors import LINE_CHARACTERS, BadInput, cut_text, text_of
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.environments.base import NO_PROGRESS, OUT_OF_TIME, ActionFailed, EnvironmentFailed, Reward
from heddle_dask.live.driver.programs.action_calls import SandboxDiffers
from heddle_dask.live.driver.programs.branch import ReplayDiverged
from heddle_dask.live.driver.programs.prefix_replay import PrefixDiverged
from heddle_dask.live.driver.programs.steps import BudgetExhausted, StepLost
from heddle_dask.records.trajectory import Cause, Status

_MOST_DOUBLINGS = 6
_GIVEN_UP: Mapping[str, Cause] = {OUT_OF_TIME: "time", NO_PROGRESS: "no-progress"}


@dataclass(frozen=True, slots=True)
class Ending:
    status: Status
    cause: Cause = ""
    detail: str = ""
    reward: Reward = field(default_factory=lambda: Reward(None))
    reward_cause: str = ""
    reward_detail: str = ""
    # Whether the program has come to its own end, so that the trajectory can be rewarded.
    returned: bool = False


def ending_of_return(reward: Reward, *, was_stopped: bool) -> Ending:
    """How a program ended that returned this reward.

    Parameters
    ----------
    was_stopped
        Whether it was told that its budget is used up.
    """
    status: Status = "truncated" if was_stopped else "completed"
    cause: Cause = ""
    detail = ""
    for entry, cause_of_entry in _GIVEN_UP.items():
        if reason := reward.metadata.get(entry):
            status, cause, detail = "truncated", cause_of_entry, str(reason)
    return Ending(status, cause, detail, reward, reward.cause, reward.unknown, returned=True)


def ending_of(error: BaseException, *, lost_tools: bool) -> Ending:
    """How a program ended that raised this.

    Parameters
    ----------
    lost_tools
        Whether an action whose machines were lost is a failure of the environment, or of the action.
    """
    story = cut_text("".join(traceback.format_exception(error)))
    said = cut_text(text_of(error), LINE_CHARACTERS)
    match error:
        case BudgetExhausted():
            return Ending("truncated", "context", said)
        case StepLost():
            return Ending("failed", "engine", said)
        case EnvironmentFailed():
            return Ending("failed", "environment", f"{said}\n{story}")
        case ActionFailed():
            if lost_tools and error.cause == "lost":
                return Ending("failed", "environment", f"{said}\n{error.detail}".rstrip())
            return Ending("failed", "action", f"{story}\n{error.detail}".rstrip())
        case SandboxDiffers():
            return Ending("failed", "sandbox", said)
        case PrefixDiverged():
            return Ending("failed", "prefix", said)
        case asyncio.CancelledError():
            return Ending("aborted", "user", "interrupted")
        case ReplayDiverged():
            return Ending("failed", "driver", story)
        case _:
            # What is wrong comes first: a report may show one line.
            (what, *_) = f"{type(error).__name__}: {said}".splitlines()
            return Ending("failed", "agent", f"{what}\n{story}")


def unfinished_reward(metadata: Mapping[str, Any]) -> Reward:
    """No reward, with what the program had set before it ended early; where that cannot be stored, nothing."""
    with contextlib.suppress(BadInput):
        return Reward(None, metadata=metadata)
    return Reward(None)


TaskKey = tuple[str, str]
"""Names an environment and a task of it: parts of a mix may have tasks of the same id."""


class EnvironmentFailures:
    def __init__(
        self,
        retries: RetryPolicy,
        note: Callable[[str], None] = lambda line: None,  # takes one line for each task that is quarantined
    ) -> None:
        self._retries = retries
        self._note = note
        self._in_a_row: Counter[TaskKey] = Counter()
        self.count = 0  # attempts whose environment failed
        self.quarantined: dict[TaskKey, str] = {}  # tasks that are not attempted again, with the last message

    def backoff_s(self, failures: int) -> float:
        """Seconds before the attempt that follows this many failures."""
        return float(self._retries.environment_backoff_s * 2 ** min(failures - 1, _MOST_DOUBLINGS))

    def failed(self, task: TaskKey, failures: int, message: str) -> bool:
        """The environment of an attempt has failed; whether the trajectory is attempted again.

        Parameters
        ----------
        failures
            Of this trajectory, this one included.
        """
        self.count += 1
        self._in_a_row[task] += 1
        if self._in_a_row[task] >= self._retries.max_task_failures:
            self.quarantine(task, message)
        return task not in self.quarantined and failures < self._retries.max_environment_attempts

    def quarantine(self, task: TaskKey, message: str) -> None:
        if task not in self.quarantined:
            self.quarantined[task] = message
            times = self._in_a_row[task] or self._retries.max_task_failures
            self._note(f"task {task[1]} is quarantined: its environment failed {times} times: {message}")

    def succeeded(self, task: TaskKey) -> None:
        """An attempt at this task has come to its end."""
        self._in_a_row.pop(task, None)
