"""The requests of an agent as steps of one trajectory: each goes on in the context that has its history, or in a fork.

What was sampled is never tokenised again: a request that repeats it goes on from the stored tokens (`History`). A
request that comes again gets the same step (`AskedSteps`), or one that begins again at the same place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from heddle_dask.chat.conversation import ChatMessage, with_tool_names
from heddle_dask.chat.history import History, HistoryPlace
from heddle_dask.core.errors import BadInput, HeddleError, text_of
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.environments.base import Context
from heddle_dask.gateway.asked_steps import AskedRequest, AskedStep, AskedSteps
from heddle_dask.gateway.orders import OnText, OrderRefused, StepAnswer, StepOrder
from heddle_dask.gateway.replies import choice_of, form_of

METADATA = "conversation"
"""The entry of a trajectory's metadata: turns that came back altered, and requests that needed a fork."""
GRACE_S = 10.0
"""Seconds that a step goes on whose clients have gone: those that retry come back in less."""


class GatewaySession:
    """Answers the orders of one trajectory; implements `heddle_dask.gateway.orders.Exchange`.

    Parameters
    ----------
    context
        Of the trajectory. The first conversation goes on in it, if nothing was appended to it before.
    grace_s
        How long a step goes on whose clients have all gone.
    """

    def __init__(self, context: Context, *, grace_s: float = GRACE_S) -> None:
        self._first = context
        self._variables = context.template_variables
        self._history = History()
        self._contexts: dict[int, Context] = {}  # by the number of their branch in the history
        self._steps = 0
        self._beginning = asyncio.Lock()
        self._asked = AskedSteps(grace_s)
        # Tools are long, and the same in all requests of an agent.
        self._roots: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}

    @property
    def altered_turns(self) -> int:
        """Sampled turns that came back with another meaning; their text was rendered, masked."""
        return self._history.altered

    async def answer(self, order: StepOrder, on_text: OnText | None = None) -> StepAnswer:
        """Run the order as a step, or wait for the one that it repeats; cancelled, the step is aborted after a while.

        Raises
        ------
        OrderRefused
            It cannot be run, or was not.
        """
        request = self._request(order)
        step = await self._step_for(request)
        try:
            await asyncio.wait([step.running])
        except asyncio.CancelledError:
            self._asked.leave(step)
            raise
        step.waiting -= 1
        return _answer_of(step.running)

    async def count_tokens(self, order: StepOrder) -> int:
        """Tokens of the prompt that the order would have.

        Raises
        ------
        OrderRefused
            The messages cannot be rendered.
        """
        request = self._request(order)
        place = self._history.place(request.path, order.messages)
        if place.rests and place.branch is not None:
            return self._contexts[place.branch].context_tokens
        return self._tokens(place, request)

    async def close(self) -> None:
        """Abort what runs."""
        await self._asked.close()

    async def _step_for(self, request: AskedRequest) -> AskedStep:
        """The step of a request, whose client waits for it: an equal one, or one that begins now."""
        async with self._beginning:
            step = await self._asked.repeated(request)
            if step is not None:
                return step
            step = self._begin(request)
            try:
                # Now it is begun: its context has made the forks for its choices; whatever begins later forks later.
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                self._asked.leave(step)
                raise
            return step

    # -- steps -------------------------------------------------------------------------------------

    def _begin(self, request: AskedRequest) -> AskedStep:
        """A new step for an order.

        Raises
        ------
        OrderRefused
            It cannot be run.
        """
        order = request.order
        form = form_of(order)
        place = self._history.place(request.path, order.messages)
        context = self._context(place, request)
        branch = self._history.begin(place)
        self._contexts[branch] = context
        self._note()
        step = AskedStep(self._steps, request, place, branch, _prompt_tokens(context, place, order.messages))
        self._steps += 1
        step.task = asyncio.ensure_future(self._run(step, form))
        self._asked.add(step)
        return step

    async def _run(self, step: AskedStep, form: StructuredOutput | None) -> StepAnswer:
        context, order = self._contexts[step.branch], step.request.order
        try:
            _check_budget(context, step.prompt_tokens)
            reply = await context.generate(
                max_tokens=order.max_tokens,
                temperature=order.temperature,
                top_p=order.top_p,
                top_k=order.top_k,
                min_p=order.min_p,
                stop=order.stop or None,
                structured=form,
                seed=order.seed,
                n=order.n,
            )
        except BaseException:
            self._history.given_up(step.place, step.branch)
            raise
        replies = [reply, *reply.alternatives]
        choices = [choice_of(each, order, f"{step.number}/{at}") for at, each in enumerate(replies)]
        cut = [each.finish_reason == "length" for each in replies]
        messages = [choice.message for choice in choices]
        branches = self._history.answered(step.place, step.branch, messages, reply.step_index, cut)
        self._contexts |= {branch: each.context for branch, each in zip(branches, replies, strict=True)}
        return StepAnswer(
            tuple(choices),
            step.prompt_tokens,
            sum(len(each.token_ids) for each in replies),
            reply.cached_tokens,
            reply.policy_version,
        )

    # -- contexts ----------------------------------------------------------------------------------

    def _request(self, order: StepOrder) -> AskedRequest:
        if not order.messages:
            raise OrderRefused("messages is empty: send at least one", "invalid_request")
        given = order.template, order.tools
        if given not in self._roots:
            self._roots[given] = self._root(*given)
        root, variables = self._roots[given]
        path = self._history.path(root, order.messages)
        options = (order.tool_choice, order.max_tokens, order.temperature, order.top_p, order.top_k, order.min_p)
        key = path[-1], (*options, order.stop, order.structured, order.seed, order.n)
        return AskedRequest(order, variables, path, key)

    def _root(self, template: str, tools: str) -> tuple[str, dict[str, Any]]:
        """What names the variables of the template, and the variables."""
        try:
            variables: dict[str, Any] = {**self._variables, **json.loads(template or "{}")}
            if shown := json.loads(tools or "[]"):
                variables["tools"] = shown
        except (TypeError, ValueError) as error:
            raise OrderRefused(f"template or tools is no JSON: {error}", "invalid_request") from None
        return json.dumps(variables, sort_keys=True), variables

    def _context(self, place: HistoryPlace, request: AskedRequest) -> Context:
        """The context of the branch of a place, or a new one.

        Raises
        ------
        OrderRefused
            The prompt cannot be rendered, or is too long: no context is made for it.
        """
        if place.branch is not None:
            return self._contexts[place.branch]
        tokens = self._tokens(place, request)
        if tokens >= self._first.max_context_tokens:
            raise _too_long(tokens, self._first.max_context_tokens)
        if place.turn is not None:
            return self._contexts[place.turn.branch].fork(after_step=place.turn.step_index)
        is_first = not self._contexts and not self._first.context_tokens
        context = self._first if is_first else self._first.fork(after_step=-1)
        if request.variables:
            context.set_template(**request.variables)
        return context

    def _tokens(self, place: HistoryPlace, request: AskedRequest) -> int:
        """Tokens of the prompt of a place, without a change of any context."""
        try:
            if place.turn is not None:
                at = self._contexts[place.turn.branch]
                messages = _rendered(place, request.order.messages)
                return at.prompt_tokens(messages, after_step=place.turn.step_index)
            return self._first.prompt_tokens(place.messages, after_step=-1, template=request.variables)
        except BadInput as error:
            raise OrderRefused(text_of(error), "invalid_request") from None

    def _note(self) -> None:
        """Keep the counts with the trajectory, whatever ends it."""
        history = self._history
        if history.altered or history.forked:
            self._first.metadata[METADATA] = {"altered_turns": history.altered, "forks": history.forked}


