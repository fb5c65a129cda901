"""`shell`: repair a small repository in a sandbox; its tests are the reward, run as an elastic action.

The agent reads an issue and works with a shell over several turns; its files stay. Tests that show the bugs are
hidden until the end (FAIL_TO_PASS); all that pass at the beginning must still pass (PASS_TO_PASS). Reward 1.0 if both
do.
"""

from __future__ import annotations

import io
import random
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from heddle_dask.chat.tool_calls import format_call
from heddle_dask.core.needs import Needs
from heddle_dask.environments.base import ActionFailed, Context, Reward, Task
from heddle_dask.environments.program_sandbox import ProgramSandbox
from heddle_dask.environments.shell_repositories import REPORT, SUITE, draw_repository
from heddle_dask.environments.splits import SplitEnvironment, Tier, draw_tasks, problem_key
from heddle_dask.environments.tool_agent import LoopLimits, converse, text_argument

SYSTEM = (
    "Repair the Python package in the current directory. Use the tool shell(command):\n"
    + format_call("shell", {"command": "ls"})
    + '\nFiles stay between calls. Do not change tests. Run tests with "pytest -q". When it is repaired, reply "Done."'
)
_REMINDER = 'Call the tool or reply "Done."'
# Some machines have no git: the files are the same without it.
_COMMIT = (
    "if command -v git > /dev/null; then git init -q . && git add -A && "
    "GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' GIT_COMMITTER_DATE='2026-01-01T00:00:00Z' "
    "git -c user.name=agent -c user.email=agent@localhost commit -q -m 'As it is'; fi"
)
_TESTS_S = 600.0
_COMMAND_S = 120.0
_MOST_CPUS = 8
_SETTINGS = "conftest.py pytest.ini .pytest.ini tox.ini setup.cfg pyproject.toml sitecustomize.py usercustomize.py"


@dataclass(frozen=True)
class ShellEnvironment(SplitEnvironment):
    """Repositories with bugs.

    Parameters
    ----------
    tier
        ``"easy"``: 3 modules, one bug, the issue names its module, and the suite takes 1 to 5 CPU seconds; ``"hard"``:
        5 or 6 modules, 2 or 3 bugs that the issue describes only, and 5 to 60 CPU seconds.
    cpus
        CPUs that the tests for the reward may use.
    """

    uses_sandbox: ClassVar[bool] = True
    kind: ClassVar[str] = "shell"
    limits: LoopLimits = field(default_factory=lambda: LoopLimits(tool_text_chars=1500))
    cpus: tuple[int, int] = (1, _MOST_CPUS)

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        def draw(rng: random.Random) -> Task:
            return _draw(rng, self.tier)

        return draw_tasks(draw, count, seed=seed, split=self.split)

    async def solve(self, task: Task, ctx: Context) -> Reward | None:
        """Attempt the repair once; None if the tests could not be run."""
        async with ctx.sandbox(files=task.payload["files"], setup=[_COMMIT]) as box:

            async def shell(arguments: Mapping[str, Any]) -> str:
                command = text_argument(arguments, "command")
                result = await box.exec(command, timeout_s=_COMMAND_S)
                return result.text or "(no output)"

            ctx.append("system", SYSTEM)
            ctx.append("user", task.prompt)
            await converse(ctx, {"shell": shell}, _is_done, reminder=_REMINDER, limits=self.limits)
            try:
                return await graded(box, task, self.cpus)
            except ActionFailed:
                return None


async def graded(box: ProgramSandbox, task: Task, cpus: tuple[int, int] = (1, _MOST_CPUS)) -> Reward:
    """Run the hidden suite on what is in the sandbox, with as many CPUs as it is given.

    Settings and plugins that the agent may have left are removed. It could still deceive pytest from within the
    package: for agents that do, grade the changed files in a sandbox of their own.
    """
    await box.put(".suite.tar", _archive(task.payload["hidden"]))
    # Other plugins of the worker's Python only take time.
    command = f"rm -rf {SUITE} {REPORT} {_SETTINGS} && tar xf .suite.tar && PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "
    command += f"python -m pytest -q -p xdist -p no:cacheprovider -n {{cpus}} --junitxml={REPORT} {SUITE} "
    command += "> /dev/null 2>&1"
    run = await box.exec(
        command, needs=Needs(cpus=cpus), timeout_s=_TESTS_S, kind="reward", label="suite", compared="status"
    )
    passed: set[str] = set()
    if not run.ended_by:
        try:
            passed = _passed(await box.get(REPORT, most_bytes=4 << 20))
        except ActionFailed:
            passed = set()  # the package breaks pytest itself: no test has passed
    wanted = {"fail_to_pass": task.payload["fail_to_pass"], "pass_to_pass": task.payload["pass_to_pass"]}
    parts = {name: sum(test in passed for test in tests) / len(tests) for name, tests in wanted.items()}
    return Reward(float(all(part == 1.0 for part in parts.values())), parts)


def _archive(files: Mapping[str, str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for path, text in sorted(files.items()):
            content = text.encode()
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def _passed(report: bytes) -> set[str]:
    """Tests that passed, as ``file::name``."""
    try:
        cases = list(ElementTree.fromstring(report).iter("testcase"))
    except ElementTree.ParseError:
        return set()
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for case in cases
        if not any(child.tag in ("failure", "error", "skipped") for child in case)
    }


def _is_done(reply: str) -> bool:
    return reply.strip().rstrip(".!").lower().endswith("done")


def _draw(rng: random.Random, tier: Tier) -> Task:
    hard = tier == "hard"
    bugs = rng.randint(2, 3) if hard else 1
    suite_cpu_s = rng.choice((5, 10, 20, 40, 60) if hard else (1, 2, 3, 5))
    repository = draw_repository(
        rng,
        modules=rng.randint(5, 6) if hard else 3,
        bugs=bugs,
        suite_cpu_s=suite_cpu_s,
        name_places=not hard,
    )
    folder = next(path for path in repository.files if path.endswith("__init__.py")).partition("/")[0]
    prompt = f"The package is {folder}, its tests are in {SUITE}. Users report:\n{repository.issue}"
    name = f"shell-{tier}-{problem_key(prompt + repr(sorted(repository.files.items()))):08x}"
    return Task(name, prompt, repository.to_payload(), domain=f"{bugs} bugs, {suite_cpu_s} s")


def repair_commands(task: Task) -> list[str]:
    """Commands with which an expert repairs the repository; for tests and reference solutions, never for agents."""
    commands = ["ls", "git log --oneline 2> /dev/null | cat"]
    for path, right, _ in task.payload["repairs"]:
        commands += [f"cat {path}", f"cat > {path} <<'END_OF_FILE'\n{right}END_OF_FILE"]
    return [*commands, f"python -m pytest -q -x {SUITE} --deselect {SUITE}/test_slow.py"]
