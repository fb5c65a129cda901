"""What a set of tasks gives to an agent that runs as it is in a sandbox: a place, an instruction, and a verdict.

`load_agent_tasks` finds the kind of a set by its path or name.
"""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from heddle_dask.core.errors import BadInput, text_of
from heddle_dask.core.needs import Needs
from heddle_dask.environments.base import ActionFailed, Context, EnvironmentFailed, Reward, Task
from heddle_dask.environments.named_object import named_object
from heddle_dask.environments.program_sandbox import ProgramSandbox
from heddle_dask.environments.task_sets.row_files import ROW_ENDINGS, first_row

# Names instead of classes: each class is imported on demand, with its own dependencies.
KINDS = {
    "harbor": "heddle_dask.environments.task_sets.harbor:HarborTasks",
    "swe": "heddle_dask.environments.task_sets.swe:SweTasks",
    "prompts": "heddle_dask.environments.task_sets.prompts:Prompts",
}
_SWE_COLUMNS = ("instance_id", "problem_statement", "base_commit")
FORMS = (
    f"allowed are a folder of Harbor's tasks, a file of rows ({', '.join(ROW_ENDINGS)}), a folder of them or one that "
    f"datasets has saved, with :SPLIT where it has several; KIND:PATH with a kind of {', '.join(KINDS)}; and "
    "package.module:object"
)
Chosen = TypeVar("Chosen")
_MOST_TOLD = 5
_LOG = logging.getLogger(__name__)
_noted: set[str] = set()
# What code of a user raises; what a context raises to end a program goes through.
_VERIFIER_FAILS = (
    *(ActionFailed, ArithmeticError, AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError),
)


