"""The contracts of an environment and of the context of its agent program.

An environment has tasks and an agent program that solves them: `solve(task, ctx)` may have any control flow and uses
the model and tools only through `ctx`. It runs on the driver's event loop and must not block it: CPU work belongs in
an action (`ctx.call`). `solve` returns the reward (a number, or a `Reward` with its parts), or None if it is unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, SupportsFloat

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.chat.reply_parts import answer_of
from heddle_dask.chat.tool_calls import MalformedCall, ReadReply, ToolCall, parse_calls
from heddle_dask.core.errors import BadInput, encodable_text, is_finite, text_of
from heddle_dask.core.needs import Needs
from heddle_dask.core.run_description import TURN_REWARDS
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.environments.actions import ActionContext
from heddle_dask.environments.actions import ActionFailed as ActionFailed
from heddle_dask.environments.agent_gateway import AgentGateway
from heddle_dask.environments.program_sandbox import ProgramSandbox, sandbox_spec
from heddle_dask.sandbox.stateful.contract import SandboxSpec

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length"]
CUT = "Your reply was cut at its limit of tokens: nothing of it counts. Reply in fewer tokens."
"""The user message of shipped loops after a reply that its limit has cut."""
NO_PROGRESS = "no_progress"
"""The entry of `Context.metadata` by which a program gives up."""
OUT_OF_TIME = "out_of_time"
"""The entry by which it says that the agent's time was up."""


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
        Generated tokens, tool seconds and observation tokens of an attempt, if known beforehand (a replay); else 0,
        which any number that is not finite becomes. Oracles read them.
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

    def __post_init__(self) -> None:
        for name in ("task_id", "prompt", "group", "domain"):
            text = getattr(self, name)
            if isinstance(text, str) and not text.isascii():
                object.__setattr__(self, name, encodable_text(text))
        for name in ("known_tokens", "known_tools_s", "known_observed_tokens", "prompt_tokens", "message_tokens"):
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                object.__setattr__(self, name, 0)


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
    alternatives
        With ``generate(n=…)``, the replies of the forks: `n` - 1 of them.
    thinking_opened
        Whether the generation prompt ended with an opened thinking block.
    read
        What the engine's own parsers have read of it, where they have (``--tool-call-parser`` of vLLM).
    step_index
        Number of the step, from 0, counted from the beginning of the conversation: `Context.fork` goes on behind it.
    cached_tokens
        Of its prompt, found in the engine's cache.
    policy_version
        Of the weights that sampled its first token; -1: unknown.
    context
        The context in which this reply is the last step, to go on from. A copy that is pickled, such as an argument
        of `Context.call`, has None.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    engine_s: float = float("nan")
    alternatives: tuple[Reply, ...] = ()
    thinking_opened: bool = False
    read: ReadReply | None = None
    step_index: int = 0
    cached_tokens: int = 0
    policy_version: int = -1
    # Typed for programs, whose replies all have one.
    context: Context = field(default=None, repr=False, compare=False)  # type: ignore[assignment]

    @property
    def answer(self) -> str:
        """What it says behind its thinking (``<think>…</think>``); empty while the thinking has no end."""
        answer = answer_of(self.text, thinking_opened=self.thinking_opened)
        if not answer or self.read is None or not self.read.content:
            return answer
        return answer_of(self.read.content)

    @property
    def calls(self) -> list[ToolCall | MalformedCall]:
        """The calls of tools in its answer, in order; also those that cannot be read. A cut reply has none."""
        answer = answer_of(self.text, thinking_opened=self.thinking_opened)
        if self.finish_reason == "length" or not answer:
            return []
        return list(self.read.calls) if self.read is not None and self.read.calls else parse_calls(answer)

    def __reduce__(self) -> tuple[type[Reply], tuple[Any, ...]]:
        values = (getattr(self, each.name) for each in fields(self) if each.name != "context")
        return Reply, tuple(values)


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of a trajectory with its parts, stored with it.

    Attributes
    ----------
    value
        None: unknown. So is a number that is not finite.
    parts
        Named parts, such as ``{"format": 1.0, "answer": 0.0}``. One that is not finite is left out.
    metadata
        JSON-able facts about the attempt, stored beside what `Context.metadata` has; a number that is not finite is
        None there.
    turns
        Rewards of the LLM steps in their order, where these have some: each step is then trained by what followed from
        it (`training.advantages`). Their sum must be the value; None as the value stands for it. Stored in `metadata`.
    unknown
        What is not finite of value and parts, in words; empty where all of it is.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    unknown: str = ""
    turns: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.turns:
            self._sum_turns()
        if not isinstance(self.parts, Mapping):
            raise BadInput(f"reward: parts is {self.parts!r}: use a mapping of names to numbers")
        numbers = {name: _number(part) for name, part in self.parts.items()}
        for name, part in numbers.items():
            if not isinstance(name, str) or part is None:
                raise BadInput(f"reward: the part {name!r} is {part!r}: use a name and a number")
        value = _number(self.value)
        named = {"the reward": value, **{f"its part {name!r}": part for name, part in numbers.items()}}
        odd = [f"{name} is {each}" for name, each in named.items() if each is not None and not math.isfinite(each)]
        object.__setattr__(self, "value", None if value is None or not math.isfinite(value) else value)
        object.__setattr__(self, "parts", {name: part for name, part in numbers.items() if is_finite(part)})
        object.__setattr__(self, "metadata", stored_metadata(self.metadata))
        object.__setattr__(self, "unknown", ", ".join(odd) or self.unknown)

    def _sum_turns(self) -> None:
        turns = [_number(each) for each in self.turns]
        total = math.nan if None in turns else math.fsum(each for each in turns if each is not None)
        value = total if self.value is None else _number(self.value)
        if math.isfinite(total) and value is not None and not math.isclose(value, total, abs_tol=1e-6):
            raise BadInput(f"reward: its turns sum up to {total:g}, and its value is {value:g}: leave the value None")
        object.__setattr__(self, "turns", tuple(turns))
        object.__setattr__(self, "value", value if math.isfinite(total) else total)
        object.__setattr__(self, "metadata", {**self.metadata, TURN_REWARDS: turns})

    @property
    def cause(self) -> str:
        """Why it, or a part of it, is unknown (`TrajectoryRecord.reward_cause`); empty where all is known."""
        return "not-finite" if self.unknown else ""

    @classmethod
    def of(cls, value: object) -> Reward:
        """What a program returned: a reward, a number, or None."""
        return value if isinstance(value, Reward) else cls(_number(value))


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, SupportsFloat):
        try:
            return float(value)
        except OverflowError:
            return math.inf  # a whole number beyond all floats
    raise BadInput(f"the reward is {value!r}: use a number, None, or Reward(…)")


