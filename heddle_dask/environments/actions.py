"""Actions: what an agent program and the hook of a reward may ask of the tool pool and of model services.

Here alone are the parameters of `call`, `score`, `logprobs` and `judge`; a context that offers them carries out what
they make of their arguments.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from heddle_dask.core.errors import BadInput, check_count, is_finite
from heddle_dask.core.needs import Given, Needs
from heddle_dask.environments.judging import Unreadable, messages_of, read_score, verdict_of

ActionKind = Literal["tool", "reward"]


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function that is to run as an action: what `ActionContext.call` was given.

    Attributes
    ----------
    cpus
        Short for `needs`; None afterwards.
    """

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    cpus: Given | None = None
    needs: Needs | None = None
    kind: ActionKind = "tool"
    label: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise BadInput(f"call: {self.function!r} is no function")
        if self.kind not in get_args(ActionKind):
            raise BadInput(f"call: kind is {self.kind!r}: use {' or '.join(get_args(ActionKind))}")
        if self.label is not None and not isinstance(self.label, str):
            raise BadInput(f"call: label is {self.label!r}: use a text")
        limit_s = self.timeout_s
        if limit_s is not None and limit_s != math.inf and not (is_finite(limit_s) and limit_s > 0):
            raise BadInput(f"call: timeout_s is {limit_s!r}: use seconds above 0, math.inf, or None")
        if self.needs is None:
            object.__setattr__(self, "needs", Needs(cpus=self.cpus))
            object.__setattr__(self, "cpus", None)
            return
        if not isinstance(self.needs, Needs):
            raise BadInput(f"call: needs is {self.needs!r}: use Needs(…)")
        if self.cpus is not None:
            raise BadInput("call: cpus and needs are both given: use Needs(cpus=…)")
        if self.needs.service and not inspect.iscoroutinefunction(self.function):
            raise BadInput("call: only an async function can use a model service: use async def f(…, service)")

    @property
    def wanted(self) -> Needs:
        assert self.needs is not None
        return self.needs

    @property
    def name(self) -> str:
        """Its label, else the name of its function."""
        return self.label or str(getattr(self.function, "__name__", type(self.function).__name__))


@dataclass(frozen=True, slots=True)
class ServiceCall:
    """A request to a model service: what `ActionContext.score` or `ActionContext.logprobs` was given.

    Attributes
    ----------
    inputs
        Texts and token ids, or the token ids whose logprobs are asked for, or the messages for a judge; None: the
        tokens of the context.
    """

    asked: Literal["score", "logprobs", "judge"]
    service: str
    inputs: Any = None
    start: int = 1
    gpus: Given = 0
    kind: ActionKind = "reward"
    timeout_s: float | None = None
    max_tokens: int = 1024
    temperature: float = 0.0


class ActionFailed(Exception):
    """A function given to `Context.call` raised, timed out or was lost; the message says which and why.

    Attributes
    ----------
    cause
        ``"raised"``, ``"timeout"``, ``"memory"``, ``"disk"``, ``"processes"``, ``"lost"``; or, for a call of an
        API that was repeated in vain, ``"rate-limited"`` or ``"unavailable"``.
    detail
        The remote traceback, or a sentence.
    output
        The end of what it had printed.
    """

    def __init__(self, cause: str, message: str, detail: str = "", output: str = "") -> None:
        super().__init__(message)
        self.cause = cause
        self.detail = detail
        self.output = output


