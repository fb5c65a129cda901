"""A bare agent program as an environment: `async def solve(task, ctx)` is all that a user has to write."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Context, Environment, Task

Program = Callable[[Task, Context], Awaitable[float | None]]


@dataclass(frozen=True)
class FunctionEnvironment:
    """Runs one coroutine function.

    Attributes
    ----------
    program
        ``async def solve(task, ctx) -> float | None``. When it has an attribute ``tasks``, that is called with
        (count, seed) for the tasks; else they are numbered and their prompts are empty.
    """

    name: str
    program: Program

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """The program's own tasks, or numbered ones."""
        own = getattr(self.program, "tasks", None)
        if own is not None:
            return list(own(count, seed))
        return [Task(task_id=f"task-{index}", prompt="") for index in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float | None:
        """Run the program."""
        return await self.program(task, ctx)


def as_environment(env: object) -> Environment:
    """An `Environment` from one, or from a coroutine function.

    Raises
    ------
    BadInput
        It is neither.
    """
    if callable(getattr(env, "solve", None)) and callable(getattr(env, "tasks", None)):
        return env  # type: ignore[return-value]
    if inspect.iscoroutinefunction(env):
        return FunctionEnvironment(env.__name__, env)
    raise BadInput(
        f"env is a {type(env).__name__}: give a name, an Environment, or `async def solve(task, ctx)`"
    )