def _rendered(place: HistoryPlace, conversation: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """The messages of a place as they are rendered behind its turn: some templates show results by the tool's name."""
    return place.messages if place.turn is None else with_tool_names(place.messages, conversation)


def _prompt_tokens(context: Context, place: HistoryPlace, conversation: Sequence[ChatMessage]) -> int:
    """Append the messages of a place to its context; tokens of the prompt.

    Raises
    ------
    OrderRefused
        The template refuses them.
    """
    try:
        for message in () if place.rests else _rendered(place, conversation):
            context.append_message(message)
        return context.context_tokens
    except BadInput as error:
        raise OrderRefused(text_of(error), "invalid_request") from None


def _check_budget(context: Context, prompt_tokens: int) -> None:
    if prompt_tokens >= context.max_context_tokens:
        raise _too_long(prompt_tokens, context.max_context_tokens)
    if context.done:
        raise OrderRefused("the trajectory has used its steps", "budget")


def _too_long(tokens: int, most: int) -> OrderRefused:
    return OrderRefused(
        # The words of OpenAI's API: clients such as litellm know by them that it is of no use to ask again.
        f"This model's maximum context length is {most} tokens with the reply, and the prompt has {tokens}",
        "context_length",
    )


def _answer_of(task: asyncio.Task[StepAnswer]) -> StepAnswer:
    """The answer of a step that has ended.

    Raises
    ------
    OrderRefused
        It has none. What is no `HeddleError` is a fault of ours, and is raised as it is.
    """
    if task.cancelled():
        raise OrderRefused("the step was aborted: its trajectory has ended, or all its clients had gone", "failed")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, OrderRefused):
        raise OrderRefused(str(error), error.kind)
    if isinstance(error, BadInput):
        raise OrderRefused(text_of(error), "invalid_request")
    if isinstance(error, HeddleError):
        raise OrderRefused(f"{type(error).__name__}: {text_of(error)}", "failed")
    raise error
