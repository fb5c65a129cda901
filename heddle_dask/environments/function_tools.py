"""Tools that are plain functions: the turns of a model that calls them, and an agent of nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.chat.tool_calls import MalformedCall, ToolCall
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.actions import FunctionCall
from heddle_dask.environments.base import CUT, ActionFailed, Context, Reply, Reward, Task
from heddle_dask.environments.tool_agent import no_tool, shortened
from heddle_dask.environments.tool_schema import Function, arguments_for, schema_of

MOST_USELESS = 8
"""Replies in a row that call no tool that there is, after which a conversation ends."""


@dataclass(slots=True)
class ToolTurns:
    """The tools of one conversation.

    Attributes
    ----------
    schemas
        JSON text of the schemas of all tools; empty: there are none.
    useless
        Number of the latest replies in a row that were cut, or called no tool that there is.
    """

    functions: Mapping[str, Function] = field(default_factory=dict)
    schemas: str = ""
    useless: int = 0

    @property
    def is_stuck(self) -> bool:
        """Whether the model makes no progress."""
        return self.useless >= MOST_USELESS

    def given(self, tools: object) -> list[Mapping[str, Any]]:
        """The schemas of tools; those that are functions are kept, to be called.

        Raises
        ------
        BadInput
            As `schema_of`; what is no list of functions and schemas; or two functions of one name.
        """
        given = list(tools) if isinstance(tools, Sequence) and not isinstance(tools, str) else [None]
        for tool in given:
            if not (callable(tool) or isinstance(tool, Mapping)):
                raise BadInput(f"tools is {tools!r}: use a list of functions or JSON schemas")
        schemas = [tool if isinstance(tool, Mapping) else schema_of(tool) for tool in given]
        self.functions = {
            schema["function"]["name"]: tool for schema, tool in zip(schemas, given, strict=True) if callable(tool)
        }
        if len(self.functions) < sum(map(callable, given)):
            raise BadInput(f"tools: two functions have one name: {', '.join(self.functions)}")
        self.schemas = json.dumps(schemas, default=str) if schemas else ""
        return schemas

    async def run(self, ctx: Context, reply: Reply, most_chars: int, **terms: Any) -> list[str]:
        """Run the calls of a reply side by side, and append their results in the order of the calls."""
        if reply.finish_reason == "length":
            self.useless += 1
            ctx.append("user", CUT)
            return [CUT]
        calls = reply.calls
        usable = any(isinstance(call, ToolCall) and call.name in self.functions for call in calls)
        self.useless = self.useless + 1 if calls and not usable else 0
        answers = await asyncio.gather(*(self._answer(ctx, call, terms) for call in calls))
        texts = [shortened(text, most_chars) for text in answers]
        for text in texts:
            ctx.append("tool", text)
        return texts

    async def _answer(self, ctx: Context, call: ToolCall | MalformedCall, terms: Mapping[str, Any]) -> str:
        """Text for the model: the tool's result, or the error in the call."""
        if isinstance(call, MalformedCall):
            return f"error: {call.reason}"
        function = self.functions.get(call.name)
        if function is None:
            return no_tool(call.name, self.functions)
        try:
            arguments = arguments_for(function, call.arguments)
        except ValueError as error:
            return f"error: {call.name}: {error}"
        try:
            # Not `ctx.call`: a tool may have parameters of the names that this has.
            value = await ctx._perform(FunctionCall(function, (), arguments, label=call.name, **terms))
        except ActionFailed as error:
            return f"error: {call.name} failed: {error}"
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class ToolAgent:
    """An environment of tools and a score: its agent calls the tools until a reply calls none, which is its answer.

    Parameters
    ----------
    tools
        Functions, as for `Context.set_template`.
    score
        ``score(task, answer)``: the reward. It runs on the driver's event loop and must not block it.
    tasks
        ``tasks(count, seed)``; None: a run must be given its tasks.
    system
        System message.
    reply_tokens
        Maximum number of tokens of one reply; None: the limit of the run's budget.

    Raises
    ------
    BadInput
        A tool has a parameter without a type hint.
    """

    def __init__(
        self,
        tools: Sequence[Function],
        score: Callable[[Task, str], float | Reward | None],
        *,
        tasks: Callable[[int, int], Sequence[Task]] | None = None,
        system: str = "",
        name: str = "tools",
        reply_tokens: int | None = None,
    ) -> None:
        ToolTurns().given(tools)
        self.name = name
        self._tools, self._score, self._tasks = tools, score, tasks
        self._system, self._reply_tokens = system, reply_tokens

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """The tasks of its function."""
        if self._tasks is None:
            raise BadInput(f"environment {self.name!r} draws no tasks: give ToolAgent its tasks, or the run a list")
        return self._tasks(count, seed)

    async def solve(self, task: Task, ctx: Context) -> float | Reward | None:
        """Attempt the task once; without an answer the reward is 0."""
        ctx.set_template(tools=self._tools)
        if self._system:
            ctx.append("system", self._system)
        ctx.append("user", task.prompt)
        while not ctx.done:
            reply = await ctx.generate(max_tokens=self._reply_tokens)
            if not await ctx.run_tools(reply):
                return self._score(task, reply.answer)
        return 0.0