def stored_metadata(metadata: object) -> dict[str, Any]:
    """Metadata as they are read again from a run; None for a number that is not finite."""
    try:
        if isinstance(metadata, Mapping) and all(isinstance(name, str) for name in metadata):
            stored: dict[str, Any] = json.loads(json.dumps(dict(metadata)), parse_constant=lambda name: None)
            return stored
    except (TypeError, ValueError) as error:
        raise BadInput(f"metadata: not JSON-able: {error}") from None
    raise BadInput(f"metadata is {metadata!r}: use a mapping of names to JSON values")


class EnvironmentFailed(Exception):
    """The environment itself failed: a reset or a step raised, came too late, or its machine is gone.

    An environment raises it where neither the agent nor the task is to blame. The attempt is made again in a fresh
    environment (`RetryPolicy.max_environment_attempts`), and it has no reward. A bug of the agent program is another
    exception.
    """


@contextmanager
def environment_step(what: str) -> Iterator[None]:
    """Around a reset or step of an environment: an error, or a limit of time that passes, is an `EnvironmentFailed`.

    Parameters
    ----------
    what
        Opens the message, such as ``"reset"``.

    Examples
    --------
    >>> with environment_step("reset"):
    ...     raise ConnectionResetError("the game server has gone")
    Traceback (most recent call last):
    ...
    heddle_dask.environments.base.EnvironmentFailed: reset: ConnectionResetError: the game server has gone
    """
    try:
        yield
    except (EnvironmentFailed, BadInput):
        raise
    except TimeoutError as error:
        raise EnvironmentFailed(f"{what} took too long: {text_of(error)}".removesuffix(": ")) from error
    except Exception as error:
        raise EnvironmentFailed(f"{what}: {type(error).__name__}: {text_of(error)}".removesuffix(": ")) from error


