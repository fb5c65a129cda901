"""What an environment is, and what an agent program may ask of its context.

An environment yields tasks and solves them: `solve(task, ctx)` is any control flow that talks to the
model and to tools through `ctx` alone. It runs on the driver's event loop and must not block it:
CPU work belongs in an action (`ctx.call`). `solve` returns the reward, or None where it is unknown.
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
        JSON-able and private to the environment: answers, hidden tests.
    group
        What several tasks share, for predictors; empty: the attempts at this task are the group.
    known_tokens, known_tools_s, known_observed_tokens
        Tokens that an attempt will generate, seconds that its tools will take, and tokens that they will add, where
        that is known beforehand (a replay); oracles read it, 0 otherwise.
    prompt_tokens
        Length of the first context; 0: estimated from `prompt`. Admission, placement and predictor start from it.
    domain
        Kind of task within the environment, as a predictor may tell kinds apart: a difficulty, a data set.
    message_tokens
        Length of the task itself, without what stands before every task; 0: estimated from `prompt`.
    max_steps
        Limit of an attempt's LLM steps, where the task has one of its own; 0 otherwise. Predictors read it.
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
    """What one LLM step sampled.

    Attributes
    ----------
    text
        The sampled ids decoded, special tokens kept, the end-of-turn token removed.
    token_ids, logprobs
        As sampled, same length; the logprob of each sampled token.
    finish_reason
        ``"stop"``: the model ended its turn; ``"length"``: the token limit cut it.
    engine_s
        Seconds that the engine says it took, its own queue included; NaN when it does not say.
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
    """The agent's only door to the model and to tools. One per trajectory."""

    @property
    def seed(self) -> int:
        """A seed of this trajectory's own: same run seed, task and sample give the same number."""

    @property
    def done(self) -> bool:
        """True when no further step is allowed: step, token or context budget used up."""

    @property
    def max_context_tokens(self) -> int:
        """Longest context the engine takes, prompt and generated tokens together."""

    @property
    def context_tokens(self) -> int:
        """Tokens in the record now, those waiting to be sent included."""

    def append(self, role: Role, text: str) -> None:
        """Add a message for the next step; rendered by the chat template as a masked delta."""

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Add raw token ids for the next step, masked; no template is applied."""

    async def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        ignore_eos: bool = False,
    ) -> Reply:
        """Run one LLM step over everything appended so far and keep what it sampled.

        One after the other; one that is cancelled (`asyncio.timeout`) leaves no token behind, and another may follow.
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
            Picklable, plain or async. If it has a parameter named ``cpus``, it gets the number granted.
        cpus
            Least and most CPUs that the action can use; (0, 0) for one that only waits (a remote API).

        Raises
        ------
        ActionFailed
            The function raised, ran past `timeout_s`, or its worker was lost too often.
        """


class Environment(Protocol):
    """A source of tasks with an agent program for them."""

    @property
    def name(self) -> str:
        """Short name stored with each trajectory."""

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` tasks, the same for the same seed."""

    async def solve(self, task: Task, ctx: Context) -> float | None:
        """Attempt the task once. Returns the reward or None (unknown)."""
