"""What `Rollout` is given in several forms, in the one form that it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.kinds import engine_kind
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Environment, Task
from heddle_dask.environments.functions import as_environment
from heddle_dask.live.driver.services import Budget

Tasks = int | Sequence[Task | str]


def environment_of(env: object) -> Environment:
    """An environment from its name, ``replay:TRACE``, ``package.module:function``, a coroutine function or itself.

    Raises
    ------
    BadInput
        There is none of that name, or it is none.
    """
    if isinstance(env, str):
        # Names load the environments that ship, and with them libraries that a user's own may not need.
        from heddle_dask.environments.loading import load_environment

        loaded: Environment = load_environment(env)
        return loaded
    return as_environment(env)


def engine_spec_of(
    engine: str | EngineSpec,
    model: str,
    slots: int,
    kv_transfer: bool,
    budget: Budget,
    seed: int,
    cost: Mapping[str, Any] | None,
) -> EngineSpec:
    """An engine named by its kind, or a whole one, which stays as it is.

    Raises
    ------
    BadInput
        There is no such kind, or a number cannot be.
    """
    if isinstance(engine, EngineSpec):
        return engine
    return EngineSpec(
        kind=engine,
        model=model,
        slots=slots,
        kv_transfer=kv_transfer,
        max_model_len=budget.max_context_tokens,
        seed=seed,
        options=engine_kind(engine).options_for(cost),
    )


def tasks_of(tasks: Tasks, environment: Environment, seed: int) -> list[Task]:
    """Tasks drawn from the environment, or those given; a string is a prompt.

    Raises
    ------
    BadInput
        There is none, or two have the same id.
    """
    if isinstance(tasks, int):
        if tasks < 1:
            raise BadInput(f"tasks is {tasks}: use at least 1")
        chosen = list(environment.tasks(tasks, seed))
    else:
        chosen = [
            Task(task_id=f"task-{i}", prompt=task) if isinstance(task, str) else task
            for i, task in enumerate(tasks)
        ]
    seen: set[str] = set()
    for task in chosen:
        if task.task_id in seen:
            raise BadInput(f"two tasks have the id '{task.task_id}': give each its own")
        seen.add(task.task_id)
    return chosen
