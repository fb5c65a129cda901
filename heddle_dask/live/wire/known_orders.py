"""The orders of one key that both ends of the road know, so that a conversation is not sent again and again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

from heddle_dask.gateway.orders import StepOrder
from heddle_dask.live.wire.gateway_messages import OrderBody

ORDERS_KEPT = 32
"""Latest orders of each key whose messages both ends keep."""


class KnownOrders:
    """The latest orders of one key, as both ends of the road know them."""

    def __init__(self) -> None:
        self._orders: OrderedDict[int, StepOrder] = OrderedDict()

    def add(self, number: int, order: StepOrder) -> None:
        """Keep an order; what it has in common with an earlier one is there once."""
        best, most = self._nearest(order)
        if best:
            known = self._orders[best]
            tools = known.tools if known.tools == order.tools else order.tools
            order = replace(order, messages=(*known.messages[:most], *order.messages[most:]), tools=tools)
        self._orders[number] = order
        while len(self._orders) > ORDERS_KEPT:
            self._orders.popitem(last=False)

    def shortened(self, order: StepOrder, *, counts: bool) -> OrderBody:
        """What is to be sent of an order."""
        best, most = self._nearest(order)
        if not best:
            return OrderBody(order, counts=counts)
        tools = self._orders[best].tools == order.tools
        rest = replace(order, messages=order.messages[most:], tools="" if tools else order.tools)
        return OrderBody(rest, best, most, tools, counts)

    def _nearest(self, order: StepOrder) -> tuple[int, int]:
        """The known order with most of the same messages at its beginning, and their number; 0 and 0: there is none."""
        best, most = 0, 0
        for number, known in reversed(self._orders.items()):
            common = _common(known.messages, order.messages)
            if common > most:
                best, most = number, common
            if most == len(order.messages):
                break
        return best, most

    def whole(self, body: OrderBody) -> StepOrder | None:
        """The order of which this was sent; None where the earlier one is not known."""
        if not body.known_number:
            return body.order
        known = self._orders.get(body.known_number)
        if known is None or len(known.messages) < body.known_messages:
            return None
        messages = (*known.messages[: body.known_messages], *body.order.messages)
        return replace(body.order, messages=messages, tools=known.tools if body.known_tools else body.order.tools)


def _common(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a is not b and a != b:
            break
        count += 1
    return count
