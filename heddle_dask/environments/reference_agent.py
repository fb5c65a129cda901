"""`oracle`: the agent that does what the author of a task did. It tells whether tasks work here at all."""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.core.errors import BadInput, text_of
from heddle_dask.environments.agent_tasks import AgentTasks, prepare_task, verified
from heddle_dask.environments.base import Context, Reward, Task

ORACLE = "oracle"


class ReferenceAgent:
    """An environment in which the solution of each task's author is run and verified; no model is asked."""

    def __init__(self, tasks: AgentTasks) -> None:
        self._tasks = tasks

    @property
    def name(self) -> str:
        return f"{ORACLE}:{self._tasks.name}"

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return self._tasks.tasks(count, seed)

    async def solve(self, task: Task, ctx: Context) -> float | Reward | None:
        """Run the solution in the sandbox of the task, and verify what it left; unknown where there is none."""
        async with ctx.sandbox(**self._tasks.sandbox(task)) as box:
            await prepare_task(self._tasks, task, box)
            try:
                await self._tasks.run_reference(task, box)
            except BadInput as error:
                return Reward(None, metadata={"verifier": text_of(error)})
            return await verified(self._tasks, task, box, ctx)
