"""An agent that is a command, unchanged, as an environment: it works in the sandbox of each task and asks a gateway.

Each of its requests is a step of the trajectory. It runs as one action, which holds no CPU: most of the time it waits
for the model, and meanwhile everything else may use all cores. What it and its tools compute has the lowest priority
on the machine, so that actions with CPUs of their own come first.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from heddle_dask.core.errors import BadInput
from heddle_dask.core.needs import Given, Needs
from heddle_dask.core.resources import MEMORY
from heddle_dask.environments.agent_description import STDOUT, AgentDescription, agent_named
from heddle_dask.environments.agent_gateway import AgentGateway
from heddle_dask.environments.agent_tasks import AgentTasks, load_agent_tasks, prepare_task, verified
from heddle_dask.environments.base import OUT_OF_TIME, ActionFailed, Context, EnvironmentFailed, Reward, Task
from heddle_dask.environments.program_sandbox import ProgramSandbox
from heddle_dask.environments.reference_agent import ORACLE, ReferenceAgent
from heddle_dask.sandbox.stateful.contract import ExecResult

METADATA = "agent"
"""The entry of a trajectory's metadata with what the agent did: exit code, seconds, outputs, answer, files."""
_OUTPUT_CHARS = 4000
_KEPT_BYTES = 200_000
_MOST_PROCESSES = 1024
_NOT_FOUND = (126, 127)
"""Exit codes of a shell for a command that is not there, or cannot be run."""


class AgentFailed(Exception):
    """The agent got no step: it is not installed, does not use the gateway, or its prompt is too long for the model."""


class CommandAgent:
    """An agent that is a command, and the tasks that it works on.

    Parameters
    ----------
    cpus
        CPUs that its action holds for its whole life, as in `Needs`.
    limit_s
        Seconds that it has at each task; None: what the task says, or else the description.
    """

    can_replay: ClassVar[bool] = False  # its requests come through a gateway

    def __init__(
        self, description: AgentDescription, tasks: AgentTasks, *, cpus: Given = 0, limit_s: float | None = None
    ) -> None:
        self.description = description
        self._tasks = tasks
        self._needs = Needs(cpus=cpus)
        self._limit_s = limit_s

    @property
    def name(self) -> str:
        return f"{self.description.name}:{self._tasks.name}"

    @property
    def size(self) -> int | None:
        """Number of tasks that there are; None: any number."""
        return self._tasks.size

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return self._tasks.tasks(count, seed)

    async def solve(self, task: Task, ctx: Context) -> float | Reward | None:
        """Let the agent work on the task once; the reward is that of the tasks, whatever its exit code.

        Raises
        ------
        AgentFailed
            It got no step.
        EnvironmentFailed
            The sandbox cannot be prepared, the agent is not installed, or it has failed after its gateway or a step was
            lost.
        """
        gate = await ctx.gateway()
        async with ctx.sandbox(**self._sandbox(task), gateway=gate) as box:
            await prepare_task(self._tasks, task, box)
            result = await self._run(task, box, gate)
            gate.close()
            facts = _facts(self.description.name, result)
            ctx.metadata[METADATA] = facts
            self._check(result, gate, ctx.metadata.get("gateway", {}))
            facts |= await self._read(result, box)
            if result.ended_by == "timeout":
                ctx.metadata[OUT_OF_TIME] = f"the agent was ended after its {result.seconds:.0f} s"
            return await verified(self._tasks, task, box, ctx)

    def _sandbox(self, task: Task) -> dict[str, Any]:
        given = dict(self._tasks.sandbox(task))
        folder = self.description.folder
        wanted = (self.description.memory, given.get("memory", 0))
        return {
            "max_processes": _MOST_PROCESSES,
            "output_bytes": 2 * _KEPT_BYTES,
            **given,
            "memory": max(Needs(memory=each).demand()[MEMORY].least for each in wanted),
            "folders": (*given.get("folders", ()), *((folder,) if folder else ())),
        }

    async def _run(self, task: Task, box: ProgramSandbox, gate: AgentGateway) -> ExecResult:
        said_s = self._tasks.limit_s(task) if self._limit_s is None else self._limit_s
        text = self.description.shell_text(
            self._tasks.instruction(task),
            {**gate.environment, **self._tasks.variables(task)},
            url=gate.url,
            key=gate.key,
            directory=self._tasks.work_directory(task),
        )
        return await box.exec(
            text,
            needs=self._needs,
            timeout_s=self.description.limit_s if said_s is None else said_s,
            label=f"agent {self.description.name}",
            compared="status",
        )

    def _check(self, result: ExecResult, gate: AgentGateway, noted: Mapping[str, Any]) -> None:
        """Tell failures that are not the agent's work from those that are."""
        ended = result.ended_by or f"exit code {result.exit_code}"
        if noted.get("lost") and not result.ok:
            raise EnvironmentFailed(f"agent {self.description.name}: {ended}; the gateway: {noted['lost'][-1]}")
        lost_steps = noted.get("refused", {}).get("failed", 0)
        if lost_steps and not result.ok:
            raise EnvironmentFailed(f"agent {self.description.name}: {ended}; {lost_steps} of its steps failed")
        if not gate.steps:
            refused = ", ".join(f"{count} {kind}" for kind, count in noted.get("refused", {}).items())
            what = (
                f"none of its requests was answered ({refused})" if gate.requests else "it has not asked the model once"
            )
            said = " ".join((result.stderr.strip() or result.stdout.strip())[-300:].split())
            if not gate.requests and result.exit_code in _NOT_FOUND:
                how = f"; {' && '.join(self.description.install)}" if self.description.install else ""
                raise EnvironmentFailed(f"agent {self.description.name} is not installed: {said}{how}")
            raise AgentFailed(f"agent {self.description.name}: {what}; {ended}: {said}")

    async def _read(self, result: ExecResult, box: ProgramSandbox) -> dict[str, Any]:
        """The agent's answer and the files that are kept."""
        description = self.description
        facts: dict[str, Any] = {}
        if description.answer:
            text = result.stdout if description.answer == STDOUT else await _file(box, description.answer)
            facts["answer"] = _answer_in(text or "", description.answer_key)
        kept = {path: await _file(box, path) for path in description.keep}
        if kept:
            facts["files"] = kept
        return facts


