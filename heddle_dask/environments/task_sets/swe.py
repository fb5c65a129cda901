"""SWE-style tasks: rows with a repository at a commit in an image, an issue, and tests that show it resolved.

SWE-bench, SWE-Gym, SWE-rebench and others have this form. The reward is 1 if all of FAIL_TO_PASS and PASS_TO_PASS pass
after the agent; its patch is kept with the trajectory.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.agent_tasks import AgentTasks, chosen, note_refused
from heddle_dask.environments.base import ActionFailed, Context, Reward, Task
from heddle_dask.environments.program_sandbox import ProgramSandbox
from heddle_dask.environments.task_sets.box_files import command_in
from heddle_dask.environments.task_sets.local_images import LocalImages
from heddle_dask.environments.task_sets.row_files import Row, path_and_split, rows_of
from heddle_dask.environments.task_sets.swe_tests import (
    NoTests,
    SweTests,
    files_of_patch,
    named_tests,
    shares,
    statuses_of,
)

SWE_COLUMNS = ("instance_id", "problem_statement")
REPOSITORY = "/testbed"
_IMAGE_COLUMNS = ("image", "image_name", "docker_image")
_TOLD = (
    "The repository {repository} is in {place}. Change its files there so that this issue is resolved; do not change "
    "tests.\n\n"
)
_GIT = "git -c safe.directory=* -c core.fileMode=false"
_PATCH, _SCRIPT, _OUTPUT = "/tmp/.heddle-tests.patch", "/tmp/.heddle-tests.sh", "/tmp/.heddle-tests.out"
_NEVER_RAN = (126, 127)  # the shell found no program, or may not start it
_MOST_PATCH_CHARS, _SAID_CHARS = 200_000, 2000


class SweTasks(AgentTasks):
    """The rows of a file or folder as tasks.

    Parameters
    ----------
    source
        A path as `row_files.rows_of` takes it.
    images
        As `LocalImages` takes it; a row names its image, or has that of SWE-bench for its `instance_id`.
    repository
        Where the repository is in the images.
    tests_s
        Limit of the time of the tests.
    memory, disk
        Of a sandbox.

    Attributes
    ----------
    refused
        Why an instance cannot be run here, by its id.

    Raises
    ------
    BadInput
        It cannot be read, or no instance can be run here.
    """

    def __init__(
        self,
        source: str,
        *,
        images: str | Mapping[str, str] | None = None,
        repository: str = REPOSITORY,
        tests_s: float = 1800.0,
        memory: int | str = "4 GiB",
        disk: int | str = "8 GiB",
    ) -> None:
        path, split = path_and_split(source)
        self._name = path.name.partition(".")[0] + (f"-{split}" if split else "")
        self._images = LocalImages(images, path if path.is_dir() else path.parent)
        self._repository, self._tests_s = repository, tests_s
        self._box = {"memory": memory, "disk": disk}
        self._rows: dict[str, tuple[Row, SweTests, str]] = {}
        self.refused: dict[str, str] = {}
        for row in rows_of(source):
            self._add(row, source)
        if not self._rows:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.refused.items())[:3])
            raise BadInput(f"tasks {source!r}: none can be run here: {reasons}")
        note_refused(source, self.refused)

    def _add(self, row: Row, source: str) -> None:
        name = str(row.get("instance_id"))
        if not all(row.get(column) for column in SWE_COLUMNS):
            raise BadInput(f"tasks {source!r}: the row {name!r} lacks one of {', '.join(SWE_COLUMNS)}")
        image = image_of(row)
        place = self._images.path_of(image)
        try:
            if place is None:
                raise NoTests(f"its image {image} is not here: name its path in images.toml")
            self._rows[name] = (row, named_tests(row), place)
        except NoTests as error:
            self.refused[name] = str(error)

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return len(self._rows)

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return chosen([self._task(row) for row, _, _ in self._rows.values()], count, seed, self._name)

    def _task(self, row: Row) -> Task:
        repository = str(row.get("repo") or "repository")
        told = _TOLD.format(repository=repository, place=self._repository)
        payload = {key: value for key, value in row.items() if key != "problem_statement" and value is not None}
        return Task(str(row["instance_id"]), told + str(row["problem_statement"]), payload, domain=repository)

    def sandbox(self, task: Task) -> Mapping[str, Any]:
        return {"image": self._rows[task.task_id][2], **self._box}

    def work_directory(self, task: Task) -> str:
        return self._repository

    async def run_reference(self, task: Task, sandbox: ProgramSandbox) -> None:
        """Apply the patch of the row."""
        patch = task.payload.get("patch")
        if not patch:
            raise BadInput(f"instance {task.task_id!r} has no patch: use an agent")
        await sandbox.put(_PATCH, str(patch))
        await self._run(sandbox, _applied(_PATCH), "the reference patch")

    async def verify(self, task: Task, sandbox: ProgramSandbox, ctx: Context) -> Reward:
        """Bring the tests in, run them, and compare the names of those that pass with both lists."""
        row, tests, _ = self._rows[task.task_id]
        metadata: dict[str, Any] = {"patch": await self._patch_of_agent(row, sandbox)}
        test_patch = str(row.get("test_patch") or "")
        if test_patch and not tests.applies_patch:
            await sandbox.put(_PATCH, test_patch)
            await self._run(sandbox, _restored(row, test_patch), "the files of the tests")
            await self._run(sandbox, _applied(_PATCH), "test_patch")
        await sandbox.put(_SCRIPT, tests.script)
        run = await sandbox.exec(
            command_in(f"(bash {_SCRIPT}) > {_OUTPUT} 2>&1", self._repository),
            timeout_s=self._tests_s,
            kind="reward",
            label="tests",
            compared="status",
        )
        output = (await sandbox.get(_OUTPUT)).decode(errors="replace")
        statuses = statuses_of(tests, output)
        metadata["tests_exit_code"] = run.exit_code
        metadata["tests_said"] = output[-_SAID_CHARS:]
        if run.ended_by:
            metadata["tests_ended_by"] = run.ended_by
        if not statuses and (run.exit_code in _NEVER_RAN or run.ended_by not in ("", "timeout")):
            return Reward(None, metadata={**metadata, "unknown": "the tests did not run"})
        parts = shares(tests, statuses)
        return Reward(float(all(part == 1.0 for part in parts.values())), parts=parts, metadata=metadata)

    async def _patch_of_agent(self, row: Row, sandbox: ProgramSandbox) -> str:
        """What the agent has changed, as SWE-bench takes it."""
        against = shlex.quote(str(row.get("base_commit") or "HEAD"))
        command = f"{_GIT} add -A && {_GIT} diff --cached {against} > {_OUTPUT}"
        done = await sandbox.exec(command_in(command, self._repository), label="git", compared="status")
        if not done.ok:
            return ""
        return (await sandbox.get(_OUTPUT)).decode(errors="replace")[:_MOST_PATCH_CHARS]

    async def _run(self, sandbox: ProgramSandbox, command: str, what: str) -> None:
        done = await sandbox.exec(command_in(command, self._repository), label="git", compared="status")
        if not done.ok:
            raise ActionFailed("raised", f"{what}: {done.text[-500:]}")


def image_of(row: Row) -> str:
    """The name of the image of a row; SWE-bench's own where it names none."""
    named = next((str(row[column]) for column in _IMAGE_COLUMNS if row.get(column)), "")
    return named or f"swebench/sweb.eval.x86_64.{row['instance_id']}".replace("__", "_1776_").lower()


def _applied(path: str) -> str:
    return f"{_GIT} apply --whitespace=nowarn {path} || patch --batch --no-backup-if-mismatch --fuzz=5 -p1 -i {path}"


def _restored(row: Row, test_patch: str) -> str:
    """The files of the tests as they were: what an agent has made of them does not count."""
    files = files_of_patch(test_patch)
    against = shlex.quote(str(row.get("base_commit") or "HEAD"))
    restore = f"{_GIT} checkout -q {against} --"
    each = [f"{restore} {shlex.quote(file)} 2>/dev/null || rm -f {shlex.quote(file)}" for file in files]
    return "\n".join([*each, "true"])
