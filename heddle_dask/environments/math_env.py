"""`math`: arithmetic problems with several operations, solved with a Python tool.

Easy: a short chain of operations, or a list of numbers to add. Hard: long chains, and programs of assignments that
refer to any earlier line. Reward 1.0 for the right number, else 0.0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from heddle_dask.chat.tool_calls import format_call
from heddle_dask.environments.base import Context, Task
from heddle_dask.environments.splits import SplitEnvironment, Tier, draw_tasks, problem_key
from heddle_dask.environments.tool_agent import converse, text_argument
from heddle_dask.sandbox.python_runner import run_python

SYSTEM = (
    "Solve the problem with the tool python(code), one step per call:\n"
    + format_call("python", {"code": "print(1+2)"})
    + '\nThen reply "Answer: NUMBER".'
)
_REMINDER = 'Call the tool or reply "Answer: NUMBER".'
# Chat models often format the number: **42**, $42$, \boxed{42}.
_ANSWER = re.compile(r"Answer:(?:[\s*$({]|\\boxed)*(-?[\d,]*\.?\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class MathEnvironment(SplitEnvironment):
    """Arithmetic with a Python tool.

    Parameters
    ----------
    tier
        ``"easy"``: 1 to 6 operations; ``"hard"``: 5 to 11, with references to earlier lines.
    """

    uses_sandbox: ClassVar[bool] = True
    kind: ClassVar[str] = "math"

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        draw = _draw_easy if self.tier == "easy" else _draw_hard
        return draw_tasks(draw, count, seed=seed, split=self.split)

    async def solve(self, task: Task, ctx: Context) -> float | None:
        """Attempt the problem once: 1.0 if the final reply has the right number."""

        async def python(arguments: Mapping[str, Any]) -> str:
            code = text_argument(arguments, "code")
            output = await ctx.call(run_python, code, label="python")
            return str(output.text).strip() or "(no output: print the result)"

        ctx.append("system", SYSTEM)
        ctx.append("user", task.prompt)
        final = await converse(ctx, {"python": python}, _has_answer, reminder=_REMINDER, limits=self.limits)
        return float(final is not None and read_answer(final) == task.payload["answer"])


def read_answer(reply: str) -> float | None:
    """The number after the last "Answer:" of a reply, or None."""
    found = _ANSWER.findall(reply)
    return float(found[-1].replace(",", "")) if found else None


def _has_answer(reply: str) -> bool:
    return read_answer(reply) is not None


def _draw_easy(rng: random.Random) -> Task:
    if rng.random() < 0.35:
        return _sum_task("easy", [rng.randint(2, 999) for _ in range(rng.randint(3, 9))])
    return _chain_task("easy", rng, rng.randint(2, 6))


def _draw_hard(rng: random.Random) -> Task:
    if rng.random() < 0.6:
        return _chain_task("hard", rng, rng.randint(7, 11))
    return _program_task(rng, rng.randint(5, 9))


def _task(tier: Tier, kind: str, prompt: str, answer: int, **parts: Any) -> Task:
    payload = {"kind": kind, "answer": answer, **parts}
    return Task(f"math-{tier}-{problem_key(prompt):08x}", prompt, payload, domain=kind)


def _sum_task(tier: Tier, numbers: list[int]) -> Task:
    prompt = "What is " + "+".join(map(str, numbers)) + "?"
    return _task(tier, "sum", prompt, sum(numbers), numbers=numbers)


def _apply(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def _draw_operation(rng: random.Random, value: int) -> tuple[str, int]:
    """The next operation on `value`, chosen so that numbers stay below a million."""
    sign = rng.choice("++-*") if abs(value) < 100_000 else rng.choice("+-")
    return sign, rng.randint(2, 9) if sign == "*" else rng.randint(2, 999)


def _chain_task(tier: Tier, rng: random.Random, length: int) -> Task:
    start = value = rng.randint(2, 999)
    operations = []
    lines = ["Apply in order:", f"1: {start}"]
    for number in range(2, length + 2):
        sign, operand = _draw_operation(rng, value)
        value = _apply(value, sign, operand)
        operations.append([sign, operand])
        lines.append(f"{number}: {sign}{operand}")
    lines.append(f"{length + 2}: result")
    return _task(tier, "chain", "\n".join(lines), value, start=start, operations=operations)


def _program_task(rng: random.Random, length: int) -> Task:
    """Lines such as ``d = b * 3`` and ``e = d - a``; half of the operands are earlier variables."""
    names = "abcdefghijklmnop"
    values = [rng.randint(2, 99)]
    assignments: list[list[Any]] = []
    for number in range(1, length):
        # The last variable is an operand in most lines, so that most lines affect the result.
        left = number - 1 if rng.random() < 0.6 else rng.randrange(number)
        sign, operand = _draw_operation(rng, values[left])
        right: str | int = operand
        if sign != "*" and rng.random() < 0.5:
            other = rng.randrange(number)
            right, operand = names[other], values[other]
        values.append(_apply(values[left], sign, operand))
        assignments.append([names[number], names[left], sign, right])
    lines = [f"a = {values[0]}"]
    lines += [f"{name} = {left} {sign} {right}" for name, left, sign, right in assignments]
    lines.append(f"What is {names[length - 1]}?")
    return _task("hard", "program", "\n".join(lines), values[-1], start=values[0], assignments=assignments)
