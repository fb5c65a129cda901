"""Requests of agents as steps of one trajectory: continued, forked, asked again, refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from worlds.chat_formats import with_format
from worlds.sampling_plane import SamplingPlane
from worlds.scripted_plane import context_on

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.chat.tool_calls import format_call
from heddle_dask.core.errors import HeddleError
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.gateway.orders import OrderRefused, StepOrder
from heddle_dask.gateway.session import GatewaySession
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.programs.context import LiveContext

SYSTEM, HELLO = ChatMessage("system", "be brief"), ChatMessage("user", "hello")
TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "of a city",
                "parameters": {"type": "object", "properties": {"city": {"$ref": "#/$defs/c"}}, "$defs": {"c": {}}},
            },
        }
    ]
)


class Agent:
    """A session on an engine that samples the given texts, one by one."""

    def __init__(self, model_dir: str, *texts: str, holds: bool = False, **options: Any) -> None:
        self.template = with_format(model_dir)
        self.plane = SamplingPlane(self.template, lambda n: texts[n] if n < len(texts) else f"reply {n}", holds=holds)
        self.ctx: LiveContext = context_on(self.plane, model_dir, template=self.template, **options)
        self.session = GatewaySession(self.ctx, grace_s=0.0)

    async def ask(self, *messages: ChatMessage, **options: Any) -> ChatMessage:
        return (await self.session.answer(StepOrder(messages, **options))).choices[0].message

    def branches(self) -> list[int]:
        """Number of steps of each branch."""
        return [len(branch.steps) for branch in self.ctx.branches()]


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 30))


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def test_a_conversation_goes_on_from_the_sampled_tokens(model_dir: str) -> None:
    agent = Agent(model_dir, "<think>\nwell\n</think>\n\none", "two")

    async def body() -> None:
        first = await agent.session.answer(StepOrder((SYSTEM, HELLO)))
        assert first.choices[0].message == ChatMessage("assistant", "one", "well")
        assert (first.prompt_tokens, first.policy_version) == (len(agent.plane.seen[0]), 0)
        assert agent.plane.seen[0] == agent.template.render([m.for_template() for m in (SYSTEM, HELLO)])
        # The agent has left out the thinking, and sends spaces.
        await agent.ask(SYSTEM, HELLO, ChatMessage("assistant", " one "), user("and?"))
        one, two = agent.plane.steps
        bridge = agent.template.bridge([{"role": "user", "content": "and?"}], ended=True)
        assert two.context == [*one.context, *one.ids, *bridge]
        assert agent.branches() == [2]
        assert "conversation" not in agent.ctx.metadata

    run(body)


def test_a_history_that_was_edited_goes_on_from_the_turn_before(model_dir: str) -> None:
    agent = Agent(model_dir)

    async def body() -> None:
        one = await agent.ask(HELLO)
        two = await agent.ask(HELLO, one, user("a"))
        await agent.ask(HELLO, one, user("b"), two, user("c"))
        assert agent.branches() == [2, 1]
        first = agent.plane.steps[0]
        assert agent.plane.seen[2][: len(first.context) + len(first.ids)] == [*first.context, *first.ids]
        await agent.ask(user("summary"), user("go on"))
        assert agent.branches() == [2, 1, 1]
        assert agent.ctx.metadata["conversation"] == {"altered_turns": 0, "forks": 2}

    run(body)


def test_text_that_comes_back_altered_is_rendered_masked_and_counted_once(model_dir: str) -> None:
    agent = Agent(model_dir)

    async def body() -> None:
        await agent.ask(HELLO)
        altered = (HELLO, ChatMessage("assistant", "[shortened]"), user("a"))
        two = await agent.ask(*altered)
        await agent.ask(*altered, two, user("b"))
        assert agent.branches() == [1, 2]
        assert agent.session.altered_turns == 1
        (_, fork) = agent.ctx.branches()
        assert fork.record.loss_mask.sum() == sum(len(step.ids) for step in agent.plane.steps[1:])

    run(body)


def test_calls_of_tools_are_read_and_come_back_in_other_words(model_dir: str) -> None:
    call = format_call("weather", {"city": "Bern", "days": 2})
    agent = Agent(model_dir, f"let me see\n{call}")

    async def body() -> None:
        answer = await agent.session.answer(StepOrder((HELLO,), tools=TOOLS))
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content, choice.calls[0].name) == ("let me see", "weather")
        assert json.loads(choice.calls[0].arguments) == {"city": "Bern", "days": 2}
        back = ChatMessage(
            "assistant", "let me see", calls=(CalledTool("weather", '{"days":2,"city":"\\u0042ern"}', "x"),)
        )
        await agent.ask(HELLO, back, ChatMessage("tool", "sunny", call_id="x"), tools=TOOLS)
        assert agent.branches() == [2]
        assert agent.session.altered_turns == 0

    run(body)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (format_call("weather", {}), {}),
        (format_call("weather", {}), {"tools": TOOLS, "tool_choice": "none"}),
        ("<tool_call>\n{'city'}\n</tool_call>", {"tools": TOOLS}),
        ("…" + format_call("weather", {}), {"tools": TOOLS}),
    ],
)
def test_what_is_no_call_is_text(text: str, options: dict[str, Any], model_dir: str) -> None:
    agent = Agent(model_dir, text)

    async def body() -> None:
        (choice,) = (await agent.session.answer(StepOrder((HELLO,), **options))).choices
        assert choice.message == ChatMessage("assistant", text)
        assert choice.finish_reason == ("length" if text.startswith("…") else "stop")

    run(body)


@pytest.mark.parametrize(
    ("choice", "text"),
    [("required", '[{"name": "weather", "parameters": {"city": "Bern"}}]'), ("tool:weather", '{"city": "Bern"}')],
)
def test_a_call_is_forced_by_a_schema(choice: str, text: str, model_dir: str) -> None:
    agent = Agent(model_dir, text)

    async def body() -> None:
        message = await agent.ask(HELLO, tools=TOOLS, tool_choice=choice)
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [("weather", {"city": "Bern"})]
        structured = agent.plane.calls[0].sampling.structured
        assert structured is not None and "weather" in f"{structured.json_schema} {choice}"
        assert "$defs" in json.loads(str(structured.json_schema))
        # An engine that ignores the form: what it says is text.
        assert (await agent.ask(HELLO, tools=TOOLS, tool_choice=choice)).calls == ()

    run(body)


def test_other_tools_are_another_opening(model_dir: str) -> None:
    agent = Agent(model_dir)

    async def body() -> None:
        one = await agent.ask(HELLO, tools=TOOLS)
        await agent.ask(HELLO, one, user("a"))
        await agent.ask(HELLO, template='{"enable_thinking": false}')
        assert agent.branches() == [1, 1, 1]
        assert agent.plane.seen[1] == agent.template.render([m.for_template() for m in (HELLO, one, user("a"))])

    run(body)


def test_several_choices_are_branches_that_each_can_go_on(model_dir: str) -> None:
    agent = Agent(model_dir)

    async def body() -> None:
        answer = await agent.session.answer(StepOrder((HELLO,), n=3))
        messages = [choice.message for choice in answer.choices]
        assert answer.generated_tokens == sum(len(step.ids) for step in agent.plane.steps)
        for message in messages:
            await agent.ask(HELLO, message, user("a"))
        assert agent.branches() == [2, 2, 2]
        assert agent.ctx.metadata == {}

    run(body)


def test_all_options_reach_the_engine(model_dir: str) -> None:
    agent = Agent(model_dir)
    form = StructuredOutput(regex="a+")

    async def body() -> None:
        sampling = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 4}
        await agent.ask(HELLO, stop=("x", "y"), structured=form, **sampling)
        asked = agent.plane.calls[0].sampling
        assert {name: getattr(asked, name) for name in sampling} == sampling
        assert (asked.stop, asked.structured) == (("x", "y"), form)

    run(body)


def test_a_stop_text_is_not_in_the_message_and_what_was_sampled_stays(model_dir: str) -> None:
    agent = Agent(model_dir, "one STOP two")

    async def body() -> None:
        (choice,) = (await agent.session.answer(StepOrder((HELLO,), stop=("STOP",)))).choices
        assert (choice.message.content, choice.stopped_by, choice.finish_reason) == ("one ", "STOP", "stop")
        await agent.ask(HELLO, ChatMessage("assistant", "one"), user("a"))
        assert agent.branches() == [2]

    run(body)


def test_a_reply_that_was_cut_goes_on_where_it_ended(model_dir: str) -> None:
    agent = Agent(model_dir, "…once upon")

    async def body() -> None:
        cut = await agent.ask(HELLO)
        rest = await agent.ask(HELLO, cut)
        first, second = agent.plane.steps
        assert second.context == [*first.context, *first.ids]
        await agent.ask(HELLO, ChatMessage("assistant", cut.content + rest.content), user("a"))
        assert agent.branches() == [3]
        # The beginning of a reply that the agent has made up is rendered, and no altered turn.
        begun = ChatMessage("assistant", "Sure, ")
        more = await agent.ask(HELLO, begun)
        await agent.ask(HELLO, ChatMessage("assistant", "Sure, " + more.content), user("b"))
        assert agent.branches() == [3, 2]
        assert agent.session.altered_turns == 0

    run(body)


# -- requests that come again --------------------------------------------------------------------------


async def began(agent: Agent, count: int) -> None:
    while len(agent.plane.steps) < count:
        await asyncio.sleep(0)


def test_a_client_that_comes_again_gets_the_same_step_once(model_dir: str) -> None:
    agent = Agent(model_dir, holds=True)
    agent.session._asked._grace_s = 60.0

    async def body() -> None:
        first = asyncio.ensure_future(agent.ask(HELLO))
        await began(agent, 1)
        first.cancel()
        await asyncio.wait([first])
        again = asyncio.ensure_future(agent.ask(HELLO))
        await asyncio.sleep(0)
        agent.plane.steps[0].released.set()
        assert (await again).content == "reply 0"
        # Now it was delivered: whoever asks again wants another sample.
        later = asyncio.ensure_future(agent.ask(HELLO))
        await began(agent, 2)
        agent.plane.steps[1].released.set()
        assert (await later).content == "reply 1"
        assert agent.branches() == [1, 1]

    run(body)


def test_an_answer_that_nobody_has_got_is_kept_for_the_next_equal_request(model_dir: str) -> None:
    agent = Agent(model_dir, holds=True)
    agent.session._asked._grace_s = 60.0

    async def body() -> None:
        first = asyncio.ensure_future(agent.ask(HELLO))
        await began(agent, 1)
        first.cancel()
        await asyncio.wait([first])
        agent.plane.steps[0].released.set()
        while not agent.branches()[0]:
            await asyncio.sleep(0)
        other = asyncio.ensure_future(agent.ask(HELLO, max_tokens=5))
        await began(agent, 2)
        assert (await agent.ask(HELLO)).content == "reply 0"
        agent.plane.steps[1].released.set()
        await other

    run(body)


def test_a_step_whose_clients_have_gone_is_aborted_and_begins_again_in_its_place(model_dir: str) -> None:
    agent = Agent(model_dir, holds=True)

    async def body() -> None:
        first = asyncio.ensure_future(agent.ask(HELLO))
        await began(agent, 1)
        first.cancel()
        await asyncio.wait([first])
        again = asyncio.ensure_future(agent.ask(HELLO))
        await began(agent, 2)
        agent.plane.steps[1].released.set()
        assert (await again).content == "reply 1"
        assert agent.branches() == [1]
        assert [call.step_id for call in agent.plane.calls] == [("t", 0, 0), ("t", 0, 1)]

    run(body)


def test_an_idempotency_key_is_the_same_step_for_ever(model_dir: str) -> None:
    agent = Agent(model_dir)

    async def body() -> None:
        both = await asyncio.gather(*(agent.ask(HELLO, idempotency_key="k") for _ in range(2)))
        assert [*both, await agent.ask(HELLO, idempotency_key="k")] == [both[0]] * 3
        assert agent.branches() == [1]
        with pytest.raises(OrderRefused, match="the idempotency key was used with another request"):
            await agent.ask(user("other"), idempotency_key="k")
        assert (await agent.ask(HELLO, idempotency_key="l")).content == "reply 1"

    run(body)


def test_equal_requests_side_by_side_are_samples_of_their_own_unless_one_is_a_retry(model_dir: str) -> None:
    agent = Agent(model_dir, holds=True)

    async def body() -> None:
        asked = [asyncio.ensure_future(agent.ask(HELLO, is_retry=retry)) for retry in (False, False, True)]
        await began(agent, 2)
        await asyncio.sleep(0)
        for step in agent.plane.steps:
            step.released.set()
        texts = [(await each).content for each in asked]
        assert texts == ["reply 0", "reply 1", "reply 0"]
        assert agent.branches() == [1, 1]

    run(body)


def test_what_goes_on_elsewhere_while_a_step_runs_is_a_fork(model_dir: str) -> None:
    agent = Agent(model_dir, holds=True)

    async def body() -> None:
        first = asyncio.ensure_future(agent.ask(HELLO))
        await began(agent, 1)
        agent.plane.steps[0].released.set()
        one = await first
        sides = [asyncio.ensure_future(agent.ask(HELLO, one, user(text))) for text in "abc"]
        await began(agent, 4)
        for step in reversed(agent.plane.steps):
            step.released.set()
        await asyncio.gather(*sides)
        assert agent.branches() == [2, 1, 1]
        await agent.session.close()

    run(body)


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"messages": ()}, "invalid_request", "messages is empty"),
        ({"top_p": 2.0}, "invalid_request", "top_p is 2.0"),
        ({"template": '{"messages": 1}'}, "invalid_request", "'messages' is no variable"),
        ({"tools": "{"}, "invalid_request", "no JSON"),
        ({"tool_choice": "required"}, "invalid_request", "there are no tools"),
        ({"tool_choice": "tool:fly", "tools": TOOLS}, "invalid_request", "'fly', which is none"),
        ({"messages": (user("long " * 9000),)}, "context_length", "This model's maximum context length is 4096 tokens"),
        (
            {"messages": (HELLO, ChatMessage("assistant", "", calls=(CalledTool("f", "{}"),)))},
            "invalid_request",
            "append the results",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_kind(
    options: dict[str, Any], kind: str, message: str, model_dir: str
) -> None:
    agent = Agent(model_dir)

    async def body() -> None:
        for _ in range(2):
            with pytest.raises(OrderRefused, match=message) as refused:
                await agent.session.answer(replace(StepOrder((HELLO,)), **options))
            assert refused.value.kind == kind
        assert (await agent.ask(HELLO)).content == "reply 0"
        assert agent.branches() == [1]

    run(body)


def test_steps_beyond_the_budget_are_refused(model_dir: str) -> None:
    agent = Agent(model_dir, budget=Budget(max_steps=1))

    async def body() -> None:
        one = await agent.ask(HELLO)
        with pytest.raises(OrderRefused, match="used its steps") as refused:
            await agent.ask(HELLO, one, user("a"))
        assert refused.value.kind == "budget"
        assert agent.ctx.was_stopped

    run(body)


def test_a_failure_of_the_step_is_the_clients_and_the_request_may_come_again(model_dir: str) -> None:
    agent = Agent(model_dir)

    def failing(number: int) -> str:
        if number == 0:
            agent.plane.steps.append(None)
            raise HeddleError("the plane is gone")
        if number == 2:
            raise RuntimeError("a fault")
        return "fine"

    agent.plane.texts = failing

    async def body() -> None:
        with pytest.raises(OrderRefused, match="HeddleError: the plane is gone") as refused:
            await agent.ask(HELLO, idempotency_key="k")
        assert refused.value.kind == "failed"
        assert (await agent.ask(HELLO, idempotency_key="k")).content == "fine"
        assert agent.branches() == [1]
        with pytest.raises(RuntimeError, match="a fault"):
            await agent.ask(HELLO)

    run(body)


def test_the_end_of_the_trajectory_is_the_end_of_its_requests(model_dir: str) -> None:
    agent = Agent(model_dir, holds=True)

    async def body() -> None:
        asked = asyncio.ensure_future(agent.ask(HELLO))
        await began(agent, 1)
        agent.ctx.end()
        with pytest.raises(OrderRefused, match="its trajectory has ended"):
            await asked

    run(body)


def test_tokens_are_counted_as_the_prompt_would_have_them(model_dir: str) -> None:
    agent = Agent(model_dir)

    async def body() -> None:
        for order in (StepOrder((HELLO,), tools=TOOLS), StepOrder((SYSTEM, HELLO))):
            count = await agent.session.count_tokens(order)
            answer = await agent.session.answer(order)
            assert count == answer.prompt_tokens
            more = replace(order, messages=(*order.messages, answer.choices[0].message, user("a")))
            assert await agent.session.count_tokens(more) == (await agent.session.answer(more)).prompt_tokens
        assert agent.branches() == [2, 2]

    run(body)
