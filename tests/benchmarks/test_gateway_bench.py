"""``python -m benchmarks gateway``: its agents converse and read streams to their end, and say what they lack."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from worlds.scripted_exchange import ScriptedExchange, answered, said, served

from benchmarks.gateway import middle_rate
from benchmarks.gateway_clients import ClientFigures, ClientOrders, ask_all
from heddle_dask.gateway.orders import OrderRefused

KEYS = ["key-a", "key-b", "key-c"]
ORDERS = ClientOrders("", KEYS, max_tokens=7)


def asked(orders: ClientOrders, exchanges: dict[str, ScriptedExchange]) -> ClientFigures:
    async def body() -> ClientFigures:
        async with served(exchanges) as url:
            return await asyncio.wait_for(ask_all(replace(orders, url=url)), 60)

    return asyncio.run(body())


def test_agents_converse_each_by_its_key() -> None:
    exchanges = {key: ScriptedExchange([answered(said("hi"))]) for key in KEYS}
    figures = asked(replace(ORDERS, turns=3), exchanges)
    assert len(figures.durations_s) == len(figures.finished_s) == 9 and not figures.errors
    for exchange in exchanges.values():
        assert [len(order.messages) for order in exchange.orders] == [1, 3, 5]


def test_a_stream_is_whole_if_all_its_tokens_came() -> None:
    exchanges = {key: ScriptedExchange([answered(said("one two three"))]) for key in KEYS}
    figures = asked(replace(ORDERS, streams=True), exchanges)
    assert figures.whole_streams == 3 and not figures.errors
    assert asked(replace(ORDERS, streams=True, max_tokens=8), exchanges).whole_streams == 0


def test_what_is_refused_is_told() -> None:
    exchanges = {key: ScriptedExchange([OrderRefused("no more", "overloaded")]) for key in KEYS}
    figures = asked(replace(ORDERS, turns=3), exchanges)
    assert len(figures.errors) == 3 and "no more" in figures.errors[0]


def test_a_rate_is_that_of_the_middle() -> None:
    assert middle_rate([0.0, *(0.01 * each for each in range(1, 1000)), 10.0]) == 100.0
