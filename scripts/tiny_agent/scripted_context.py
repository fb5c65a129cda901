"""A context whose model is a scripted expert: runs real environment programs without an engine.

The conversation that comes out is exactly what the environment makes of it. Python code that runs
without fault is run in this process (it is the experts' own, and a sandbox takes 50 ms per call);
faulty code goes through the real sandbox, so that the error text is the real one.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.core.needs import Needs
from heddle_dask.environments.base import ActionKind, Reply
from heddle_dask.sandbox.function_tests import TestReport, run_function_tests
from heddle_dask.sandbox.python_runner import ToolOutput, run_python


@dataclass(frozen=True, slots=True)
class Turn:
    """What an expert says; `learn` is False for a mistake that must not be imitated."""

    text: str
    learn: bool = True


Expert = Generator[Turn, str, None]
"""Yields turns and receives, for each, the message that came back."""


@dataclass(slots=True)
class ScriptedContext:
    """The part of the `Context` protocol that chat programs need, over an expert.

    Attributes
    ----------
    messages
        The conversation so far: ``role`` and ``content``.
    learned
        For each assistant message in order, whether it is to be imitated.
    """

    expert: Expert
    seed: int = 0
    max_context_tokens: int = 4096
    in_process: bool = True
    messages: list[dict[str, str]] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Never: experts stay within every budget."""
        return False

    @property
    def context_tokens(self) -> int:
        """Bytes so far; good enough, since a token is a byte."""
        return sum(len(message["content"].encode()) for message in self.messages)

    def append(self, role: str, text: str) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": text})

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Not for chat programs."""
        raise NotImplementedError("scripted experts know messages only")

    async def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        ignore_eos: bool = False,
    ) -> Reply:
        """The expert's next turn."""
        first = not self.learned
        turn = next(self.expert) if first else self.expert.send(self.messages[-1]["content"])
        self.learned.append(turn.learn)
        self.append("assistant", turn.text)
        return Reply(turn.text, (), (), "stop")

    async def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        cpus: tuple[int, int] | None = None,
        needs: Needs | None = None,
        kind: ActionKind = "tool",
        label: str | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the tool here and now."""
        if self.in_process and function is run_python:
            text = run_in_process(args[0])
            if text is not None:
                return ToolOutput(text=text, ok=True, cause="", seconds=0.0)
        if self.in_process and function is run_function_tests:
            return _test_in_process(*args)
        value = function(*args, **kwargs)
        return await value if hasattr(value, "__await__") else value


def run_in_process(code: str) -> str | None:
    """What an expert's code prints, or None when it raises."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "__main__"})
    except Exception:
        # Whatever it is, the sandbox will say it in the words that a model would see.
        return None
    return printed.getvalue()


def _test_in_process(code: str, function: str, cases: Sequence[Any]) -> TestReport:
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    passed = sum(names[function](*arguments) == expected for arguments, expected in cases)
    return TestReport(passed=passed, total=len(cases), text="")
