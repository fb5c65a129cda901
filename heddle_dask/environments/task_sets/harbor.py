"""Tasks of Harbor and Terminal-Bench: folders with an instruction, an environment, tests and a solution.

A sandbox is made from the image of the task that is here; the tests come into it when the agent has ended, and write
the reward. Nothing is built or fetched.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.core.needs import Needs
from heddle_dask.environments.agent_tasks import AgentTasks, chosen, note_refused
from heddle_dask.environments.base import ActionFailed, Context, EnvironmentFailed, Reward, Task
from heddle_dask.environments.program_sandbox import ProgramSandbox
from heddle_dask.environments.task_sets.box_files import command_in, put_folder
from heddle_dask.environments.task_sets.dockerfile import NotCarriedOut, SetUp, carried_out
from heddle_dask.environments.task_sets.harbor_file import TASK_FILE, HarborFile, read_harbor_file, resolved
from heddle_dask.environments.task_sets.local_images import LocalImages
from heddle_dask.sandbox.images.identity import folder_digest

IMAGES_BESIDE = ("image.tar", "image")
"""Names of an image in the folder of a task or of its environment."""
_REWARDS = "/logs/verifier"
_TOLD_CHARS = 2000
_DEFAULT_MEMORY, _DEFAULT_DISK = 2 << 30, 4 << 30


def is_harbor(path: Path) -> bool:
    """Whether it is the folder of a task, or has such folders."""
    return path.is_dir() and bool(_folders(path))


class HarborTasks(AgentTasks):
    """One task, or a folder of tasks.

    Parameters
    ----------
    source
        Folder with `task.toml`, or one with such folders at any depth.
    images
        As `LocalImages` takes it.

    Attributes
    ----------
    refused
        Why a task cannot be run here, by its name.

    Raises
    ------
    BadInput
        There are no tasks, or none of them can be run here.
    """

    def __init__(self, source: str, *, images: str | Mapping[str, str] | None = None) -> None:
        folder = Path(source).absolute()
        self._name = folder.name
        self._images = LocalImages(images, folder)
        self._boxes: dict[str, tuple[HarborFile, SetUp]] = {}
        self.refused: dict[str, str] = {}
        for each in _folders(folder):
            name = str(each.relative_to(folder)) if each != folder else folder.name
            found = read_harbor_file(each)
            try:
                self._boxes[name] = (found, self._set_up(found))
            except NotCarriedOut as error:
                self.refused[name] = str(error)
        if not self._boxes:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.refused.items())[:3])
            raise BadInput(f"tasks {source!r}: none can be run here: {reasons or f'no folder has a {TASK_FILE}'}")
        note_refused(source, self.refused)

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return len(self._boxes)

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        refused = next(iter(self.refused.items()), None)
        if refused is not None and self.size < count <= self.size + len(self.refused):
            raise BadInput(
                f"{self._name}: {len(self.refused)} of its tasks cannot be run here, such as {refused[0]}: "
                f"{refused[1]}; use --tasks {self.size} or less"
            )
        return chosen([self._task(name) for name in self._boxes], count, seed, self._name)

    def _task(self, name: str) -> Task:
        found, _ = self._boxes[name]
        instruction = (found.folder / "instruction.md").read_text()
        payload = {"folder": str(found.folder), "content": folder_digest(found.folder)[:16]}
        return Task(name, instruction, payload, domain=found.category)

    def sandbox(self, task: Task) -> Mapping[str, Any]:
        found, made = self._boxes[task.task_id]
        return {
            "image": made.image,
            "files": made.files,
            "setup": made.commands,
            "memory": found.memory_bytes or _DEFAULT_MEMORY,
            "disk": found.disk_bytes or _DEFAULT_DISK,
        }

    def limit_s(self, task: Task) -> float | None:
        return self._boxes[task.task_id][0].agent_s

    def work_directory(self, task: Task) -> str:
        found, made = self._boxes[task.task_id]
        return found.directory or made.directory

    def variables(self, task: Task) -> Mapping[str, str]:
        found, made = self._boxes[task.task_id]
        return {**made.variables, **resolved(found.variables, f"task {task.task_id}")}

    async def prepare(self, task: Task, sandbox: ProgramSandbox) -> None:
        """Folders of the logs, files of an image without a Dockerfile, and the check of its health."""
        found, _ = self._boxes[task.task_id]
        await sandbox.exec("mkdir -p /logs/agent /logs/verifier /logs/artifacts", label="sandbox file")
        environment = found.folder / "environment"
        if found.image and environment.is_dir() and not (environment / "Dockerfile").exists():
            await put_folder(sandbox, environment, self.work_directory(task) or ".")
        if found.health:
            await self._wait_for_health(task, sandbox, found.health)

    async def _wait_for_health(self, task: Task, sandbox: ProgramSandbox, health: Mapping[str, Any]) -> None:
        for attempt in range(int(health.get("retries", 3))):
            if attempt:
                await asyncio.sleep(float(health.get("interval_sec", 5.0)))
            command = self._command(task, str(health["command"]), {})
            limit_s = float(health.get("timeout_sec", 30.0))
            if (await sandbox.exec(command, timeout_s=limit_s, label="health", compared="status")).ok:
                return
        raise EnvironmentFailed(f"task {task.task_id}: its environment is not healthy: {health['command']}")

    async def run_reference(self, task: Task, sandbox: ProgramSandbox) -> None:
        """The author's ``solution/solve.sh``, as Harbor's agent `oracle` runs it."""
        found, _ = self._boxes[task.task_id]
        script = found.folder / "solution" / "solve.sh"
        if not script.is_file():
            raise BadInput(f"task {task.task_id!r} has no solution/solve.sh: use an agent")
        await put_folder(sandbox, script.parent, "/solution")
        variables = {"DEBIAN_FRONTEND": "noninteractive", **found.solution_variables}
        command = "chmod +x /solution/solve.sh; (/solution/solve.sh) > /logs/agent/oracle.txt 2>&1"
        command = self._command(task, command, resolved(variables, f"task {task.task_id}"))
        await sandbox.exec(command, timeout_s=found.agent_s, label="oracle", compared="status")

    async def verify(self, task: Task, sandbox: ProgramSandbox, ctx: Context) -> Reward:
        """Harbor's: put the tests into ``/tests``, run ``test.sh``, read ``reward.json`` or ``reward.txt``.

        Without a reward that can be read it is unknown, and the metadata say what the tests told.
        """
        found, _ = self._boxes[task.task_id]
        # What the agent may have put there does not count.
        await sandbox.exec(f"rm -rf /tests {_REWARDS}; mkdir -p {_REWARDS}", label="sandbox file")
        await put_folder(sandbox, found.folder / "tests", "/tests")
        command = f"chmod +x /tests/test.sh; (/tests/test.sh) > {_REWARDS}/test-stdout.txt 2>&1"
        variables = resolved(found.verifier_variables, f"task {task.task_id}")
        run = await sandbox.exec(
            self._command(task, command, variables),
            needs=Needs(cpus=(1, found.cpus)) if found.cpus > 1 else None,
            timeout_s=found.verifier_s,
            kind="reward",
            label="tests",
            compared="status",
        )
        said = await _file(sandbox, f"{_REWARDS}/test-stdout.txt")
        metadata: dict[str, Any] = {"tests_exit_code": run.exit_code, "tests_said": (said or "")[-_TOLD_CHARS:]}
        if run.ended_by:
            metadata["tests_ended_by"] = run.ended_by
        as_json = await _file(sandbox, f"{_REWARDS}/reward.json")
        return _reward(as_json, await _file(sandbox, f"{_REWARDS}/reward.txt"), metadata)

    def _command(self, task: Task, command: str, variables: Mapping[str, str]) -> str:
        return command_in(command, self.work_directory(task), {**self.variables(task), **variables})

    def _set_up(self, found: HarborFile) -> SetUp:
        """The image of a task, and what is done to it."""
        if found.refused:
            raise NotCarriedOut(found.refused)
        environment = found.folder / "environment"
        for place in (found.folder, environment):
            for name in IMAGES_BESIDE:
                if (place / name).exists():
                    return SetUp(image=str(place / name))
        if found.image and (path := self._images.path_of(found.image)) is not None:
            return SetUp(image=path)
        if not (environment / "Dockerfile").is_file():
            raise NotCarriedOut(f"its image {found.image or '(none)'} is not here: name its path in images.toml")
        made = carried_out(environment / "Dockerfile")
        path = self._images.path_of(made.image)
        if path is None:
            raise NotCarriedOut(f"its image {made.image} is not here: name its path in images.toml")
        made.image = path
        return made


def _folders(path: Path) -> list[Path]:
    if (path / TASK_FILE).is_file():
        return [path]
    found = sorted(each.parent for each in path.rglob(TASK_FILE))
    # A task may have others among its files.
    return [each for each in found if not any(other in each.parents for other in found)]


async def _file(sandbox: ProgramSandbox, path: str) -> str | None:
    """A file that the tests may have written."""
    if not (await sandbox.exec(f"test -f {shlex.quote(path)}", label="sandbox file")).ok:
        return None
    try:
        return (await sandbox.get(path)).decode(errors="replace")
    except ActionFailed:
        return None


def _reward(as_json: str | None, as_text: str | None, metadata: dict[str, Any]) -> Reward:
    """The number under ``reward``, or the only one; the others are its parts."""
    try:
        values = json.loads(as_json) if as_json is not None else float(as_text or "nothing")
        named = values if isinstance(values, dict) else {"reward": values}
        numbers = {str(name): float(value) for name, value in named.items()}
        if not numbers or not all(map(math.isfinite, numbers.values())):
            raise ValueError(f"{named}")
    except (TypeError, ValueError) as error:
        told = f"no reward can be read: {error}" if as_json or as_text else "the tests wrote no reward"
        return Reward(None, metadata={**metadata, "unknown": told})
    if "reward" not in numbers and len(numbers) > 1:
        told = f"several rewards, and none is named reward: {', '.join(numbers)}"
        return Reward(None, parts=numbers, metadata={**metadata, "unknown": told})
    value = numbers.pop("reward") if "reward" in numbers else next(iter(numbers.values()))
    return Reward(value, parts=numbers, metadata=metadata)
