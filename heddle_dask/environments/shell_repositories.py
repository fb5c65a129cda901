"""Small repositories with bugs for the environment `shell`: files, issue, and which tests must pass.

A repository is a package of several modules of `shell_modules` with numbers that are drawn, a suite of tests, and slow
checks of the modules without a bug, which take a given time of CPU and can be run side by side (pytest-xdist). All of
it follows from the random generator.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle_dask.environments.shell_modules import MODULES, Bug, Module

_NAMES = ("amber", "birch", "cobalt", "delta", "ember", "fjord", "garnet", "harbor", "indigo", "juniper")
_CASE_CPU_S = 0.1
SUITE = "tests"
REPORT = ".report.xml"


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at the commit with the bugs.

    Attributes
    ----------
    files
        By path; the suite has no test that fails.
    hidden
        The whole suite, which takes the place of the one in `files` for the reward.
    issue
        What users report.
    fail_to_pass, pass_to_pass
        Tests that fail now and must pass, and those that pass and must go on to: ``file::name``.
    repairs
        File of every bug, with its right and its wrong content.
    """

    files: Mapping[str, str]
    hidden: Mapping[str, str]
    issue: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    repairs: tuple[tuple[str, str, str], ...]

    def to_payload(self) -> dict[str, Any]:
        return {
            "files": dict(self.files),
            "hidden": dict(self.hidden),
            "fail_to_pass": list(self.fail_to_pass),
            "pass_to_pass": list(self.pass_to_pass),
            "repairs": [list(repair) for repair in self.repairs],
        }


def draw_repository(
    rng: random.Random, *, modules: int, bugs: int, suite_cpu_s: float, name_places: bool
) -> Repository:
    """A repository.

    Parameters
    ----------
    modules, bugs
        Number of modules, and of those with a bug; one at least has none.
    suite_cpu_s
        CPU seconds of the whole suite, beside the start of pytest.
    name_places
        Whether the issue names the module of each bug.
    """
    package = rng.choice(_NAMES) + rng.choice(_NAMES)
    chosen = rng.sample(MODULES, modules)
    broken = {module.name: rng.choice(module.bugs) for module in chosen[:bugs]}
    files: dict[str, str] = {f"{package}/__init__.py": f'"""The package {package}."""\n'}
    hidden: dict[str, str] = {}
    failing: list[str] = []
    passing: list[str] = []
    repairs: list[tuple[str, str, str]] = []
    issues: list[str] = []
    for module in sorted(chosen, key=lambda each: each.name):
        number = str(rng.randint(4, 19))
        code, bug = module.code.replace("@N@", number), broken.get(module.name)
        path = f"{package}/{module.name}.py"
        if bug is not None:
            assert code.count(bug.right) == 1, (module.name, bug.right)
            repairs.append((path, code, code.replace(bug.right, bug.wrong)))
            code = code.replace(bug.right, bug.wrong)
            issues.append(_issue(bug, module, package, name_places))
        files[path] = code
        test_path = f"{SUITE}/test_{module.name}.py"
        failing += [f"{test_path}::test_{name}" for name in (bug.tests if bug else ())]
        hidden[test_path] = _tests(package, module, number, ())
        files[test_path] = _tests(package, module, number, bug.tests if bug else ())
        passing += [f"{test_path}::test_{name}" for name in module.tests if bug is None or name not in bug.tests]
    cases = max(1, round(suite_cpu_s / _CASE_CPU_S))
    slow = f"{SUITE}/test_slow.py"
    files[slow] = hidden[slow] = _slow(package, chosen[bugs:], cases)
    passing += [f"{slow}::test_{number}" for number in range(cases)]
    return Repository(files, hidden, "\n".join(issues), tuple(failing), tuple(passing), tuple(repairs))


def _issue(bug: Bug, module: Module, package: str, name_place: bool) -> str:
    text = bug.issue.replace("@M@", f"{package}.{module.name}" if name_place else package)
    return f"- {text}"


def _tests(package: str, module: Module, number: str, without: Sequence[str]) -> str:
    lines = [f"from {package} import {module.name}", ""]
    for name, body in module.tests.items():
        if name not in without:
            lines += ["", f"def test_{name}():", f"    {body.replace('@N@', number)}", ""]
    return "\n".join(lines)


def _slow(package: str, modules: Sequence[Module], cases: int) -> str:
    """Checks that each use `_CASE_CPU_S` of CPU: one case for each number, so that they can be shared out."""
    lines = ["import random", "import time", ""]
    lines += [f"from {package} import {module.name}" for module in sorted(modules, key=lambda m: m.name)]
    for module in modules:
        lines += ["", "", f"def check_{module.name}(rng):", f"    {module.check}"]
    names = ", ".join(f"check_{module.name}" for module in modules)
    lines += ["", "", f"CHECKS = [{names}]", "", "", "def holds(number):"]
    lines += ["    rng = random.Random(number)", "    begun = time.process_time()"]
    lines += [f"    while time.process_time() - begun < {_CASE_CPU_S}:"]
    lines += ["        CHECKS[number % len(CHECKS)](rng)"]
    for number in range(cases):
        lines += ["", "", f"def test_{number}():", f"    holds({number})"]
    return "\n".join([*lines, ""])
