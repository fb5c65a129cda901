"""The scheduler's part of the road of agents' requests, without a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.live.scheduler.gateway_relay import GatewayRelay
from heddle_dask.live.wire.gateway_messages import (
    AnswerBody,
    GatewayAnswer,
    GatewayCancelledNotice,
    GatewayOrder,
    GatewayPlace,
    GatewaySessionEnded,
    OpenGateway,
    body_from,
)


class Stream(list[dict[str, Any]]):
    """Takes what the scheduler sends."""

    send = list.append

    def closed(self) -> bool:
        return False


def test_without_a_tool_worker_there_is_no_gateway_unless_one_may_come() -> None:
    relay = GatewayRelay(lambda session: None, {}, lambda: False)
    with pytest.raises(BadInput, match="no tool worker, beside which a gateway runs"):
        asyncio.run(relay.open(OpenGateway("s")))
    relay = GatewayRelay(lambda session: None, {}, lambda: True)
    assert asyncio.run(relay.open(OpenGateway("s"))) == GatewayPlace()


def test_no_order_is_left_without_an_answer_by_a_session_or_a_worker_that_ends() -> None:
    worker, other, client = Stream(), Stream(), Stream()
    clients = {"s": "client"}
    relay = GatewayRelay(clients.get, {}, lambda: False)
    relay.scheduler = SimpleNamespace(  # type: ignore[assignment]
        stream_comms={"tcp://w": worker, "tcp://o": other}, client_comms={"client": client}
    )
    for address in ("tcp://w", "tcp://o"):
        relay.order(address, GatewayOrder("s", f"{address}/g1", 1, "hd-s-x", b"body"))
    assert [each["address"] for each in client] == ["tcp://w", "tcp://o"]
    assert (relay.orders, relay.open_orders) == (2, 2)
    relay.worker_left("tcp://w")
    assert relay.open_orders == 1
    assert client[2:] == [
        GatewayCancelledNotice("s", "tcp://w", "", (), "its tool worker was lost").to_wire(),
    ]
    relay.session_ended("s")
    assert relay.open_orders == 0
    assert worker == [] and [each["op"] for each in other] == [GatewaySessionEnded.op]
    # What comes later, or for a session that there never was, is refused at once.
    clients.clear()
    relay.order("tcp://o", GatewayOrder("s", "tcp://o/g1", 2, "hd-s-x", b"body"))
    answer = GatewayAnswer.from_wire(other[-1])
    assert answer.number == 2
    assert body_from(AnswerBody, answer.body).kind == "authentication"