class ActionContext(Protocol):
    """Runs functions on the tool pool, and asks model services.

    Whoever implements it subclasses it: `_perform` and `_ask_service` carry out what the others were asked for.
    """

    async def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        cpus: Given | None = None,
        needs: Needs | None = None,
        kind: ActionKind = "tool",
        label: str | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a tool or reward function as an action on the tool pool and return its value.

        Parameters
        ----------
        function
            Picklable. A plain function runs in a process, which is killed at the limit and otherwise used again.
            Async ones share a process; one that blocks is left there alone. A function with a parameter named
            ``cpus`` gets the number of granted CPUs.
        cpus
            Number of CPUs, ``(least, most)`` or a set, short for ``needs=Needs(cpus=…)``; 0 if it only waits.
        needs
            All its resources; None: one CPU.
        kind
            What a program asks for; of the hook of a reward, every action is a ``"reward"``.
        timeout_s
            Seconds after which it fails; None: the run's default (`Budget.tool_timeout_s`); ``math.inf``: never.

        Raises
        ------
        ActionFailed
            The function raised, ran past `timeout_s`, its process ended, its arguments or its value are too large
            (`Budget.max_action_bytes`), or its worker was lost too often.
        BadInput
            A parameter that is not allowed.
        """
        return await self._perform(FunctionCall(function, args, kwargs, cpus, needs, kind, label, timeout_s))

    async def score(
        self,
        service: str,
        inputs: Sequence[str | Sequence[int]] | None = None,
        *,
        gpus: Given = 0,
        kind: ActionKind = "reward",
        timeout_s: float | None = None,
    ) -> list[float]:
        """One number for each input from a model service with a classifier of one label, such as a reward model.

        An action like a `call`: it waits until the service is resident on GPUs of the pool, and is journalled.

        Parameters
        ----------
        service
            As declared with the run (`Pools`).
        inputs
            Texts, which the service's tokenizer turns into tokens, or token ids. None: the tokens of this context, as
            one input; the hook of a reward names them (`Transcript.token_ids`).
        gpus
            Possible numbers of GPUs, among those of the service; 0: any of these.
        kind, timeout_s
            As for `call`.

        Raises
        ------
        ActionFailed
            The service refused an input (too long, unknown ids), ran past `timeout_s`, or could not be loaded.
        BadInput
            The service is not declared, does not score, or a parameter is not allowed.
        """
        scores: list[float] = await self._ask_service(ServiceCall("score", service, inputs, 1, gpus, kind, timeout_s))
        return scores

    async def logprobs(
        self,
        service: str,
        token_ids: Sequence[int] | None = None,
        *,
        start: int = 1,
        gpus: Given = 0,
        kind: ActionKind = "reward",
        timeout_s: float | None = None,
    ) -> list[float]:
        """The logprobs of tokens from a model service with a language model, such as a teacher.

        An action, as `score`; the other parameters are the same.

        Parameters
        ----------
        token_ids
            None: those of this context, prompts included; messages that wait for the next step are not there yet.
        start
            Position of the first token that is asked for, at least 1. The answer has one logprob for each token from
            there on, given all tokens before it.
        """
        asked = ServiceCall("logprobs", service, token_ids, start, gpus, kind, timeout_s)
        logprobs: list[float] = await self._ask_service(asked)
        return logprobs

    async def judge(
        self,
        service: str,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        read: Callable[[str], Any] = read_score,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        gpus: Given = 0,
        kind: ActionKind = "reward",
        timeout_s: float | None = None,
    ) -> Any:
        """The verdict of a language model: a model service with one (`ServiceSpec`), or an endpoint (`RemoteModel`).

        An action, as `score`; the other parameters are the same. Of an endpoint it takes of the quota of its name.

        Parameters
        ----------
        prompt
            A text, or messages ``{"role": …, "content": …}``; the service's own chat template renders them.
        read
            Takes what the reply says behind its thinking and gives the verdict: a finite number, or anything else;
            None: the reply has none. ``str`` gives the reply itself.
        max_tokens
            Longest reply, thinking included.

        Raises
        ------
        ActionFailed
            As `score`; or, with the cause ``"raised"``, the reply was cut at `max_tokens` or has no verdict.
        BadInput
            The service is not declared or has no language model, or a parameter is not allowed.
        """
        messages = messages_of(prompt)
        check_count("judge: max_tokens", max_tokens)
        if not (is_finite(temperature) and temperature >= 0):
            raise BadInput(f"judge: temperature is {temperature!r}: use a number from 0 on")
        asked = ServiceCall("judge", service, messages, 1, gpus, kind, timeout_s, max_tokens, float(temperature))
        try:
            return verdict_of(await self._ask_service(asked), read)
        except Unreadable as error:
            raise ActionFailed("raised", f"judge {service}: {error}") from error

    async def _perform(self, call: FunctionCall) -> Any:
        """The value of a function, which runs as an action."""

    async def _ask_service(self, asked: ServiceCall) -> Any:
        """The answer of a model service."""
