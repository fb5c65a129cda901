"""Agents for `benchmarks.gateway`, in a process of their own: ``python -m benchmarks.gateway_clients``.

Reads one JSON object on stdin (`ClientOrders`), and writes one on stdout (`ClientFigures`).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import uvloop

_PATH = "/v1/chat/completions"
_TURNS_OF_A_CONVERSATION = 16
_LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class ClientOrders:
    """What the agents do, one for each key.

    Attributes
    ----------
    turns, seconds
        Each agent takes so many turns, or as many as it can in so many seconds.
    streams
        Each agent opens one stream and reads it to its end.
    spread_s
        Agents start spread over so many seconds.
    """

    url: str
    keys: list[str]
    max_tokens: int
    turns: int = 0
    seconds: float = 0.0
    streams: bool = False
    spread_s: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class ClientFigures:
    """What the agents saw.

    Attributes
    ----------
    durations_s, finished_s
        Of each request, in order of its end.
    whole_streams
        Streams that ended, with all their tokens.
    most_open
        Streams that were open at the same time, each with text.
    errors
        The first lines of answers that were none.
    """

    durations_s: list[float] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    whole_streams: int = 0
    most_open: int = 0
    errors: list[str] = field(default_factory=list)


class _Agents:
    def __init__(self, orders: ClientOrders, session: aiohttp.ClientSession) -> None:
        self._orders = orders
        self._session = session
        self._rng = random.Random(orders.seed)
        self._open = 0
        self.figures = ClientFigures()

    async def run(self) -> None:
        one = self._stream if self._orders.streams else self._converse
        results = await asyncio.gather(*map(one, self._orders.keys), return_exceptions=True)
        self.figures.errors += [f"{type(each).__name__}: {each}" for each in results if isinstance(each, Exception)]

    async def _converse(self, key: str) -> None:
        orders = self._orders
        await asyncio.sleep(self._rng.uniform(0, orders.spread_s))
        until_s = time.perf_counter() + orders.seconds
        messages: list[dict[str, str]] = []
        turn = 0
        while turn < orders.turns or time.perf_counter() < until_s:
            if turn % _TURNS_OF_A_CONVERSATION == 0:
                messages = []
            messages.append({"role": "user", "content": f"turn {turn}"})
            began_s = time.perf_counter()
            async with self._session.post(_PATH, json=self._body(messages), headers=_head(key)) as answer:
                body = await answer.json()
            if answer.status != 200:
                self.figures.errors.append(str(body)[:200])
                return
            ended_s = time.perf_counter()
            self.figures.durations_s.append(ended_s - began_s)
            self.figures.finished_s.append(ended_s)
            messages.append({"role": "assistant", "content": body["choices"][0]["message"]["content"]})
            turn += 1

    async def _stream(self, key: str) -> None:
        await asyncio.sleep(self._rng.uniform(0, self._orders.spread_s))
        body = self._body([{"role": "user", "content": "count"}])
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        began_s = time.perf_counter()
        tokens, ended, text = 0, False, ""
        async with self._session.post(_PATH, json=body, headers=_head(key)) as answer:
            if answer.status != 200:
                self.figures.errors.append((await answer.text())[:200])
                return
            async for chunk in _chunks(answer):
                for choice in chunk["choices"]:
                    if not text and choice["delta"].get("content"):
                        self._open += 1
                        self.figures.most_open = max(self.figures.most_open, self._open)
                    text += choice["delta"].get("content") or ""
                    ended = ended or choice["finish_reason"] is not None
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        self._open -= bool(text)
        self.figures.durations_s.append(time.perf_counter() - began_s)
        self.figures.whole_streams += ended and tokens == self._orders.max_tokens and bool(text)

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"model": "policy", "messages": messages, "max_tokens": self._orders.max_tokens}


def _head(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


async def ask_all(orders: ClientOrders) -> ClientFigures:
    """Let the agents ask."""
    timeout = aiohttp.ClientTimeout(total=_LONGEST_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(orders.url, timeout=timeout, connector=connector) as session:
        agents = _Agents(orders, session)
        await agents.run()
        return agents.figures


def main() -> None:
    orders = ClientOrders(**json.load(sys.stdin))
    print(json.dumps(asdict(uvloop.run(ask_all(orders)))))


if __name__ == "__main__":
    main()
