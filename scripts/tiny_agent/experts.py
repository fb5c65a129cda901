"""Scripted experts: how the three environments are solved, with mistakes made and repaired.

An expert speaks through the same messages as a model. Some turns are spoilt on purpose (a call that
cannot be read, code that fails, a misspelt query): the turn is not imitated, its repair is. On hard
tasks `carelessness` is the share of attempts with a mistake that is imitated and never repaired: it
leaves tiny-agent the headroom that reinforcement learning is to win back. At 0 every task is solved.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator

from heddle_dask.chat.tool_calls import format_call
from heddle_dask.environments.base import Task
from heddle_dask.environments.code_env import stages_of
from heddle_dask.environments.list_programs import Stage
from scripts.tiny_agent.scripted_context import Expert, Turn, run_in_process

SPOILT = 0.05
"""Share of calls that are first made wrongly, to show the repair."""
_FIRST_TRY_WRONG = 0.1
Step = Generator[Turn, str, str]
Answer = Generator[Turn, str, tuple[str, str]]
"""Ends with a last thought and the result."""


def make_expert(task: Task, rng: random.Random, carelessness: float = 0.0) -> Expert:
    """The expert for a task of any of the three environments."""
    makers = {"math": _solve_math, "code": _solve_code, "search": _solve_search}
    return makers[task.task_id.split("-")[0]](task, rng, rng.random() < carelessness)


def _call(rng: random.Random, thought: str, tool: str, argument: str, value: str) -> Step:
    """One tool call, now and then spoilt first; returns what the tool said."""
    text = thought + format_call(tool, {argument: value})
    while rng.random() < SPOILT:
        yield Turn(_spoil(rng, text, thought), learn=False)
    said = yield Turn(text)
    return said


def _spoil(rng: random.Random, text: str, thought: str) -> str:
    """The same turn with a mistake of form: the environment answers with an error or a reminder."""
    wrong = [
        text.replace('"}}', '"}'),
        text.replace('"}}', "}}"),
        text.replace("\n</tool_call>", ""),
        text.replace('"name": "', '"name": "x', 1),
        text.replace('": "', '": ', 1),
        text.replace('{"name"', "{name", 1),
        thought or "I see.",
    ]
    return rng.choice(wrong)


def _solve_math(task: Task, rng: random.Random, careless: bool) -> Expert:
    solve = {"sum": _solve_sum, "chain": _solve_chain, "program": _solve_program}
    thought, answer = yield from solve[task.payload["kind"]](task, rng, careless)
    yield Turn(f"{thought}Answer: {answer}")


def _compute(rng: random.Random, thought: str, expression: str) -> Step:
    if rng.random() < SPOILT / 2:
        yield Turn(thought + format_call("python", {"code": f"print({expression}"}), learn=False)
    value = yield from _call(rng, thought, "python", "code", f"print({expression})")
    return value


def _solve_sum(task: Task, rng: random.Random, careless: bool) -> Answer:
    numbers = [str(number) for number in task.payload["numbers"]]
    total = yield from _compute(rng, "", "+".join(numbers))
    return "", total


def _solve_chain(task: Task, rng: random.Random, careless: bool) -> Answer:
    value = str(task.payload["start"])
    steps = list(enumerate(task.payload["operations"], 2))
    first = f"1: {value}\n"
    if careless:
        del steps[rng.randrange(1, len(steps))]
    for number, (sign, operand) in steps:
        thought = f"{first}{number}: {sign}{operand}\n"
        first = ""
        value = yield from _compute(rng, thought, f"{value}{sign}{operand}")
    return f"{len(task.payload['operations']) + 2}: result\n", value


def _solve_program(task: Task, rng: random.Random, careless: bool) -> Answer:
    last = str(task.payload["start"])
    values = {"a": last}
    steps = task.payload["assignments"]
    wrong_at = rng.randrange(1, len(steps)) if careless else -1
    for number, (name, left, sign, right) in enumerate(steps):
        operand = values.get(str(right), str(right))
        first = last if number == wrong_at else values[left]
        if number == wrong_at and first == values[left]:
            operand = str(rng.randint(2, 99))
        thought = f"{name} = {left} {sign} {right}\n"
        last = values[name] = yield from _compute(rng, thought, f"{first}{sign}{operand}")
    return "", last


def _solve_code(task: Task, rng: random.Random, careless: bool) -> Expert:
    """Try the function on the example; done when it prints what was expected."""
    stages = list(enumerate(stages_of(task), 1))
    example, expected = task.payload["example"], str(task.payload["expected"])
    right = _write_code(stages, example)
    thought = ""
    wrong = _wrong_code(rng, stages, example, expected)
    if wrong is not None and (careless or rng.random() < _FIRST_TRY_WRONG):
        yield from _call(rng, "", "python", "code", wrong)
        if careless:
            yield Turn("Right. Done.")
            return
        thought = "Wrong.\n"
    if rng.random() < 2 * SPOILT:
        # A fault of the language: the traceback is the real sandbox's.
        slip = rng.choice([("xs):", "xs)"), ("print(f(", "print(g("), ("return", "retrun")])
        fault = right.replace(*slip)
        yield Turn(thought + format_call("python", {"code": fault}), learn=False)
        thought = "Wrong.\n"
    yield from _call(rng, thought, "python", "code", right)
    yield Turn("Right. Done.")


def _write_code(stages: list[tuple[int, Stage]], example: list[int]) -> str:
    """The function with each rule quoted before its line: a small model otherwise loses its place."""
    lines = ["def f(xs):"]
    for number, stage in stages:
        start = "return" if stage.returns else "xs ="
        lines += [f" # {number}. {stage.words}", f" {start} {stage.python}"]
    return "\n".join([*lines, f"print(f({example}))"])


def _wrong_code(rng: random.Random, stages: list[tuple[int, Stage]], example: list[int], expected: str) -> str | None:
    """Code that forgets a rule and so prints something wrong; None when no such slip shows."""
    slips = [stages[:place] + stages[place + 1 :] for place in range(len(stages) - 1)]
    rng.shuffle(slips)
    for slip in slips:
        code = _write_code(slip, example)
        if (run_in_process(code) or "").strip() != expected:
            return code
    return None


def _solve_search(task: Task, rng: random.Random, careless: bool) -> Expert:
    """Follow one relation per search."""
    place = str(task.payload["start"])
    path = list(task.payload["path"])
    if careless:
        path = path[: rng.randrange(1, len(path))]
    # Before each search the question's own words, "founder's employer", lead to the next relation.
    nested = f"{path[0]} of {place}?" in task.prompt and len(path) > 1
    thought = f"{path[0]} of {place}:\n" if nested else f"What is {place}'s {path[0]}:\n"
    for number, relation in enumerate(path):
        query = f"{relation} of {place}"
        if rng.random() < SPOILT:
            cut = rng.randrange(len(query) - len(place), len(query))
            wrong = query[:cut] + query[cut + 1 :]
            yield Turn(thought + format_call("search", {"query": wrong}), learn=False)
        found = yield from _call(rng, thought, "search", "query", query)
        place = _read_fact(found, place, relation)
        ahead = f"'s {path[number + 1]}:" if number + 1 < len(path) else "?"
        thought = f"{relation}: {place}.\n{relation}{ahead}\n"
    yield Turn(f"{thought}Answer: {place}")


def _read_fact(found: str, place: str, relation: str) -> str:
    """The value of a relation on the page about `place` among the pages found."""
    match = re.search(rf"^{re.escape(place)} \(.*?\b{re.escape(relation)}: (.*?)\.(?: |$)", found, re.MULTILINE)
    if match is None:
        raise LookupError(f"no {relation!r} of {place!r} in {found!r}")
    return match[1]
