"""Hidden tests for a function that an agent wrote.

The function runs in the sandbox and gets the arguments only. Its results are returned as data and compared here, so
the agent's code can neither read the expected values nor claim success.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.sandbox.inside import decode, encode
from heddle_dask.sandbox.outcome import RawRun, SandboxLimits, judge
from heddle_dask.sandbox.python_runner import PythonSandbox, shared_sandbox

Case = tuple[Sequence[Any], Any]

_DEFAULT_LIMITS = SandboxLimits(output_bytes=1 << 20)
_MOST_STORIES = 5


@dataclass(frozen=True, slots=True)
class TestReport:
    """Number of passed cases.

    Attributes
    ----------
    text
        A summary with the first failures. Never contains an expected value.
    """

    __test__ = False  # keeps pytest from collecting it as a test class

    passed: int
    total: int
    text: str


async def run_function_tests(
    code: str,
    function: str,
    cases: Sequence[Case],
    *,
    limits: SandboxLimits = _DEFAULT_LIMITS,
    cpus: int = 1,
    sandbox: PythonSandbox | None = None,
) -> TestReport:
    """Run a function of the code on each case's arguments and compare outside the sandbox.

    Values are those of plain built-in types (None, bool, int, float, complex, str, bytes, list, tuple,
    set, frozenset, dict). They compare with ``==``; floats within a relative 1e-9.

    Parameters
    ----------
    cases
        Pairs of arguments and expected value.
    limits
        Limits of each sandbox; the wall clock covers all its cases.
    cpus
        Number of sandboxes to which the cases are distributed.
    sandbox
        The sandbox; by default that of the running event loop.
    """
    if not cases:
        raise BadInput(f"hidden tests of {function!r}: no cases given")
    place = sandbox or await shared_sandbox()
    shares = [list(range(first, len(cases), cpus)) for first in range(min(cpus, len(cases)))]
    order = [{"function": function, "arguments": [_arguments(cases[i], i) for i in share]} for share in shares]
    runs = await _all(place, code, order, limits)
    failures: dict[int, str] = {}
    for share, run in zip(shares, runs, strict=True):
        failures.update(_failures(run, [(i, cases[i][1]) for i in share], limits))
    failed = [f"case {i + 1}: {failures[i]}" for i in sorted(failures)]
    passed = len(cases) - len(failed)
    lines = [f"{passed} of {len(cases)} tests passed", *failed[:_MOST_STORIES]]
    if len(failed) > _MOST_STORIES:
        lines.append(f"and {len(failed) - _MOST_STORIES} more failed")
    return TestReport(passed, len(cases), "\n".join(lines))


async def _all(
    sandbox: PythonSandbox, code: str, orders: Sequence[dict[str, Any]], limits: SandboxLimits
) -> list[RawRun]:
    # A task group kills all runs if one fails to start, or on cancellation.
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sandbox.run_raw(code, limits=limits, calls=order)) for order in orders]
    return [task.result() for task in tasks]


def _arguments(case: Case, index: int) -> Any:
    try:
        encode(case[1])
        return encode(tuple(case[0]))
    except TypeError as error:
        raise BadInput(f"hidden test {index + 1}: {error}") from error


def _failures(run: RawRun, expected: Sequence[tuple[int, Any]], limits: SandboxLimits) -> dict[int, str]:
    """Reasons of the failed cases of one sandbox, by the number of the case."""
    answers = _answers(run.output)
    missing = judge(run, limits).text.rsplit("\n", 1)[-1] if run.exit_status else "no result"
    if run.stopped_for:
        missing = judge(run, limits).text.rsplit("\n", 1)[-1]
    if -1 in answers:
        missing = answers[-1][1]
    failures = {}
    for place, (index, wanted) in enumerate(expected):
        kind, value = answers.get(place, ("e", missing))
        if kind != "r":
            failures[index] = value[:300]
        elif not _matches(value, wanted):
            failures[index] = "wrong result"
    return failures


def _answers(output: bytes) -> dict[int, tuple[str, Any]]:
    """Parse lines of the form [index, kind, value]. The agent may have written others, which are skipped."""
    answers: dict[int, tuple[str, Any]] = {}
    for line in output.split(b"\n"):
        try:
            index, kind, value = json.loads(line)
        except Exception:
            continue
        if type(index) is int and (kind == "r" or (kind == "e" and type(value) is str)):
            answers.setdefault(index, (kind, value))
    return answers


def _matches(data: Any, wanted: Any) -> bool:
    # Any exception fails the case: the agent chose the data, and an exception that left this module would replace
    # its reward of 0 by none.
    try:
        return _equal(decode(data), wanted)
    except Exception:
        return False


def _equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, int | float):
        if math.isnan(wanted):
            return math.isnan(found)
        return math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(wanted, list | tuple):
        return (
            type(found) is type(wanted)
            and len(found) == len(wanted)
            and all(_equal(a, b) for a, b in zip(found, wanted, strict=True))
        )
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and found.keys() == wanted.keys()
            and all(_equal(found[key], value) for key, value in wanted.items())
        )
    return bool(found == wanted)
