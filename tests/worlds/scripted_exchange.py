"""An exchange that answers by a script, and a gateway's server over some of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import ClientSession, web

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.gateway.orders import Choice, ChoiceEnd, OnText, OrderRefused, StepAnswer, StepOrder
from heddle_dask.gateway.server import gateway_application, gateway_runner

KEY = "key-of-the-trajectory"


def said(
    content: str = "",
    thinking: str = "",
    calls: Sequence[CalledTool] = (),
    finish: ChoiceEnd = "stop",
    raw: str = "",
    stopped_by: str = "",
) -> Choice:
    """A choice as an engine's parsers would have read it."""
    finish = "tool_calls" if calls else finish
    text = raw or (f"<think>\n{thinking}\n</think>\n\n" if thinking else "") + content
    ids = tuple(range(len(text)))
    return Choice(
        ChatMessage("assistant", content, thinking, tuple(calls)), finish, text, ids, (-0.5,) * len(text), stopped_by
    )


def answered(*choices: Choice) -> StepAnswer:
    return StepAnswer(choices, prompt_tokens=20, generated_tokens=7, cached_tokens=5, policy_version=1)


@dataclass
class ScriptedExchange:
    """Answers with the outcomes in order, the last for ever; text comes in pieces of `piece` characters.

    Attributes
    ----------
    holds
        Where set, an answer does not end.
    """

    outcomes: Sequence[StepAnswer | OrderRefused | Exception]
    piece: int = 5
    holds: bool = False
    orders: list[StepOrder] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, order: StepOrder, on_text: OnText | None = None) -> StepAnswer:
        outcome = self.outcomes[min(len(self.orders), len(self.outcomes) - 1)]
        self.orders.append(order)
        if isinstance(outcome, Exception):
            raise outcome
        try:
            if on_text is not None:
                for number, choice in enumerate(outcome.choices):
                    for at in range(0, len(choice.raw), self.piece):
                        on_text(number, choice.raw[at : at + self.piece])
                        await asyncio.sleep(0)
            if self.holds:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return outcome

    async def count_tokens(self, order: StepOrder) -> int:
        self.orders.append(order)
        return 10 * len(order.messages)


@asynccontextmanager
async def served(exchanges: Mapping[str, ScriptedExchange], patience_s: float = 10.0) -> AsyncIterator[str]:
    """The base address of a gateway over the exchanges of these keys."""
    runner = gateway_runner(gateway_application(exchanges.get, patience_s=patience_s))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def caller(url: str, key: str = KEY) -> AsyncIterator[ClientSession]:
    async with ClientSession(url, headers={"Authorization": f"Bearer {key}"}) as session:
        yield session
