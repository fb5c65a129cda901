"""The exchanges of a gateway process: orders go to its tool worker by their numbers, answers and text come back.

An order takes along only the messages that the driver does not have from an earlier order of the same key.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from heddle_dask.chat.reply_parts import OPEN
from heddle_dask.gateway.orders import OnText, OrderRefused, StepAnswer, StepOrder
from heddle_dask.live.wire.gateway_frames import (
    ANSWER,
    CANCEL,
    ORDER,
    SESSION_ENDED,
    TEXT,
    read_frame,
    write_frame,
)
from heddle_dask.live.wire.gateway_messages import AnswerBody, OrderBody, body_from, packed_body, session_of_key
from heddle_dask.live.wire.known_orders import KnownOrders

MOST_IN_FLIGHT = 64
"""Orders of one key at a time; an agent that sends more is told to wait (HTTP 429)."""
MOST_ORDER_BYTES = 16 << 20
"""Of what of an order the driver does not have yet: more text than the context of any model holds."""
# Keys whose latest orders are kept: of one that comes back after so many others, all messages are sent again.
_KEYS_KEPT = 256
_DIVERGED = "the engine of the reply was lost in the middle of it, and the reply began again with other words"


@dataclass(slots=True, eq=False)
class _OpenOrder:
    key: str
    answer: asyncio.Future[AnswerBody]
    on_text: OnText | None = None
    sent: dict[int, str] = field(default_factory=dict)  # text of each choice that the client has
    diverged: bool = False

    def take(self, choice: int, start: int, text: str) -> None:
        """Pass on what is new of a text. A reply that began again elsewhere comes a second time."""
        before = self.sent.get(choice, "")
        if self.on_text is None or self.diverged or start > len(before):
            return  # what is missing here comes with the answer
        known = before[start : start + len(text)]
        if not text.startswith(known):
            self.diverged = True
        elif len(text) > len(known):
            self.sent[choice] = before + text[len(known) :]
            self.on_text(choice, text[len(known) :])

    def check(self, answer: StepAnswer) -> None:
        """Refuse an answer of which something else was sent before."""
        for choice, text in self.sent.items():
            raw = answer.choices[choice].raw if choice < len(answer.choices) else ""
            if not (raw.startswith(text) or (OPEN + raw).startswith(text)):
                raise OrderRefused(_DIVERGED, "failed")


class GatewayLink:
    """The end of the road in the gateway process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = 0
        self._open: dict[int, _OpenOrder] = {}
        self._in_flight: dict[str, int] = {}
        self._known: OrderedDict[str, KnownOrders] = OrderedDict()

    def exchange(self, key: str) -> LinkedExchange | None:
        """Where the orders of a key are answered; None for what is no key. The driver refuses one that is unknown."""
        return LinkedExchange(self, key) if session_of_key(key) else None

    async def run(self) -> None:
        """Take what the tool worker says, until it has gone."""
        while (frame := await read_frame(self._reader)) is not None:
            kind, *values = frame
            if kind == TEXT:
                number, choice, start, text = values
                if number in self._open:
                    self._open[number].take(choice, start, text)
            elif kind == ANSWER:
                number, body = values
                self._settle(number, body_from(AnswerBody, body))
            elif kind == SESSION_ENDED:
                session, reason = values
                for number, order in list(self._open.items()):
                    if session_of_key(order.key) == session:
                        self._settle(number, AnswerBody.refusal(reason, "failed"))
        for number in list(self._open):
            self._settle(number, AnswerBody.refusal("the tool worker of this gateway has gone", "failed"))
        self._writer.close()

    def _settle(self, number: int, body: AnswerBody) -> None:
        order = self._open.get(number)
        if order is not None and not order.answer.done():
            order.answer.set_result(body)

    async def ask(self, key: str, order: StepOrder, on_text: OnText | None, *, counts: bool) -> AnswerBody:
        """Send an order, and wait for its answer; cancelled, the driver is told so."""
        with self._counted(key):
            known = self._known_of(key)
            body = await self._asked(key, known.shortened(order, counts=counts), order, on_text)
            if body.wants_all:
                self._known[key] = KnownOrders()
                body = await self._asked(key, OrderBody(order, counts=counts), order, on_text)
        body.check()
        return body

    async def _asked(self, key: str, sent: OrderBody, order: StepOrder, on_text: OnText | None) -> AnswerBody:
        packed = packed_body(sent)
        if len(packed) > MOST_ORDER_BYTES:
            raise OrderRefused(
                f"messages and tools have more than {MOST_ORDER_BYTES >> 20} MiB: send less", "too_large"
            )
        self._numbers += 1
        number = self._numbers
        opened = _OpenOrder(key, asyncio.get_running_loop().create_future(), on_text)
        self._open[number] = opened
        self._known_of(key).add(number, order)
        write_frame(self._writer, ORDER, number, session_of_key(key), key, packed)
        try:
            body = await opened.answer
        except asyncio.CancelledError:
            write_frame(self._writer, CANCEL, number, session_of_key(key))
            raise
        finally:
            del self._open[number]
        if body.answer is not None:
            opened.check(body.answer)
        return body

    @contextmanager
    def _counted(self, key: str) -> Iterator[None]:
        running = self._in_flight.get(key, 0)
        if running >= MOST_IN_FLIGHT:
            raise OrderRefused(f"{running} requests of this key are open: wait for their answers", "overloaded")
        self._in_flight[key] = running + 1
        try:
            yield
        finally:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]

    def _known_of(self, key: str) -> KnownOrders:
        known = self._known.setdefault(key, KnownOrders())
        self._known.move_to_end(key)
        while len(self._known) > _KEYS_KEPT:
            self._known.popitem(last=False)
        return known


@dataclass(frozen=True, slots=True)
class LinkedExchange:
    """The orders of one key; implements `heddle_dask.gateway.orders.Exchange`."""

    link: GatewayLink
    key: str

    async def answer(self, order: StepOrder, on_text: OnText | None = None) -> StepAnswer:
        body = await self.link.ask(self.key, order, on_text, counts=False)
        if body.answer is None:
            raise OrderRefused("the driver has sent no answer", "failed")
        return body.answer

    async def count_tokens(self, order: StepOrder) -> int:
        return (await self.link.ask(self.key, order, None, counts=True)).tokens
