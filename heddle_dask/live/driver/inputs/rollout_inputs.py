"""What `Rollout` is given in several forms, in the one form that it uses."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.defaults import TINY_AGENT, shipped_model
from heddle_dask.engines.spec import EngineOptions
from heddle_dask.environments.base import Environment, Task
from heddle_dask.environments.function_tools import ToolAgent
from heddle_dask.environments.functions import as_environment
from heddle_dask.environments.mix import part_of
from heddle_dask.environments.splits import prompt_key
from heddle_dask.live.driver.inputs.meant_arguments import meant, shown
from heddle_dask.live.driver.inputs.telemetry import Telemetry
from heddle_dask.live.driver.settings import configured_strategy
from heddle_dask.records.trajectory_prefix import TrajectoryPrefix
from heddle_dask.strategies.presets import Strategy

Tasks = int | Sequence[Task | str]
Prefixes = Mapping[str, TrajectoryPrefix]
Value = TypeVar("Value")

WriteMode = Literal["create", "append", "overwrite", "resume"]


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The model of a rollout.

    Attributes
    ----------
    path
        Model directory.
    chat_template_kwargs
        JSON-able variables of its chat template, such as ``{"enable_thinking": False}``. A program may set more
        (`Context.set_template`).

    Raises
    ------
    BadInput
        No path, or variables that are no mapping or not JSON-able.
    """

    path: str | Path
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path):
            raise BadInput(f"model is {shown(self.path)}: use the path of a model directory{meant(self.path)}")
        if str(self.path) == TINY_AGENT and not Path(self.path).exists():
            object.__setattr__(self, "path", shipped_model())
        stored = None
        if isinstance(self.chat_template_kwargs, Mapping):
            with suppress(TypeError, ValueError):
                # As they are read again from a stored run.
                stored = json.loads(json.dumps(dict(self.chat_template_kwargs), allow_nan=False))
        if stored is None:
            raise BadInput(
                f"model: chat_template_kwargs is {self.chat_template_kwargs!r}: use a mapping of names to JSON values"
            )
        object.__setattr__(self, "chat_template_kwargs", stored)

    @classmethod
    def of(cls, model: str | Path | ChatModel) -> ChatModel:
        """A model directory without variables, or what was given in full.

        Raises
        ------
        BadInput
            As the constructor.
        """
        return model if isinstance(model, ChatModel) else cls(model)


@dataclass(frozen=True, slots=True)
class Output:
    """Where a rollout stores its trajectories.

    Attributes
    ----------
    path
        Zarr store; the journal is written beside it.
    mode
        ``"create"`` (the default) refuses an existing path, ``"append"`` adds to a run, ``"overwrite"`` replaces it,
        ``"resume"`` finishes it, and adds attempts to its groups where `samples` is larger now.
    metadata
        JSON-able facts, stored with those that the rollout itself describes; of equal names, these win.
    telemetry
        Where spans of trajectories, steps and actions go; None: as the settings say, else nowhere.
    accept_changes
        Whether a run may go on with weights, rewards, model services or payloads of tasks that have changed since.

    Raises
    ------
    BadInput
        No path, an unknown mode, or metadata that are no mapping.
    """

    path: str | Path
    mode: WriteMode = "create"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    telemetry: Telemetry | None = None
    accept_changes: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path) or not str(self.path):
            raise BadInput(f"out: path is {shown(self.path)}: use a path such as 'runs/x.zarr'{meant(self.path)}")
        object.__setattr__(self, "path", Path(self.path))
        if self.mode not in get_args(WriteMode):
            raise BadInput(f"out: mode is {self.mode!r}: use one of {', '.join(get_args(WriteMode))}")
        if not isinstance(self.metadata, Mapping):
            raise BadInput(f"out: metadata is {self.metadata!r}: use a mapping")
        object.__setattr__(self, "metadata", dict(self.metadata))

    @classmethod
    def of(cls, out: str | Path | Output | None) -> Output | None:
        """A new store at a path, or what was given in full; None: trajectories are kept in memory only.

        Raises
        ------
        BadInput
            As the constructor.
        """
        return out if out is None or isinstance(out, Output) else cls(out)

    @property
    def name(self) -> str:
        """Name of the run for people: that of its store; of the training whose store it is."""
        stem = Path(self.path).stem
        return Path(self.path).absolute().parent.name if stem == "rollout" else stem


