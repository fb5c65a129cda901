"""The driver's end of the road of agents' requests: finds the trajectory of each key, and sends back what came of it.

Every order is answered, whatever happens to it: nothing that an agent has asked for waits for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from distributed import Client

from heddle_dask.gateway.orders import OrderRefused, StepAnswer, StepOrder
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.gateway_messages import (
    AnswerBody,
    GatewayAnswer,
    GatewayCancelledNotice,
    GatewayOrderNotice,
    GatewayPlace,
    OpenGateway,
    OrderBody,
    TextTarget,
    body_from,
    packed_body,
)
from heddle_dask.live.wire.known_orders import KnownOrders
from heddle_dask.live.wire.transport import ask_scheduler, send

ENDED = "the trajectory of this key has ended, or there never was one"
_ENDS = "the trajectory of this request has ended"
_LOG = logging.getLogger(__name__)

TEXT_TO: ContextVar[TextTarget | None] = ContextVar("heddle_text_to", default=None)
"""Where the text of a step goes that is run now; set around an order of a client that wants it as it comes."""


class OrderTaker(Protocol):
    """Answers the orders of one key."""

    async def answer(self, order: StepOrder) -> StepAnswer:
        """As `heddle_dask.gateway.orders.Exchange.answer`."""

    async def count_tokens(self, order: StepOrder) -> int:
        """As `heddle_dask.gateway.orders.Exchange.count_tokens`."""

    def lost(self, cause: str) -> None:
        """The gateway of an open order has gone: a line that says why."""


class GatewayOrders:
    """Orders of the gateways for one session; belongs to the client's event loop."""

    def __init__(self, client: Client, session: str) -> None:
        self._client = client
        self.session = session
        self._takers: dict[str, OrderTaker] = {}
        self._known: dict[str, dict[str, KnownOrders]] = {}  # by key and gateway
        self._tasks: dict[tuple[str, int], tuple[GatewayOrderNotice, asyncio.Task[None]]] = {}
        self._gone: set[tuple[str, int]] = set()  # orders whose client has gone
        self._place: asyncio.Task[GatewayPlace] | None = None
        _take_orders(client, self)

    async def place(self) -> GatewayPlace:
        """Where the gateway of a tool worker listens; asked for once, and again where there was none.

        Raises
        ------
        BadInput
            No tool worker is there, or will come; or its gateway does not start.
        """
        asked = self._place
        if asked is None or (asked.done() and (asked.cancelled() or asked.exception() or not asked.result().port)):
            asked = self._place = asyncio.ensure_future(ask_scheduler(self._client, OpenGateway(self.session)))
        return await asyncio.shield(asked)

    def admit(self, key: str, taker: OrderTaker) -> None:
        """Orders of this key go to `taker` until `dismiss`."""
        self._takers[key] = taker

    def dismiss(self, key: str) -> None:
        """The trajectory of a key has ended: open orders are refused, as later ones are."""
        self._takers.pop(key, None)
        self._known.pop(key, None)
        for notice, task in list(self._tasks.values()):
            if notice.key == key:
                task.cancel()

    async def close(self) -> None:
        """Refuse what is open, and take no order any more."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._place is not None:
            self._place.cancel()
        _leave_orders(self._client, self.session)

    def take(self, notice: GatewayOrderNotice) -> None:
        """Begin to answer an order."""
        at = notice.gateway, notice.number
        task = asyncio.ensure_future(self._answer(notice))
        self._tasks[at] = notice, task
        task.add_done_callback(lambda _: self._ended(at))

    def _ended(self, at: tuple[str, int]) -> None:
        self._tasks.pop(at, None)
        self._gone.discard(at)

    def cancelled(self, notice: GatewayCancelledNotice) -> None:
        """Clients have gone: their steps are aborted."""
        for at, (order, task) in list(self._tasks.items()):
            of_gateway = notice.gateway == order.gateway and order.number in notice.numbers
            if of_gateway or (not notice.gateway and notice.address == order.address):
                self._gone.add(at)
                if notice.cause and order.key in self._takers:
                    self._takers[order.key].lost(notice.cause)
                task.cancel()

    async def _answer(self, notice: GatewayOrderNotice) -> None:
        try:
            body = await self._outcome(notice)
        except asyncio.CancelledError:
            if (notice.gateway, notice.number) in self._gone:
                return
            body = AnswerBody.refusal(_ENDS, "failed")
        if self._client.status == "running":
            answer = GatewayAnswer(notice.session, notice.address, notice.gateway, notice.number, packed_body(body))
            send(self._client, answer)

    async def _outcome(self, notice: GatewayOrderNotice) -> AnswerBody:
        taker = self._takers.get(notice.key)
        if taker is None:
            return AnswerBody.refusal(ENDED, "authentication")
        try:
            sent = body_from(OrderBody, notice.body)
            known = self._known.setdefault(notice.key, {}).setdefault(notice.gateway, KnownOrders())
            order = known.whole(sent)
            if order is None:
                return AnswerBody(wants_all=True)
            known.add(notice.number, order)
            if sent.counts:
                return AnswerBody(tokens=await taker.count_tokens(order))
            if order.streams:
                TEXT_TO.set(TextTarget(notice.address, notice.gateway, notice.number))
            return AnswerBody(answer=await taker.answer(order))
        except OrderRefused as error:
            return AnswerBody.refusal(str(error), error.kind)
        except Exception as error:
            # A fault of ours: the trajectory has lost a step, and its agent has not failed.
            _LOG.exception("a request of an agent failed")
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            taker.lost(said)
            return AnswerBody.refusal(said, "failed")


# -- the client's stream ---------------------------------------------------------------------------

_sessions: WeakKeyDictionary[Client, dict[str, GatewayOrders]] = WeakKeyDictionary()
M = TypeVar("M", bound=Message)


def _take_orders(client: Client, orders: GatewayOrders) -> None:
    if client not in _sessions:
        sessions: dict[str, GatewayOrders] = {}
        _sessions[client] = sessions

        def add(kind: type[M], take: Callable[[GatewayOrders, M], None]) -> None:
            def arrived(**mapping: Any) -> None:
                found = sessions.get(mapping.get("session", ""))
                if found is not None:
                    take(found, kind.from_wire(mapping))

            dask.add_client_handler(client, kind.op, arrived)

        add(GatewayOrderNotice, GatewayOrders.take)
        add(GatewayCancelledNotice, GatewayOrders.cancelled)
    _sessions[client][orders.session] = orders


def _leave_orders(client: Client, session: str) -> None:
    _sessions[client].pop(session, None)