class Context(ActionContext, Protocol):
    """The agent program's interface to the model and to tools. One per trajectory, and one more for each fork."""

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

    @property
    def metadata(self) -> dict[str, Any]:
        """JSON-able facts that are stored with the trajectory; the program sets its entries.

        A program that gives up, since the model makes no progress, sets ``"no_progress"`` to a line that says why: the
        trajectory is then truncated with the cause ``"no-progress"``, and keeps its reward. With ``"out_of_time"`` the
        cause is ``"time"``.
        """

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that were set for this trajectory (`set_template`); tools as schemas."""

    def fork(self, *, after_step: int | None = None) -> Context:
        """A second context with the same history, which goes on by itself: own messages, steps, tools and record.

        Branches may run side by side (`asyncio.gather`). They share the trajectory's reward, its limit of time and its
        `metadata`; `max_steps` and `max_context_tokens` bound each branch with what it has in common with others. A
        branch is stored with the trajectory: the common tokens come first, masked. Several replies to one prompt are
        one call of `generate`.

        Parameters
        ----------
        after_step
            The branch goes on right behind this step of the context (`Reply.step_index`), without what came after it;
            -1: it is empty, and no variable of its template is set. None: it has all that the context has.

        Raises
        ------
        BadInput
            The context itself has no such step that has ended; those before a fork are of the context that it left.
        RuntimeError
            A step is awaited, and `after_step` is None.
        """

    async def gateway(self) -> AgentGateway:
        """Give an agent that speaks the API of OpenAI or Anthropic this context: each of its requests is a step.

        ``ctx.sandbox(gateway=gate)`` opens a sandbox whose only network it is. The agent sends whole conversations:
        what the context has of them is kept as it was sampled, and one that differs goes on in a fork. Called again,
        it returns the same gateway. It ends with the program.

        Raises
        ------
        BadInput
            The cluster has no tool worker, beside which a gateway runs; or this is a fork.
        """

    def set_template(self, **variables: Any) -> None:
        """Set variables of the chat template for this trajectory, before anything is appended.

        ``ctx.set_template(tools=[…], enable_thinking=False)``: `tools` are functions with type hints, which
        `run_tools` then calls, or JSON schemas. The model reads what their docstrings say (of NumPy, Google or reST
        style). All other names are those that the model's template uses. They come on top of the run's (`ChatModel`).

        Raises
        ------
        BadInput
            Something was appended before, a name is no variable, a tool has no type hints, or the template
            cannot be used with these values.
        """

    async def run_tools(
        self, reply: Reply, *, timeout_s: float | None = None, needs: Needs | None = None, most_chars: int = 10_000
    ) -> list[str]:
        """Run what a reply calls of the tools given to `set_template`, and append the results as tool messages.

        The calls run side by side, each as an action (`call`). What is wrong in a call, and the failure of a tool, is a
        text for the model. A cut reply calls nothing, and the model is told so. After eight replies in a row without a
        usable call the trajectory is `done`, and ends as truncated with the cause ``"no-progress"``.

        Parameters
        ----------
        timeout_s, needs
            Of each call, as for `call`.
        most_chars
            Maximum length of one result; of a longer one the end is kept.

        Returns
        -------
        list of str
            What was appended; empty if the reply has ended and calls nothing: then `Reply.answer` is the answer.
        """

    def append(self, role: Role, text: str) -> None:
        """Add a message for the next step, rendered by the chat template; its tokens are masked.

        An assistant message is an earlier turn, such as an example. If none follows it, it is the beginning of the
        reply, which the next step continues.

        Raises
        ------
        BadInput
            An unknown role, a content that is no text (images are not supported), or the reply itself: the context
            keeps each reply as it was sampled.
        """

    def append_message(self, message: ChatMessage) -> None:
        """As `append`, of a message that may have thinking, calls of tools, or the id of a call.

        An assistant message with calls cannot be the beginning of the reply. One that equals the reply is not refused,
        but rendered: leave it out.

        Raises
        ------
        BadInput
            An unknown role.
        """

    def prompt_tokens(
        self,
        messages: Sequence[ChatMessage],
        *,
        after_step: int | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens that the prompt would have if these messages were appended; nothing is changed.

        Parameters
        ----------
        messages
            As for `append_message`, in their order.
        after_step
            As for `fork`.
        template
            Variables of the template, for a prompt of which nothing was appended before.

        Raises
        ------
        BadInput
            The template refuses them, or the context has no such step.
        """

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Add raw token ids for the next step, masked; no template is applied."""

    async def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        structured: StructuredOutput | None = None,
        seed: int | None = None,
        n: int = 1,
        ignore_eos: bool = False,
    ) -> Reply:
        """Run one LLM step over the whole context and append the sampled tokens to the record.

        Steps must not overlap. A cancelled step (`asyncio.timeout`) appends no token, and another step may follow.

        Parameters
        ----------
        max_tokens
            Most tokens of the step; None: `Budget.max_step_tokens`.
        temperature, top_p, top_k, min_p
            As in `Sampling`; None: the run's default.
        stop
            Texts that end the step. The tokens up to the one that completes a text are kept, as they were sampled.
        structured
            A form that the reply must have. A preempted step of this kind begins again. The emulated engine ignores it.
        seed
            Of this step; None: derived from `seed` of the trajectory.
        n
            Number of continuations that are sampled side by side: the first goes on in this context, each other one in
            a fork of it, with a seed of its own (`seed`, if given, plus its number)::

                reply = await ctx.generate(n=4)
                ctx = max([reply, *reply.alternatives], key=score).context

            If one fails, or the call is cancelled, all others are cancelled, and none has appended a token.
        ignore_eos
            True: exactly `max_tokens` tokens.

        Raises
        ------
        BadInput
            A parameter that is not allowed; not caught, it fails the trajectory with the cause ``"agent"``.
        """

    def sandbox(
        self,
        *,
        root: str = "",
        image: str = "",
        kind: str = "",
        files: Mapping[str, bytes | str] | None = None,
        setup: Sequence[str] = (),
        memory: int | str = "512 MiB",
        disk: int | str = "256 MiB",
        network: bool = False,
        gateway: object = None,
        **limits: Any,
    ) -> ProgramSandbox:
        """A sandbox with a shell that keeps its files between calls: ``async with ctx.sandbox(…) as box:``.

        It is made on a tool worker at its first call (`ProgramSandbox.exec`), which has its memory free.

        Parameters
        ----------
        root, image, kind
            As in `SandboxSpec`. Without a kind, bubblewrap; with ``Budget(sandbox="weak")`` also plain processes.
        files
            Written into the work directory at the start, by relative path.
        setup
            Commands that are run once after that. Attempts with the same files and setup begin with a copy of what
            the first of them on each worker has set up.
        memory, disk
            Bytes, or a text such as ``"2 GiB"``: of all its processes, and of its files.
        network
            Whether it may use the worker's network.
        gateway
            That of this trajectory, to which ``http://127.0.0.1:8911`` leads in the sandbox: its only network.
        **limits
            ``folders``, ``max_files``, ``max_processes``, ``output_bytes``, ``setup_timeout_s``, as in `SandboxSpec`.
        """
        spec = sandbox_spec(root, image, kind, files, setup, memory, disk, network, gateway, **limits)
        return self._open_sandbox(spec)

    def _open_sandbox(self, spec: SandboxSpec) -> ProgramSandbox:
        """The sandbox that is described."""


class Environment(Protocol):
    """A source of tasks with an agent program for them.

    An environment whose tools call `run_python` or `run_function_tests` has a class attribute ``uses_sandbox = True``:
    a rollout then checks the sandbox of the tool workers before it starts. One whose world does not come to the same
    state by the same calls has ``can_replay = False``: no attempt goes on from the prefix of another.
    """

    @property
    def name(self) -> str:
        """Short name stored with each trajectory."""

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` tasks, the same for the same seed."""

    async def solve(self, task: Task, ctx: Context) -> float | Reward | None:
        """Attempt the task once. Returns the reward, with its parts where it has some, or None (unknown)."""
