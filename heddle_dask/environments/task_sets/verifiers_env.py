"""Environments of verifiers (0.4): their own programs, unchanged, with the trajectory's gateway for a model.

A program of verifiers (its harness) runs on the driver's machine as verifiers' runtime `subprocess` does, and talks to
verifiers' own interception server, which asks the gateway. So the gateway must be on that machine too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from heddle_dask.core.errors import BadInput
from heddle_dask.core.toml_table import read_toml
from heddle_dask.environments.agent_tasks import chosen
from heddle_dask.environments.base import Context, EnvironmentFailed, Reward, Task

_MODEL = "policy"
_NO_KEY = "HEDDLE_HAS_NO_KEY"  # a variable that is never set: the key travels in a header
_SAID_CHARS = 500


class VerifiersEnvironment:
    """One environment of verifiers.

    Parameters
    ----------
    source
        Id of an installed task set (or of an environment that has one), or a TOML file with verifiers' own table
        `[env]`. An agent without a runtime runs in a subprocess of the driver, and one without a harness has `null`,
        which executes nothing.

    Raises
    ------
    BadInput
        verifiers is not installed, has nothing of that name, or does not take the table.
    """

    can_replay: ClassVar[bool] = False  # its requests come through a gateway

    def __init__(self, source: str) -> None:
        path = Path(source)
        table = dict(read_toml(path, "verifiers").get("env", {})) if path.suffix == ".toml" else {}
        self._name = f"verifiers:{path.stem if path.suffix == '.toml' else source}"
        self._loaders = _loaders(source)
        try:
            self._config = self._resolved(table or {"taskset": {"id": source}})
            self._environment = self._loaders.load_environment(self._config)
        except Exception as error:  # of a plugin of the user's
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise BadInput(f"environment 'verifiers:{source}': {told[:_SAID_CHARS]}") from error
        self._found: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self._name

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """The first tasks of its task set; of a bounded one in an order that the seed draws, unless it is 0."""
        taskset = self._environment.taskset
        found = list(taskset) if taskset.bounded else list(itertools.islice(taskset, count))
        drawn = [
            (_id_of(each), each) for each in (chosen(found, count, seed, self._name) if taskset.bounded else found)
        ]
        self._found.update(drawn)
        return [
            Task(name, each.data.prompt_text, {"key": each.key}, domain=str(type(each).__name__))
            for name, each in drawn
        ]

    async def solve(self, task: Task, ctx: Context) -> Reward:
        """Run one episode of it, scored by its own rewards.

        Raises
        ------
        EnvironmentFailed
            The episode failed, and not because the trajectory's budget was used up.
        """
        from verifiers.v1 import EvalClientConfig, ModelContext

        gate = await ctx.gateway()
        if not gate.loopback_url:
            raise EnvironmentFailed("verifiers: no tool worker on the driver's machine has a gateway")
        headers = {"x-api-key": gate.key}
        client = EvalClientConfig(base_url=f"{gate.loopback_url}/v1", api_key_var=_NO_KEY, headers=headers)
        # Each episode has servers of its own, which end with it.
        environment = self._loaders.load_environment(self._config)
        async with environment.serving():
            episode = await environment.run_episode(self._task(task), ModelContext(model=_MODEL, client=client))
        gate.close()
        return self._reward(episode, ctx)

    def _task(self, task: Task) -> Any:
        """The task of verifiers; a resumed run finds it again by what it contains."""
        if task.task_id not in self._found:
            for each in self._environment.taskset:
                self._found.setdefault(_id_of(each), each)
                if _id_of(each) == task.task_id:
                    break
        return self._found[task.task_id]

    def _reward(self, episode: Any, ctx: Context) -> Reward:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        told = "; ".join(f"{error.type}: {error.message}" for error in errors)[:_SAID_CHARS]
        if not episode.ok and not ctx.done:
            raise EnvironmentFailed(f"verifiers: {told or 'the episode failed'}")
        trained = next((trace for trace in episode.traces if trace.agent.trainable), None)
        if trained is None:
            return Reward(None, metadata={"verifiers_errors": told})
        scored = {name: each for name, each in trained.rewards.items() if each is not None}
        parts = {name: float(each.score) for name, each in scored.items()}
        parts |= {name: float(value) for name, value in trained.metrics.items() if value is not None}
        metadata = {"verifiers_errors": told} if told else {}
        return Reward(trained.reward if scored else None, parts=parts, metadata=metadata)

    def _resolved(self, table: Mapping[str, Any]) -> Any:
        """Its configuration, with agents that need neither a service nor a container."""
        from verifiers.v1.configs.agent import AgentConfig

        config = self._loaders.resolve_env_config({**table})
        own_harness = self._loaders.default_harness_id(config.taskset.id) != "bash"
        added: dict[str, Any] = {}
        for name, value in config:
            if isinstance(value, AgentConfig):
                given = dict(table.get(name, {}))
                if "runtime" not in value.model_fields_set:
                    given["runtime"] = {"type": "subprocess"}
                if value.harness is None and not own_harness:
                    given["harness"] = {"id": "null"}
                added[name] = given
        return self._loaders.resolve_env_config({**table, **added})


def _id_of(task: Any) -> str:
    return str(task.data.id or f"{task.data.name or 'task'}-{task.data.idx}")


def _loaders(source: str) -> Any:
    try:
        from verifiers.v1.runtimes.subprocess import SubprocessRuntime
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise BadInput(
            f"environment 'verifiers:{source}' needs verifiers 0.4 ({error}): pip install 'verifiers>=0.4,<0.5'"
        ) from error
    # Its programs want packages that verifiers itself has: they run with this Python, and uv fetches nothing.
    SubprocessRuntime.prepare_uv_script = _with_this_python
    return loaders


async def _with_this_python(
    runtime: Any, script: str | bytes, env: Mapping[str, str] | None = None, *, activate: bool = True
) -> list[str]:
    data = script.encode() if isinstance(script, str) else script
    name = f"program-{sha256(data).hexdigest()[:16]}.py"
    await runtime.write(name, data)
    return [sys.executable, str(runtime.workdir / name)]
