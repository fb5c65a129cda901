"""The tests of a SWE-style instance: their command, and which of them passed by what it has written."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heddle_dask.core.errors import BadInput, HeddleError

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_OF_PYTEST = ("", "parse_log_pytest", "parse_log_pytest_v2", "parse_log_pytest_options")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S.*)", re.MULTILINE)
_PASSED = ("PASSED", "XFAIL")
_DEFAULT = "python -m pytest -rA -p no:cacheprovider"
# Images of SWE-bench have the packages of the repository in an environment of conda.
_ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi"
_TOUCHED = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)


class NoTests(HeddleError):
    """The tests of an instance cannot be run or read here; the message says why."""


@dataclass(frozen=True)
class SweTests:
    """Which tests decide, and how they are run.

    Attributes
    ----------
    fail_to_pass, pass_to_pass
        Names of tests: those that show that the issue is resolved, and those that must still pass.
    script
        Of ``bash``; it has to be run in the repository.
    applies_patch
        Whether it brings its tests itself (``eval_script`` of SWE-bench).
    parser
        Name of the reader of its output, as SWE-bench has it; empty: pytest's short summary.
    absent_passes
        Whether a test that the output does not name counts as passed.
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    script: str
    applies_patch: bool
    parser: str
    absent_passes: bool


def named_tests(row: Mapping[str, Any]) -> SweTests:
    """The tests of a row of SWE-bench, SWE-Gym, SWE-rebench and the like.

    Raises
    ------
    NoTests
        It names none, or no command is known for them.
    BadInput
        A list of names is neither a list nor its JSON text.
    """
    settings = {**row, **(row.get("install_config") or {})}
    must_pass = _names(row, "FAIL_TO_PASS")
    must_stay = _names(row, "PASS_TO_PASS")
    if not must_pass:
        raise NoTests("it has no FAIL_TO_PASS")
    parser = str(settings.get("log_parser") or "")
    script = str(settings.get("eval_script") or "")
    applies_patch = bool(script)
    if not script:
        script = _script(settings, [*must_pass, *must_stay])
    if parser not in _OF_PYTEST:
        _parser(parser)
    return SweTests(must_pass, must_stay, script, applies_patch, parser, row.get("eval_type") == "fail_only")


def files_of_patch(patch: str) -> list[str]:
    """The files that there are after a patch which it touches."""
    return list(dict.fromkeys(_TOUCHED.findall(patch)))


def statuses_of(tests: SweTests, output: str) -> dict[str, str]:
    """What became of each test that is named in the output: PASSED, FAILED, and so on."""
    if START in output and END in output:
        output = output.split(START, 1)[1].split(END, 1)[0]
    if tests.parser not in _OF_PYTEST:
        return dict(_parser(tests.parser)(output, None))
    found: dict[str, str] = {}
    for status, rest in _LINE.findall(_COLOUR.sub("", output)):
        name = rest.partition(" - ")[0].strip()
        found[name] = status
        # Lists of SWE-bench have names up to their first space.
        found.setdefault(name.partition(" ")[0], status)
    return found


def shares(tests: SweTests, statuses: Mapping[str, str]) -> dict[str, float]:
    """Of both lists of tests, the share that has passed, by the rules of SWE-bench; 1 for an empty one."""
    wanted = {
        "fail_to_pass": (tests.fail_to_pass, _PASSED),
        "pass_to_pass": (tests.pass_to_pass, (*_PASSED, "SKIPPED")),
    }
    made: dict[str, float] = {}
    for name, (each, good) in wanted.items():
        if tests.absent_passes:
            passed = sum(statuses.get(test) != "FAILED" for test in each)
        else:
            passed = sum(_status(test, statuses) in good for test in each)
        made[name] = passed / len(each) if each else 1.0
    return made


def _status(test: str, statuses: Mapping[str, str]) -> str:
    """Of a test; of a name that is cut within its parameters, that of all tests which begin so, if they agree."""
    if test in statuses or test.count("[") <= test.count("]"):
        return statuses.get(test, "")
    found = [status for name, status in statuses.items() if name.startswith(test)]
    return found[0] if len({status in _PASSED for status in found}) == 1 else ""


def _script(settings: Mapping[str, Any], names: list[str]) -> str:
    given = settings.get("test_cmd") or settings.get("test_command") or settings.get("test_cmds") or ""
    command = " && ".join(map(str, given)) if isinstance(given, list) else str(given)
    files = [name for name in files_of_patch(str(settings.get("test_patch") or "")) if name.endswith(".py")]
    if not command:
        if not all("::" in name or name.endswith(".py") for name in names):
            raise NoTests("its tests are not pytest's, and it has neither eval_script nor test_cmd")
        command = _DEFAULT
        files = list(dict.fromkeys(name.partition("::")[0] for name in names))
    return f"{_ACTIVATE}\n{command} {shlex.join(files)}"


def _names(row: Mapping[str, Any], column: str) -> tuple[str, ...]:
    given = row.get(column) or row.get(column.lower()) or []
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = None
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        raise BadInput(f"instance {row.get('instance_id')!r}: {column} is no list of names of tests")
    return tuple(given)


def _parser(name: str) -> Any:
    """A reader of SWE-bench's own package."""
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
    except ImportError:
        raise NoTests(f"the output of its tests is read by {name} of SWE-bench: pip install swebench") from None
    if name not in PARSER_REGISTRY:
        raise NoTests(f"SWE-bench has no reader {name}")
    return PARSER_REGISTRY[name]
