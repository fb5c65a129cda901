"""The environment `shell`: every bug is found by its tests and by no other, tasks are drawn, experts solve them."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heddle_dask.chat.tool_calls import format_call
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Reply, Reward, Task
from heddle_dask.environments.loading import load_environment
from heddle_dask.environments.shell_env import ShellEnvironment, repair_commands
from heddle_dask.environments.shell_modules import MODULES
from heddle_dask.environments.shell_repositories import draw_repository
from heddle_dask.environments.splits import split_of
from heddle_dask.sandbox.stateful.contract import ExecResult, SandboxSpec
from heddle_dask.sandbox.stateful.keeper import SandboxKeeper
from heddle_dask.sandbox.stateful.local_sandbox import local_keeper
from heddle_dask.sandbox.stateful.orders import ExecOperation, GetOperation, PutOperation, SandboxOrder


def run_all_in_one_process(directory: Path) -> set[str]:
    """Names of failed tests of every folder below, found by one process that imports no pytest."""
    program = (
        "import importlib.util, pathlib, sys\n"
        "for folder in sorted(pathlib.Path('.').iterdir()):\n"
        "    sys.path.insert(0, str(folder))\n"
        "    for path in sorted(folder.glob('tests/test_*.py')):\n"
        "        if path.name == 'test_slow.py': continue\n"
        "        spec = importlib.util.spec_from_file_location('m', path)\n"
        "        module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "        for name, test in vars(module).items():\n"
        "            if name.startswith('test_'):\n"
        "                try: test()\n"
        "                except Exception: print(f'{folder.name} tests/{path.name}::{name}')\n"
        "    for name in [n for n in sys.modules if getattr(sys.modules[n], '__file__', None) and str(folder) in "
        "str(sys.modules[n].__file__)]: del sys.modules[name]\n"
        "    sys.path.pop(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())


def test_every_bug_is_found_by_its_tests_and_by_no_other(tmp_path: Path) -> None:
    expected: set[str] = set()
    count = 0
    for module in MODULES:
        for bug in module.bugs:
            for number in ("4", "11", "19"):
                folder = tmp_path / f"b{count}"
                count += 1
                assert module.code.count(bug.right) == 1 and set(bug.tests) <= set(module.tests)
                for path, text in {
                    "p/__init__.py": "",
                    f"p/{module.name}.py": module.code.replace(bug.right, bug.wrong).replace("@N@", number),
                    f"tests/test_{module.name}.py": f"from p import {module.name}\n"
                    + "".join(
                        f"def test_{name}():\n    {body.replace('@N@', number)}\n"
                        for name, body in module.tests.items()
                    ),
                }.items():
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (folder / path).write_text(text)
                expected |= {f"{folder.name} tests/test_{module.name}.py::test_{name}" for name in bug.tests}
    assert count >= 60
    assert run_all_in_one_process(tmp_path) == expected


def test_repositories_pass_their_visible_tests_and_fail_the_hidden_ones_that_they_say(tmp_path: Path) -> None:
    expected: set[str] = set()
    for seed in range(12):
        made = draw_repository(random.Random(seed), modules=5, bugs=2, suite_cpu_s=1.0, name_places=bool(seed % 2))
        for kind, files in (("v", made.files), ("h", {**made.files, **made.hidden})):
            for path, text in files.items():
                place = tmp_path / f"{kind}{seed}" / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
        expected |= {f"h{seed} {test}" for test in made.fail_to_pass}
        assert not set(made.fail_to_pass) & set(made.pass_to_pass)
    assert run_all_in_one_process(tmp_path) == expected


@pytest.mark.parametrize("tier", ["easy", "hard"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_tasks_are_drawn_by_the_seed(tier: Any, split: Any) -> None:
    environment = ShellEnvironment(tier, split)
    tasks = environment.tasks(30, 5)
    assert tasks == environment.tasks(30, 5)
    assert len({task.task_id for task in tasks}) == 30
    assert {split_of(task.prompt) for task in tasks} == {split}
    assert load_environment(environment.name) == environment
    for task in tasks:
        shown = task.prompt + repr(task.payload["files"])
        assert all(right not in shown for _, right, _ in task.payload["repairs"])


def test_unknown_tiers_are_refused() -> None:
    with pytest.raises(BadInput):
        load_environment("shell:medium")


class KeptBox:
    """A sandbox of a keeper in this process, as a program uses it."""

    def __init__(self, keeper: SandboxKeeper, spec: SandboxSpec) -> None:
        self.keeper, self.spec, self.done = keeper, spec, 0
        self.commands: list[tuple[str, Any]] = []

    async def _do(self, operation: Any, cpus: int = 1) -> Any:
        past = () if self.done == 0 else None
        order = SandboxOrder("box", self.spec, operation, self.done, past)
        answer = await self.keeper.perform(order, cpus=cpus)
        self.done += not isinstance(operation, GetOperation)
        return answer["value"]

    async def exec(self, command: str, *, timeout_s: float = 60.0, needs: Any = None, **more: Any) -> ExecResult:
        self.commands.append((command, needs))
        return ExecResult(**await self._do(ExecOperation(command, timeout_s), cpus=1 if needs is None else 2))

    async def put(self, path: str, content: bytes) -> None:
        await self._do(PutOperation(path, content))

    async def get(self, path: str, *, most_bytes: int = 1 << 20) -> bytes:
        content: bytes = await self._do(GetOperation(path, most_bytes))
        return content

    async def __aenter__(self) -> KeptBox:
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.keeper.close_soon("box")


class Scripted:
    """A context whose model says the given commands, and then that it is done; sandboxes are real."""

    done = False

    def __init__(self, keeper: SandboxKeeper, commands: list[str]) -> None:
        self.keeper = keeper
        self.replies = [format_call("shell", {"command": command}) for command in commands] + ["Done."]
        self.told: list[str] = []

    def append(self, role: str, text: str) -> None:
        if role == "tool":
            self.told.append(text)

    async def generate(self, **options: Any) -> Reply:
        return Reply(self.replies.pop(0), (), (), "stop")

    def sandbox(self, *, files: Any, setup: Any) -> KeptBox:
        contents = {path: text.encode() for path, text in files.items()}
        self.box = KeptBox(self.keeper, SandboxSpec(kind="bubblewrap", files=contents, setup=tuple(setup)))
        return self.box


def solved(task: Task, commands: list[str], directory: Path) -> tuple[Reward | None, Scripted]:
    async def body() -> tuple[Reward | None, Scripted]:
        keeper = local_keeper(directory)
        context = Scripted(keeper, commands)
        try:
            return await ShellEnvironment().solve(task, context), context  # type: ignore[arg-type]
        finally:
            await keeper.close()

    directory.chmod(0o711)
    return asyncio.run(asyncio.wait_for(body(), 120))


def test_an_expert_solves_a_task_and_a_bad_agent_does_not(sandbox_directory: Path) -> None:
    task = min(ShellEnvironment().tasks(12, 1), key=lambda t: len(t.payload["pass_to_pass"]))
    reward, context = solved(task, repair_commands(task), sandbox_directory)
    assert reward is not None and reward.value == 1.0 and reward.parts == {"fail_to_pass": 1.0, "pass_to_pass": 1.0}
    assert "passed" in context.told[-1]
    command, needs = context.box.commands[-1]
    assert "-n {cpus}" in command and needs.cpus == (1, 8)
    spoilt = task.payload["repairs"][0][0]
    reward, _ = solved(task, [f"echo 'x = (' > {spoilt}", "rm -rf tests"], sandbox_directory)
    assert reward is not None and reward.value == 0.0 and reward.parts["fail_to_pass"] == 0.0
    assert 0.0 < reward.parts["pass_to_pass"] < 1.0 or reward.parts["pass_to_pass"] == 0.0
