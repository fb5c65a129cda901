"""Whatever agents do with their histories: branches are what engines saw and sampled, nothing is tokenised again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds.chat_formats import with_format
from worlds.sampling_plane import Sampled, SamplingPlane
from worlds.scripted_plane import context_on

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.chat.template import ChatTemplate
from heddle_dask.chat.tool_calls import format_call
from heddle_dask.gateway.orders import Choice, StepAnswer, StepOrder
from heddle_dask.gateway.session import GatewaySession
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.records.token_record import Attribution

TOOLS = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
# Several replies mean the same; some think, call tools, or are cut.
REPLIES = [
    "yes",
    "yes ",
    "no",
    "<think>\nhm\n</think>\n\nyes",
    format_call("f", {"b": [1, 2], "a": "ä\n"}),
    "look: " + format_call("f", {"a": 1}) + "\n" + format_call("f", {}),
    "<tool_call>\n{broken\n</tool_call>",
    "…yes",
]
TEXTS = ["go", "why?", " go ", "<|im_end|>", "é\n\U0001f600"]


@dataclass
class Asked:
    """One request that a client has made, and what it saw when it began."""

    order: StepOrder
    known: list[tuple[tuple[Any, ...], list[int], bool]]  # histories by meaning with their tokens; whether it was cut
    task: asyncio.Task[StepAnswer]


@dataclass
class Agent:
    """Conversations that go on side by side, as a drawn list of deeds has it."""

    template: ChatTemplate
    replies: Sequence[int]
    talks: list[list[ChatMessage]] = field(default_factory=lambda: [[ChatMessage("user", "go")] for _ in range(2)])
    tools: list[str] = field(default_factory=lambda: ["", TOOLS])
    open: dict[int, Asked] = field(default_factory=dict)
    # What was sampled: conversations by meaning, with all of their tokens.
    known: list[tuple[str, tuple[Any, ...], list[int], bool]] = field(default_factory=list)
    answered: int = 0

    def start(self) -> None:
        self.plane = SamplingPlane(
            self.template, lambda number: REPLIES[self.replies[number % len(self.replies)]], holds=True
        )
        self.ctx: LiveContext = context_on(self.plane, "", template=self.template)
        self.session = GatewaySession(self.ctx, grace_s=0.0)

    def order(self, talk: int, n: int = 1) -> StepOrder:
        return StepOrder(tuple(self.talks[talk]), tools=self.tools[talk], n=n)

    async def ask(self, talk: int, n: int) -> None:
        """Send the conversation, unless its request is open, or it cannot be sent."""
        last = self.talks[talk][-1]
        if talk in self.open or last.calls or (last.role == "assistant" and len(self.talks[talk]) == 1):
            return
        before = len(self.plane.steps)
        task = asyncio.ensure_future(self.session.answer(self.order(talk, n)))
        await settled(task, self.plane, before + n)
        self.open[talk] = Asked(self.order(talk, n), [], task)
        for step in self.plane.steps[before:]:
            assert step.context in self.expected(self.open[talk].order), "the engine saw what it should"

    def expected(self, order: StepOrder) -> list[list[int]]:
        """The contexts that the order may have, found without the matcher."""
        meanings = tuple(message.meaning for message in order.messages)
        for count in range(len(meanings), 0, -1):
            rest = [message.for_template() for message in order.messages[count:]]
            found = [
                ids + (self.template.bridge(rest, ended=not cut) if rest else [])
                for tools, known, ids, cut in self.known
                if (tools, known) == (order.tools, meanings[:count]) and (rest or cut)
            ]
            if found:
                return found
        template = self.template.with_variables({"tools": json.loads(TOOLS)}) if order.tools else self.template
        return [template.render([message.for_template() for message in order.messages])]

    async def release(self, number: int, *, restates: int, takes: int) -> None:
        """Let one engine step go on; if it ends a request, the conversation goes on with what was sampled."""
        waiting = self.plane.waiting
        if waiting:
            waiting[number % len(waiting)].released.set()
        await asyncio.sleep(0)
        for talk, asked in list(self.open.items()):
            steps = [step for step in self.plane.steps if step.context in self.expected(asked.order)]
            if all(step.released.is_set() for step in steps):
                for _ in range(6):
                    await asyncio.sleep(0)
            if asked.task.done():
                del self.open[talk]
                self.hear(talk, asked, asked.task.result(), restates, takes)

    def hear(self, talk: int, asked: Asked, answer: StepAnswer, restates: int, takes: int) -> None:
        self.answered += 1
        for choice in answer.choices:
            (step,) = [each for each in self.plane.steps if each.ids == choice.token_ids and self.made(each, asked)][:1]
            meanings = (*(message.meaning for message in asked.order.messages), choice.message.meaning)
            tokens = [*step.context, *step.ids]
            self.known.append((asked.order.tools, meanings, tokens, step.cut))
            last = asked.order.messages[-1]
            if last.role == "assistant":
                merged = replace(choice.message, content=last.content + choice.message.content).meaning
                self.known.append((asked.order.tools, (*meanings[:-2], merged), tokens, step.cut))
        chosen = answer.choices[takes % len(answer.choices)]
        self.talks[talk] = [*asked.order.messages, restated(chosen, restates)]

    def made(self, step: Sampled, asked: Asked) -> bool:
        return step.released.is_set() and step.context in self.expected(asked.order)

    async def give_up(self, talk: int) -> None:
        """The client of the request goes away; the next one for the same gets the step at the same place."""
        asked = self.open.pop(talk, None)
        if asked is not None:
            asked.task.cancel()
            await asyncio.wait([asked.task])
            for _ in range(6):
                await asyncio.sleep(0)


def restated(choice: Choice, how: int) -> ChatMessage:
    """The message as an agent may send it back: with the same meaning, or with another (`how` is 4 or more)."""
    message = choice.message
    if how == 4:
        return replace(message, content=message.content[:2] + "[shortened]", calls=message.calls[:1])
    if how == 0:
        return message
    calls = tuple(
        replace(call, arguments=json.dumps(json.loads(call.arguments), indent=how, sort_keys=True), call_id=f"x{how}")
        for call in message.calls
    )
    return replace(message, content=f"\n{message.content} ", thinking="" if how == 1 else message.thinking, calls=calls)


async def settled(task: asyncio.Task[Any], plane: SamplingPlane, steps: int) -> None:
    """The request has reached the engine, or has ended."""
    for _ in range(50):
        if task.done() or (len(plane.steps) >= steps and all(step.context for step in plane.steps)):
            break
        await asyncio.sleep(0)


TALK = st.integers(0, 3)
TEXT = st.integers(0, len(TEXTS) - 1)
HOW_BACK = st.sampled_from([0, 0, 1, 2, 3, 4])
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), TALK, TEXT, st.sampled_from(["user", "tool", "assistant"])),
        st.tuples(st.just("turn"), TALK, TEXT, st.sampled_from([1, 1, 2]), HOW_BACK, st.integers(0, 1)),
        st.tuples(st.just("turn"), TALK, TEXT, st.just(1), HOW_BACK, st.just(0)),
        st.tuples(st.just("turn"), TALK, TEXT, st.just(1), HOW_BACK, st.just(0)),
        st.tuples(st.just("ask"), TALK, st.sampled_from([1, 1, 1, 2])),
        st.tuples(st.just("release"), st.integers(0, 3), HOW_BACK, st.integers(0, 1)),
        st.tuples(st.just("branch"), TALK, st.integers(0, 8)),
        st.tuples(st.just("drop"), TALK, st.integers(0, 8)),
        st.tuples(st.just("edit"), TALK, st.integers(0, 8), TEXT),
        st.tuples(st.just("give_up"), TALK),
        st.tuples(st.just("tools"), TALK),
    ),
    min_size=10,
    max_size=40,
)


async def do(agent: Agent, deed: Sequence[Any]) -> None:
    kind, which, *rest = deed
    if kind == "release":
        await agent.release(which, restates=rest[0], takes=rest[1])
        return
    talk = which % len(agent.talks)
    said = agent.talks[talk]
    if kind == "say":
        said.append(ChatMessage(rest[1], TEXTS[rest[0]]))
    elif kind == "turn" and talk not in agent.open:
        text, n, restates, takes = rest
        if said[-1].role == "assistant":
            said.append(ChatMessage("user", TEXTS[text]))
        await agent.ask(talk, n)
        for _ in range(n):
            await agent.release(len(agent.plane.waiting) - 1, restates=restates, takes=takes)
    elif kind == "ask":
        await agent.ask(talk, rest[0])
    elif kind == "branch" and len(agent.talks) < 4:
        agent.talks.append(said[: rest[0] + 1])
        agent.tools.append(agent.tools[talk])
    elif kind == "drop" and len(said) > 1:
        del said[max(1, rest[0] % len(said))]
    elif kind == "edit":
        at = rest[0] % len(said)
        said[at] = ChatMessage(said[at].role, TEXTS[rest[1]] + " (edited)")
    elif kind == "give_up":
        await agent.give_up(talk)
    elif kind == "tools" and talk not in agent.open:
        agent.tools[talk] = "" if agent.tools[talk] else TOOLS


def check_branches(ctx: LiveContext, plane: SamplingPlane, ended: list[Sampled]) -> None:
    """Each branch is what an engine saw, and what it sampled; each sampled token is in the loss once."""
    kept = []
    for branch in ctx.branches():
        record = branch.finished_record
        mask = record.loss_mask.copy()
        for step in branch.steps:
            seen, ids = (
                record.token_ids[: step.token_start].tolist(),
                record.token_ids[step.token_start : step.token_stop],
            )
            (made,) = [
                each
                for each in ended
                if each.context == seen
                and list(each.ids) == ids.tolist()
                and each.call.step_id.trajectory_id == branch._spec.trajectory_id
            ]
            kept.append(made)
            assert mask[step.token_start : step.token_stop].all()
            mask[step.token_start : step.token_stop] = False
        assert not mask.any(), "only what was sampled in the branch is in its loss"
        first = next(record.segments(), None)
        if first is not None and branch is not ctx and first.attribution is Attribution.SHARED:
            assert any(first.token_ids.tolist() == [*e.context, *e.ids][: first.stop] for e in plane.steps)
    assert len(kept) == len(ended)
    assert {id(each) for each in kept} == {id(each) for each in ended}


async def play(agent: Agent, deeds: Sequence[Sequence[Any]]) -> None:
    agent.start()
    for deed in deeds:
        await do(agent, deed)
    for talk in list(agent.open):
        await agent.give_up(talk)


@pytest.fixture(scope="module")
def template(model_dir: str) -> ChatTemplate:
    return with_format(model_dir)


HOW = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@HOW
@given(deeds=DEEDS, replies=st.lists(st.integers(0, len(REPLIES) - 1), min_size=1, max_size=6))
def test_branches_are_what_engines_saw_and_sampled(
    template: ChatTemplate, deeds: list[Any], replies: list[int]
) -> None:
    agent = Agent(template, replies)
    asyncio.run(play(agent, deeds))
    ended = [step for step in agent.plane.steps if step.ended and in_some_branch(agent, step)]
    assert agent.answered <= len(ended)
    check_branches(agent.ctx, agent.plane, ended)


def in_some_branch(agent: Agent, step: Sampled) -> bool:
    """Whether its request was not given up: with `n`, one may have ended while another was cancelled."""
    return any(
        branch._spec.trajectory_id == step.call.step_id.trajectory_id
        and any(each.token_start == len(step.context) for each in branch.steps)
        for branch in agent.ctx.branches()
    )
