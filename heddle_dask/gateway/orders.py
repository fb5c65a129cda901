"""What a request of an agent asks for, whatever its dialect, and its answer.

The server (`gateway.server`, `gateway.dialects`) makes a `StepOrder` of a request, and a response of a `StepAnswer`.
What is between is an `Exchange`: in a rollout the way to the driver, where the order becomes a step of its trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.core.errors import HeddleError
from heddle_dask.core.sampling import StructuredOutput

ChoiceEnd = Literal["stop", "length", "tool_calls"]
RefusalKind = Literal[
    "invalid_request", "authentication", "not_found", "too_large", "context_length", "budget", "overloaded", "failed"
]


@dataclass(frozen=True, slots=True)
class StepOrder:
    """One request for one step, `n` times.

    Attributes
    ----------
    messages
        The whole conversation, as the agent sees it.
    tools
        JSON text of a list of tools in the form of OpenAI's chat API; empty: none.
    tool_choice
        ``auto``, ``none``, ``required``, or ``tool:NAME``.
    max_tokens, temperature, top_p, top_k, min_p, seed
        None: the run's.
    template
        JSON text of an object: variables of the chat template (``chat_template_kwargs``).
    idempotency_key
        Of the request, where the client sends one; a repeated request with the same key is the same step.
    request_id
        Of this try of the request, unique in the gateway; names it when the client has gone.
    streams
        Whether the client wants the text as it comes.
    is_retry
        Whether the client says that it has asked for this before (``x-stainless-retry-count``): it then joins the same
        order, if that is still running.
    """

    messages: tuple[ChatMessage, ...]
    tools: str = ""
    tool_choice: str = "auto"
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    structured: StructuredOutput | None = None
    seed: int | None = None
    n: int = 1
    template: str = ""
    idempotency_key: str = ""
    request_id: str = ""
    streams: bool = False
    is_retry: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled turn, read by the engine's parsers.

    Attributes
    ----------
    message
        Content, thinking and calls; the calls have ids.
    raw
        The sampled text with nothing taken out but the token that ends the turn: what was streamed is its beginning.
    token_ids, logprobs
        As they were sampled.
    stopped_by
        The stop text that has ended it; `raw` has that text, the message has not.
    """

    message: ChatMessage
    finish_reason: ChoiceEnd
    raw: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    stopped_by: str = ""

    @property
    def calls(self) -> tuple[CalledTool, ...]:
        return self.message.calls


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The result of an order.

    Attributes
    ----------
    cached_tokens
        Of the prompt, found in the engine's cache.
    policy_version
        Of the weights that sampled; -1: unknown.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    policy_version: int = -1


class OrderRefused(HeddleError):
    """An order that has no answer.

    Attributes
    ----------
    kind
        What the server makes the status and the type of the error of.
    """

    def __init__(self, message: str, kind: RefusalKind) -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind

    def __reduce__(self) -> tuple[type[OrderRefused], tuple[str, RefusalKind]]:
        return type(self), (str(self), self.kind)


OnText = Callable[[int, str], None]
"""Takes the number of a choice and the text that was sampled of it since the last call, in the event loop.

Special tokens are kept, but for the one that ends the turn. Where the prompt has opened the thinking, the text begins
with its marker (``<think>``), so that it can be told from what is said.
"""


class Exchange(Protocol):
    """Where orders of one trajectory are answered."""

    async def answer(self, order: StepOrder, on_text: OnText | None = None) -> StepAnswer:
        """Run the order as a step; cancelled, the step is aborted.

        Parameters
        ----------
        on_text
            Called with text as it comes, where the engine sends it before the step ends.

        Raises
        ------
        OrderRefused
            It cannot be run, or was not.
        """

    async def count_tokens(self, order: StepOrder) -> int:
        """Tokens of the prompt that the order would have; nothing is run.

        Raises
        ------
        OrderRefused
            The messages cannot be rendered.
        """
