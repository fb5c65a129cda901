"""An environment from an agent program alone: the user writes only `async def solve(task, ctx)`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Context, Environment, Reward, Task

Solve = Callable[[Task, Context], Awaitable[float | Reward | None]]


class FunctionEnvironment:
    """An environment from a function and its tasks.

    Parameters
    ----------
    solve
        ``async def solve(task, ctx)``, returns the reward or None. Its attribute ``can_replay`` is the environment's.
    name
        Stored with each trajectory.
    tasks
        ``tasks(count, seed)``; None: numbered tasks with an empty prompt.
    """

    def __init__(
        self,
        solve: Solve,
        *,
        name: str,
        tasks: Callable[[int, int], Sequence[Task]] | None = None,
    ) -> None:
        self._solve = solve
        self._name = name
        self._tasks = tasks
        self.can_replay = bool(getattr(solve, "can_replay", True))

    @property
    def name(self) -> str:
        return self._name

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        if self._tasks is not None:
            return self._tasks(count, seed)
        return [Task(f"{self._name}-{seed}-{i}", "") for i in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float | Reward | None:
        return await self._solve(task, ctx)


def is_environment(value: object) -> bool:
    return (
        callable(getattr(value, "tasks", None))
        and inspect.iscoroutinefunction(getattr(value, "solve", None))
        and isinstance(getattr(value, "name", None), str)
    )


def as_environment(env: object) -> Environment:
    """An `Environment` from one, or from a coroutine function ``solve(task, ctx)``."""
    if not isinstance(env, type) and is_environment(env):
        return cast(Environment, env)
    if inspect.iscoroutinefunction(env):
        return FunctionEnvironment(env, name=env.__name__)
    raise BadInput(
        f"env is a {type(env).__name__}: give a name, an environment (name, tasks, solve), or "
        "`async def solve(task, ctx)`, or with tools= a function `score(task, answer)`"
    )