def given_or_default(name: str, kind: type[Value], value: Value | None) -> Value:
    """The value of a parameter; not given: that with all defaults.

    Raises
    ------
    BadInput
        It is of another type.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise BadInput(f"{name} is {shown(value)}: use {kind.__name__}(…){meant(value)}")
    return value


def strategy_of(strategy: str | Strategy | None) -> Strategy:
    """A strategy, or a preset by its name; None: the preset of the settings.

    Raises
    ------
    BadInput
        There is no such preset.
    """
    if strategy is not None:
        if meant(strategy) and not isinstance(strategy, Strategy):
            raise BadInput(f"strategy is {shown(strategy)}: use a preset or Strategy(…){meant(strategy)}")
        return Strategy.of(strategy)
    preset = configured_strategy()
    if preset is None:
        return Strategy()
    try:
        return Strategy(preset)
    except BadInput as error:
        raise BadInput(f"Dask configuration: heddle.strategy: {error}") from None


def environment_of(env: object, tools: Sequence[Any] = ()) -> Environment:
    """An environment from its name, ``replay:TRACE``, ``package.module:function``, a coroutine function or itself.

    With tools, a plain function is the score of what their agent answers.

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
    if tools and inspect.isroutine(env) and not inspect.iscoroutinefunction(env):
        return ToolAgent(tools, env, name=env.__name__)
    return as_environment(env)


def tasks_of(tasks: Tasks, environment: Environment, seed: int) -> list[Task]:
    """Tasks drawn from the environment, or those given; a string is a prompt.

    Raises
    ------
    BadInput
        There is none, two have the same id, or the environment cannot give any.
    """
    if isinstance(tasks, int):
        if tasks < 1:
            raise BadInput(f"tasks is {tasks}: use at least 1")
        chosen = _drawn(tasks, environment, seed)
    else:
        chosen = [
            Task(task_id=f"task-{i}", prompt=task) if isinstance(task, str) else task for i, task in enumerate(tasks)
        ]
    seen: set[str] = set()
    for task in chosen:
        if not isinstance(task, Task):
            raise BadInput(f"tasks has {task!r}: use texts, or Task(id, prompt, payload)")
        if not (isinstance(task.task_id, str) and isinstance(task.prompt, str) and isinstance(task.payload, Mapping)):
            raise BadInput(f"task {task.task_id!r}: id and prompt are texts, and the payload is a mapping")
        if task.task_id in seen:
            raise BadInput(f"two tasks have the id '{task.task_id}': give each its own")
        seen.add(task.task_id)
    return chosen


def prefixes_of(prefixes: Prefixes | None, environment: Environment, tasks: Sequence[Task]) -> Prefixes:
    """The prefixes that were given, by task id.

    Raises
    ------
    BadInput
        One is of no task, is of an attempt at another one, or the environment says that it cannot be replayed.
    """
    named = {task.task_id: task for task in tasks}
    for task_id, prefix in (prefixes or {}).items():
        task = named.get(task_id)
        if task is None or not isinstance(prefix, TrajectoryPrefix):
            raise BadInput(f"prefixes: {task_id!r}: use a task id of this run, and TrajectoryPrefix.of(record, steps)")
        part = part_of(environment, task)
        if not getattr(part, "can_replay", True):
            raise BadInput(f"prefixes: {task_id!r}: the environment {part.name!r} says that it cannot be replayed")
        if prefix.prompt_key != prompt_key(part.name, task):
            raise BadInput(f"prefixes: {task_id!r}: {prefix.source} attempted another task, or in another environment")
    return dict(prefixes or {})


def check_replayed_calls(options: EngineOptions) -> None:
    """Refuse prefixes where engines read the calls of tools: what they read is not recorded.

    Raises
    ------
    BadInput
    """
    if options.reads_calls:
        raise BadInput(
            "prefixes are not replayed where engines read calls of tools (tool-call-parser): leave that parser out, or "
            "the prefixes (prefix sampling)"
        )


def _drawn(count: int, environment: Environment, seed: int) -> list[Task]:
    """Tasks of an environment, which may be a user's program and fail in any way."""
    try:
        drawn = list(environment.tasks(count, seed))
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(f"environment {environment.name!r}: tasks({count}, {seed}) failed: {told}") from error
    if not drawn or not all(isinstance(task, Task) for task in drawn):
        what = f"a {type(next(t for t in drawn if not isinstance(t, Task))).__name__}" if drawn else "none"
        raise BadInput(f"environment {environment.name!r}: tasks({count}, {seed}) gave {what}: give it tasks")
    return drawn
