"""How a program ended, and what that says of its environment."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import ActionFailed, EnvironmentFailed, Reward
from heddle_dask.live.driver.programs.program_errors import (
    BudgetExhausted,
    ReplayDiverged,
    SandboxDiffers,
    StepLost,
)
from heddle_dask.records.trajectory import Cause, Status


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended."""

    status: Status
    cause: Cause = ""
    detail: str = ""
    reward: Reward = field(default_factory=lambda: Reward(None))
    reward_cause: str = ""
    reward_detail: str = ""

    @property
    def environment_failed(self) -> bool:
        """Whether neither the agent nor the task is to blame, so that the trajectory is attempted again."""
        return self.cause == "environment"


def ending_of(error: BaseException, *, lost_tools: bool) -> Ending:
    """How a program ended that raised this.

    Parameters
    ----------
    lost_tools
        Whether an action whose machines were lost is a failure of the environment, or of the action.
    """
    story = "".join(traceback.format_exception(error))
    match error:
        case BudgetExhausted():
            return Ending("truncated", "context", str(error))
        case StepLost():
            return Ending("failed", "engine", str(error))
        case EnvironmentFailed():
            return Ending("failed", "environment", f"{error}\n{story}")
        case ActionFailed():
            if lost_tools and error.cause == "lost":
                return Ending("failed", "environment", f"{error}\n{error.detail}".rstrip())
            return Ending("failed", "action", f"{story}\n{error.detail}".rstrip())
        case SandboxDiffers():
            return Ending("failed", "sandbox", str(error))
        case asyncio.CancelledError():
            return Ending("aborted", "user", "interrupted")
        case ReplayDiverged():
            return Ending("failed", "driver", story)
        case _:
            # What is wrong comes first: a report may show one line.
            (what, *_) = f"{type(error).__name__}: {error}".splitlines()
            return Ending("failed", "agent", f"{what}\n{story}")


def unfinished_reward(metadata: Mapping[str, Any]) -> Reward:
    """No reward, with what the program had set before it ended early; where that cannot be stored, nothing."""
    with contextlib.suppress(BadInput):
        return Reward(None, metadata=metadata)
    return Reward(None)