def loaded_agent(pair: str) -> CommandAgent | ReferenceAgent:
    """The environment of ``AGENT:TASKS``: a name or a TOML file, and a set of tasks; `oracle` is the tasks' author.

    Raises
    ------
    BadInput
    """
    agent, colon, tasks = pair.partition(":")
    if not (agent and colon and tasks):
        raise BadInput(f"environment 'agent:{pair}': use agent:NAME:TASKS or agent:FILE.toml:TASKS (docs/agents.md)")
    if agent == ORACLE:
        return ReferenceAgent(load_agent_tasks(tasks))
    return CommandAgent(agent_named(agent), load_agent_tasks(tasks))


def _facts(name: str, result: ExecResult) -> dict[str, Any]:
    return {
        "name": name,
        "exit_code": result.exit_code,
        "ended_by": result.ended_by,
        "seconds": round(result.seconds, 3),
        "stdout": result.stdout[-_OUTPUT_CHARS:],
        "stderr": result.stderr[-_OUTPUT_CHARS:],
    }


def _answer_in(text: str, key: str) -> str:
    """The answer in what the agent wrote; under a key of the JSON object in the last line, if there is a key."""
    if not key:
        return text.strip()
    with suppress(ValueError, IndexError):
        found = json.loads(text.strip().splitlines()[-1])
        if isinstance(found, dict) and isinstance(found.get(key), str):
            return str(found[key])
    return ""


async def _file(box: ProgramSandbox, path: str) -> str | None:
    """The beginning of a file; None where there is none."""
    try:
        found = await box.exec(
            f"test -f {shlex.quote(path)} && head -c {_KEPT_BYTES} {shlex.quote(path)}",
            needs=Needs(cpus=0),
            label="sandbox file",
            compared="status",
        )
    except ActionFailed:
        return None
    return found.stdout if found.ok else None
