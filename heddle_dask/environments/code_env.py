"""`code`: write a Python function; hidden tests are run as a reward action.

The agent can run its code with a Python tool and sees the output. The last Python block of its final reply is graded,
or else the last code that it ran. Reward 1.0 if every hidden test passes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from heddle_dask.chat.tool_calls import format_call
from heddle_dask.environments.base import ActionFailed, Context, Task
from heddle_dask.environments.list_programs import Stage, draw_stages, run_stages
from heddle_dask.environments.splits import SplitEnvironment, Tier, draw_tasks, problem_key
from heddle_dask.environments.tool_agent import converse, text_argument
from heddle_dask.sandbox.function_tests import run_function_tests
from heddle_dask.sandbox.python_runner import run_python

SYSTEM = (
    "Write the function in Python and try it with the tool python(code):\n"
    + format_call("python", {"code": "def f(xs):\n return xs\nprint(f([1]))"})
    + '\nThe last code you run is graded. When it is right, reply "Done."'
)
_REMINDER = 'Call the tool or reply "Done."'
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_DONE = re.compile(r"\bdone\W*\Z", re.IGNORECASE)
_HIDDEN_TESTS = 8
_EXAMPLE = "\nExample: "


@dataclass(frozen=True)
class CodeEnvironment(SplitEnvironment):
    """Functions over lists of integers.

    Parameters
    ----------
    tier
        ``"easy"``: 2 or 3 rules; ``"hard"``: 5 to 7.
    """

    uses_sandbox: ClassVar[bool] = True
    kind: ClassVar[str] = "code"

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        def draw(rng: random.Random) -> Task:
            return _draw(rng, self.tier)

        return draw_tasks(draw, count, seed=seed, split=self.split, problem_of=rules_of)

    async def solve(self, task: Task, ctx: Context) -> float | None:
        """Attempt the problem once: 1.0 if all hidden tests pass, None if they could not run."""
        last_code = ""

        async def python(arguments: Mapping[str, Any]) -> str:
            nonlocal last_code
            last_code = text_argument(arguments, "code")
            output = await ctx.call(run_python, last_code, label="python")
            return str(output.text).strip() or "(no output: print something)"

        ctx.append("system", SYSTEM)
        ctx.append("user", task.prompt)
        final = await converse(ctx, {"python": python}, _is_done, reminder=_REMINDER, limits=self.limits)
        code = _code_block(final or "") or last_code
        if not code:
            return 0.0
        try:
            report = await ctx.call(run_function_tests, code, "f", task.payload["cases"], kind="reward", label="tests")
        except ActionFailed:
            return None
        return float(report.passed == report.total)


def _code_block(reply: str) -> str:
    blocks = _BLOCK.findall(reply)
    return str(blocks[-1]) if blocks else ""


def _is_done(reply: str) -> bool:
    return bool(_DONE.search(reply) or _code_block(reply))


def _draw(rng: random.Random, tier: Tier) -> Task:
    stages = draw_stages(rng, rng.randint(2, 3) if tier == "easy" else rng.randint(5, 7))
    example = [rng.randint(0, 99) for _ in range(rng.randint(4, 6))]
    lines = ["Write f(xs), xs a list of integers:"]
    lines += [f"{number}. {stage.words}" for number, stage in enumerate(stages, 1)]
    rules = "\n".join(lines)
    # Tests depend on the rules alone, so that they are equal for every draw of the problem.
    inputs = _test_inputs(random.Random(problem_key(rules)))
    payload = {
        "stages": [[stage.key, stage.number] for stage in stages],
        "example": example,
        "expected": run_stages(stages, example),
        "cases": [[[xs], run_stages(stages, xs)] for xs in inputs],
    }
    prompt = f"{rules}{_EXAMPLE}f({example}) = {payload['expected']}"
    name = f"code-{tier}-{problem_key(prompt):08x}"
    return Task(name, prompt, payload, domain=f"{len(stages)} stages")


def rules_of(task: Task) -> str:
    """The rules of a problem, without the example: they determine its hidden tests and its split."""
    return task.prompt.partition(_EXAMPLE)[0]


def stages_of(task: Task) -> list[Stage]:
    """The rules that a task's function must follow; for tests and reference solutions, never for agents."""
    return [Stage(key, number) for key, number in task.payload["stages"]]


def _test_inputs(rng: random.Random) -> list[list[int]]:
    lengths = [0, *(rng.randint(1, 12) for _ in range(_HIDDEN_TESTS - 1))]
    return [[rng.randint(-20, 120) for _ in range(length)] for length in lengths]