class AgentTasks(Protocol):
    """Tasks for agents that know nothing of `Context`: commands that are run in a sandbox.

    A class of its own need only have `name`, `tasks`, `sandbox` and `verify` if it subclasses this one.
    """

    @property
    def name(self) -> str:
        """Short name stored with each trajectory."""

    @property
    def size(self) -> int | None:
        """Number of tasks that there are; None: any number."""
        return None

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` tasks, the same for the same seed.

        Raises
        ------
        BadInput
            There are fewer.
        """

    def sandbox(self, task: Task) -> Mapping[str, Any]:
        """Arguments of `Context.sandbox` for the sandbox in which the agent works."""

    def instruction(self, task: Task) -> str:
        """What the agent is told."""
        return task.prompt

    def limit_s(self, task: Task) -> float | None:
        """Seconds that the task gives the agent; None: it says nothing."""
        return None

    async def prepare(self, task: Task, sandbox: ProgramSandbox) -> None:
        """Make the sandbox ready, before the agent starts."""

    def work_directory(self, task: Task) -> str:
        """Where in the sandbox the agent works; empty: where its commands begin anyway."""
        return ""

    def variables(self, task: Task) -> Mapping[str, str]:
        """Environment variables that the task gives the agent."""
        return {}

    async def run_reference(self, task: Task, sandbox: ProgramSandbox) -> None:
        """Solve the task as its author does, in place of an agent.

        Raises
        ------
        BadInput
            No solution is known.
        """
        raise BadInput(f"task {task.task_id!r} of {self.name} has no solution of its author: use an agent")

    async def verify(self, task: Task, sandbox: ProgramSandbox, ctx: Context) -> float | Reward | None:
        """The reward for what the agent has left in the sandbox; None: unknown, or a reward hook gives it.

        Raises
        ------
        ActionFailed
            The sandbox, not the agent, has failed.
        """


_NEEDED = ("tasks", "sandbox", "instruction", "limit_s", "prepare", "verify")


def is_agent_tasks(value: object) -> bool:
    """Whether it has what `AgentTasks` asks for."""
    has_all = all(callable(getattr(value, name, None)) for name in _NEEDED)
    return has_all and not isinstance(value, type) and isinstance(getattr(value, "name", None), str)


async def prepare_task(tasks: AgentTasks, task: Task, sandbox: ProgramSandbox) -> None:
    """Start the sandbox of a task, and prepare the task in it.

    Raises
    ------
    EnvironmentFailed
        One of them fails: no agent has done anything yet.
    """
    try:
        await sandbox.exec("true", needs=Needs(cpus=0), label="sandbox", compared="status")
        await tasks.prepare(task, sandbox)
    except ActionFailed as error:
        raise EnvironmentFailed(f"the sandbox of task {task.task_id} could not be prepared: {error}") from error


async def verified(tasks: AgentTasks, task: Task, sandbox: ProgramSandbox, ctx: Context) -> float | Reward | None:
    """The verdict of a task; unknown, with the reason in the metadata, where its verifier fails."""
    try:
        return await tasks.verify(task, sandbox, ctx)
    except _VERIFIER_FAILS as error:
        if isinstance(error, ActionFailed) and error.cause == "lost":
            raise
        return Reward(None, metadata={"verifier": f"{type(error).__name__}: {text_of(error)}"})


def load_agent_tasks(text: str, *, options: Mapping[str, Any] | None = None) -> AgentTasks:
    """The set of tasks that a path or a name means.

    Parameters
    ----------
    text
        A path; ``KIND:PATH``; or ``package.module:object`` (or ``FILE.py:object``), an `AgentTasks` or a function
        without required arguments that makes one.
    options
        Keyword arguments of the class or the function.

    Raises
    ------
    BadInput
        There is nothing of that name, its kind is not known, or an option does not fit.
    """
    given = dict(options or {})
    kind, colon, rest = text.partition(":")
    if colon and kind in KINDS:
        return cast(AgentTasks, _made(text, _class_of(kind), (rest,), given))
    path = Path(text)
    found = path if path.exists() else Path(text.rpartition(":")[0])
    is_package = found != path and (found / "__init__.py").is_file()
    if str(found) != "." and found.exists() and found.suffix != ".py" and not is_package:
        return cast(AgentTasks, _made(text, _class_of(_kind_of(found, text)), (text,), given))
    if not colon:
        raise BadInput(f"no tasks {text!r}: there is no such path; {FORMS}")
    value = named_object(text, what="tasks")
    if not is_agent_tasks(value) and callable(value):
        value = _made(text, value, (), given)
    if not is_agent_tasks(value):
        lacks = [name for name in ("name", *_NEEDED) if not hasattr(value, name)]
        raise BadInput(f"tasks {text!r}: a {type(value).__name__} lacks {', '.join(lacks)}: see AgentTasks")
    return cast(AgentTasks, value)


def _kind_of(path: Path, text: str) -> str:
    """The kind of what is at a path."""
    if path.is_dir() and any(path.rglob("task.toml")):
        return "harbor"
    row = first_row(text)
    return "swe" if row is not None and all(column in row for column in _SWE_COLUMNS) else "prompts"


def _class_of(kind: str) -> Any:
    module_name, _, attribute = KINDS[kind].partition(":")
    return getattr(importlib.import_module(module_name), attribute)


def _made(text: str, make: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    try:
        return make(*args, **options)
    except BadInput:
        raise
    except Exception as error:  # a user's function
        raise BadInput(f"tasks {text!r}: {type(error).__name__}: {text_of(error)}") from error


def note_refused(name: str, refused: Mapping[str, str]) -> None:
    """Tell, once for each set, which of its tasks are left out, and why."""
    if refused and name not in _noted:
        _noted.add(name)
        reasons = "; ".join(f"{task}: {reason}" for task, reason in list(refused.items())[:_MOST_TOLD])
        more = f"; and {len(refused) - _MOST_TOLD} others" if len(refused) > _MOST_TOLD else ""
        _LOG.warning("tasks %s: %d cannot be run here and are left out: %s%s", name, len(refused), reasons, more)


def chosen(found: Sequence[Chosen], count: int, seed: int, name: str) -> list[Chosen]:
    """`count` of what a set has: the first ones for seed 0, else the first ones of an order that the seed draws.

    Raises
    ------
    BadInput
        It has fewer.
    """
    if count > len(found):
        raise BadInput(f"{name} has {len(found)} tasks, and {count} are asked for: use --tasks {len(found)} or less")
    if seed == 0:
        return list(found[:count])
    order = list(range(len(found)))
    random.Random(f"tasks {seed}").shuffle(order)
    return [found[i] for i in order[:count]]
