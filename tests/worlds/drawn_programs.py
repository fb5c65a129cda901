"""Agent programs that are drawn: messages, tokens, steps with any parameters, tools, forks."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Any

import cloudpickle

from heddle_dask.environments.base import Context, Reward, Task

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Program = list[list[Any]]
"""JSON-able: each operation is its name and its arguments."""

_TEXTS = ("hello", "what is 6 * 7?", "é\n\U0001f600", "<|im_end|>", " x ", "")


def draw_program(rng: random.Random, depth: int = 0) -> Program:
    """Between one and six operations after a first message; the first program may fork, and so may its forks."""
    drawn: Program = [["say", "user", rng.choice(_TEXTS[:2])]] if depth == 0 else []
    kinds = ["say", "tokens", "step", "step", "step", "tool", "ask"] + ["fork"] * (depth < 2)
    for _ in range(rng.randint(1, 6)):
        drawn.append(_operation(rng, rng.choice(kinds), depth))
    return [*drawn, ["step", {}]]


def _operation(rng: random.Random, kind: str, depth: int) -> list[Any]:
    match kind:
        case "say":
            return ["say", rng.choice(["user", "tool", "assistant", "user"]), rng.choice(_TEXTS)]
        case "tokens":
            return ["tokens", [rng.randint(32, 126) for _ in range(rng.randint(0, 5))]]
        case "step":
            return ["step", _parameters(rng)]
        case "tool":
            return ["tool", rng.randint(0, 9)]
        case "fork":
            return ["fork", draw_program(rng, depth + 1)]
    return [kind]


def _parameters(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, Any] = {
        "max_tokens": rng.randint(1, 30),
        "temperature": rng.choice([0.0, 0.5, 2.0]),
        "top_p": rng.choice([0.3, 1.0]),
        "top_k": rng.randint(0, 5),
        "min_p": rng.choice([0.0, 0.2]),
        "seed": rng.randint(0, 2**62),
        "stop": rng.choice(["a", ["b", "cd"]]),
    }
    drawn = {name: value for name, value in choices.items() if rng.random() < 0.4}
    if rng.random() < 0.2:
        drawn["n"] = rng.randint(2, 3)
        drawn["go_on_in"] = rng.randrange(drawn["n"])
    return drawn


def double(number: int) -> str:
    """The tool."""
    return str(2 * number)


async def play(program: Program, ctx: Context) -> None:
    """Run a drawn program; its forks run beside it, and it waits for them at its end."""
    forks: list[asyncio.Future[None]] = []
    for name, *arguments in program:
        if name == "say":
            ctx.append(*arguments)
        elif name == "tokens":
            ctx.append_tokens(*arguments)
        elif name == "ask":
            ctx.metadata["asked"] = ctx.done or ctx.context_tokens > 0
        elif name == "step":
            if not ctx.done:
                parameters = dict(arguments[0])
                chosen = parameters.pop("go_on_in", 0)
                reply = await ctx.generate(**parameters)
                ctx = [reply, *reply.alternatives][chosen].context
        elif name == "tool":
            ctx.append("tool", await ctx.call(double, *arguments))
        elif name == "fork":
            forks.append(asyncio.ensure_future(play(arguments[0], ctx.fork())))
    await asyncio.gather(*forks)


async def refused(task: Task, ctx: Context) -> float:
    """Asks for what no step can have; the task says for what."""
    ctx.append("user", "hello")
    ctx.metadata["asked"] = task.task_id
    if task.prompt == "an image":
        ctx.append("user", [{"type": "image_url", "image_url": {"url": "data:,"}}])  # type: ignore[arg-type]
    elif task.prompt == "no JSON":
        ctx.metadata["asked"] = object()
        return 1.0
    else:
        await ctx.generate(**{task.prompt: -1})
    return 1.0


class DrawnAgent:
    """An environment whose tasks bring their programs."""

    name = "drawn"

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [
            Task(f"p{number}", "", {"program": draw_program(random.Random(f"{seed}/{number}"))})
            for number in range(count)
        ]

    async def solve(self, task: Task, ctx: Context) -> Reward:
        await play(task.payload["program"], ctx)
        return Reward(0.5, {"format": 1.0}, {"program": len(task.payload["program"])})
