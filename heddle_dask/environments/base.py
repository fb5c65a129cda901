"""The contracts of an environment and of the context of its agent program.

An environment has tasks and an agent program that solves them: `solve(task, ctx)` may have any control flow and uses
the model and tools only through `ctx`. It runs on the driver's event loop and must not block it: CPU work belongs in
an action (`ctx.call`). `solve` returns the reward, or None if it is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "tool"]
ActionKind = Literal["tool", "reward"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to attempt.

    Attributes
    ----------
    payload
        JSON-able data for the environment only: answers, hidden tests.
    group
        Name of a group of several tasks, for predictors; empty: the attempts at this task are the group.
    known_tokens, known_tools_s, known_observed_tokens
        Generated tokens, tool seconds and observation tokens of an attempt, if known beforehand (a replay); else 0.
        Oracles read them.
    prompt_tokens
        Length of the first context, for admission, placement and predictor; 0: estimated from `prompt`.
    domain
        Kind of task within the environment, a feature for predictors: a difficulty, a data set.
    message_tokens
        Length of the task itself, without the part of the prompt that all tasks share; 0: estimated from `prompt`.
    max_steps
        Limit of an attempt's LLM steps if the task has one, else 0; a feature for predictors.
    """

    task_id: str
    prompt: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    known_tokens: int = 0
    known_tools_s: float = 0.0
    known_observed_tokens: int = 0
    prompt_tokens: int = 0
    domain: str = ""
    message_tokens: int = 0
    max_steps: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of one LLM step.

    Attributes
    ----------
    text
        The sampled ids decoded, special tokens kept, the end-of-turn token removed.
    token_ids, logprobs
        The sampled ids and the logprob of each; same length.
    finish_reason
        ``"stop"``: the model ended its turn; ``"length"``: the token limit cut it.
    engine_s
        Seconds reported by the engine, including its own queue; NaN if it reports none.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    engine_s: float = float("nan")


class ActionFailed(Exception):
    """A function given to `Context.call` raised, timed out or was lost; the message says which and why.

    Attributes
    ----------
    cause
        ``"raised"``, ``"timeout"`` or ``"lost"``.
    detail
        The remote traceback, or a sentence.
    """

    def __init__(self, cause: str, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.cause = cause
        self.detail = detail


class Context(Protocol):
    """The agent program's interface to the model and to tools. One per trajectory."""

    @property
    def seed(self) -> int:
        """The seed of this trajectory: equal for equal run seed, task and sample."""

    @property
    def done(self) -> bool:
        """True if no further step is allowed: the step, token or context budget is used up."""

    @property
    def max_context_tokens(self) -> int:
        """Longest context the engine takes, prompt and generated tokens together."""

    @property
    def context_tokens(self) -> int:
        """Tokens in the record now, including appended ones that wait for the next step."""

    def append(self, role: Role, text: str) -> None:
        """Add a message for the next step, rendered by the chat template; its tokens are masked."""

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Add raw token ids for the next step, masked; no template is applied."""

    async def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        ignore_eos: bool = False,
    ) -> Reply:
        """Run one LLM step over the whole context and append the sampled tokens to the record.

        Steps must not overlap. A cancelled step (`asyncio.timeout`) appends no token, and another step may follow.
        """

    async def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        cpus: tuple[int, int] = (1, 1),
        kind: ActionKind = "tool",
        label: str | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a tool or reward function as an action on the tool pool and return its value.

        Parameters
        ----------
        function
            Picklable. A plain function runs in a process, which is killed at the limit and otherwise used again. An
            async one runs on the event loop of the tool worker and must not block it. A function with a parameter named
            ``cpus`` gets the number of granted CPUs.
        cpus
            Minimum and maximum number of CPUs for the action; (0, 0) if it only waits (a remote API).
        timeout_s
            Seconds after which it fails; None: the run's default (`Budget.tool_timeout_s`); ``math.inf``: never.

        Raises
        ------
        ActionFailed
            The function raised, ran past `timeout_s`, its process ended, its arguments or its value are too large
            (`Budget.max_action_bytes`), or its worker was lost too often.
        """


class Environment(Protocol):
    """A source of tasks with an agent program for them.

    An environment whose tools call `run_python` or `run_function_tests` has a class attribute ``uses_sandbox = True``:
    a rollout then checks the sandbox of the tool workers before it starts.
    """

    @property
    def name(self) -> str:
        """Short name stored with each trajectory."""

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` tasks, the same for the same seed."""

    async def solve(self, task: Task, ctx: Context) -> float | None:
        """Attempt the task once. Returns the reward or None (unknown)."""
