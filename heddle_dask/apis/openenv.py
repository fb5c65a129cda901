"""Environments of OpenEnv: a server that runs somewhere, and an agent that replies with actions of its schema.

Each attempt has a session of its own on the server (a WebSocket, with the messages `reset`, `step`, `close`). The
package `openenv` is not needed here. Calls are made on the driver's event loop, and do not block it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from heddle_dask.core.errors import BadInput, check_count, check_seconds
from heddle_dask.environments.base import (
    CUT,
    NO_PROGRESS,
    Context,
    EnvironmentFailed,
    Reply,
    Reward,
    Task,
    environment_step,
)
from heddle_dask.http_client import failures, one_line_of, outside_session

_CALL_S = 600.0
_CONNECT_S = 30.0
_WAIT_S = 2.0  # until a full server is asked again
_FULL = "CAPACITY_REACHED"
# Of every action and observation of OpenEnv.
_COMMON = frozenset({"metadata", "done", "reward"})
_REMINDER = "Reply with one JSON object that is an action: {}"


class OpenEnvEnvironment:
    """Plays episodes on a server. The reward is the sum over the episode.

    Parameters
    ----------
    address
        URL of the server: ``http://HOST:PORT``. ``?sessions=N`` says how many episodes it may play at a time; else as
        many as it takes: attempts that it refuses wait.
    instructions
        Opens the first message, before the first observation.
    call_s
        Seconds of one reset or step.
    useless_replies
        Maximum number of replies in a row without an action; the trajectory then ends as truncated with the cause
        ``"no-progress"``, and has the reward so far.

    Raises
    ------
    BadInput
        It is no URL of a server.
    """

    def __init__(
        self, address: str, *, instructions: str = "", call_s: float = _CALL_S, useless_replies: int = 8
    ) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"openenv {address!r}: use the URL of a server, http://HOST:PORT")
        asked = parse_qs(parts.query)
        if set(asked) - {"sessions"} or not all(each[0].isdecimal() for each in asked.values()):
            raise BadInput(f"openenv {address!r}: behind the question mark only sessions=NUMBER is known")
        self._url = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        self._instructions = instructions
        check_seconds("openenv: call_s", call_s)
        check_count("openenv: useless_replies", useless_replies)
        self._call_s, self._useless_replies = call_s, useless_replies
        sessions = int(asked["sessions"][0]) if asked else 0
        self._free = asyncio.Semaphore(sessions) if sessions else None
        self._schema: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"openenv:{urlsplit(self._url).netloc}{urlsplit(self._url).path}"

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` tasks, each with its own seed for `reset`."""
        draws = random.Random(f"openenv tasks {seed}")
        seeds = [draws.randrange(1 << 31) for _ in range(count)]
        return [Task(f"openenv-{reset}-{i}", "", {"seed": reset}) for i, reset in enumerate(seeds)]

    async def solve(self, task: Task, ctx: Context) -> Reward | None:
        """Play one episode, to its end or to the end of the trajectory's budget.

        Whatever fails of the server is an `EnvironmentFailed`: the attempt is made again. A reply without an action
        uses a step of the trajectory, not of the environment.
        """
        if self._free is None:
            return await self._session(task, ctx)
        async with self._free:
            return await self._session(task, ctx)

    async def _session(self, task: Task, ctx: Context) -> Reward:
        schema = await self._action_schema()
        with environment_step("the server of OpenEnv"):
            async with outside_session(self._url, total_s=None) as http:
                while True:
                    async with http.ws_connect(f"{self._url}/ws", timeout=_ws_limit()) as socket:
                        connection = _Connection(socket, self._call_s)
                        try:
                            first = await connection.call("reset", dict(task.payload))
                        except _ServerFull:
                            await asyncio.sleep(_WAIT_S)
                            continue
                        return await self._episode(first, connection, schema, task, ctx)

    async def _episode(
        self, first: Mapping[str, Any], connection: _Connection, schema: Mapping[str, Any], task: Task, ctx: Context
    ) -> Reward:
        told = _told_of(schema)
        parts = [self._instructions, task.prompt, told, _text(first)]
        ctx.append("user", "\n\n".join(part for part in parts if part))
        reward, useless, steps = float(first.get("reward") or 0.0), 0, 0
        done = bool(first.get("done"))
        while not ctx.done and not done:
            if useless >= self._useless_replies:
                ctx.metadata[NO_PROGRESS] = f"{useless} replies in a row had no action"
                break
            reply = await ctx.generate()
            useless += 1
            try:
                action = action_in(reply, schema)
                answer = await connection.call("step", action)
            except (NoAction, _ActionRefused) as error:
                ctx.append("user", str(error))
                continue
            useless = 0
            steps += 1
            reward += float(answer.get("reward") or 0.0)
            done = bool(answer.get("done"))
            if not done:
                ctx.append("user", _text(answer))
        return Reward(reward, metadata={"environment_steps": steps, "environment_done": done})

    async def _action_schema(self) -> Mapping[str, Any]:
        """The JSON schema of actions, as the server tells it."""
        failed: tuple[type[Exception], ...] = (*failures(), ValueError, KeyError)
        if self._schema is None:
            try:
                async with (
                    outside_session(self._url, total_s=_CONNECT_S) as http,
                    http.get(f"{self._url}/schema") as response,
                ):
                    response.raise_for_status()
                    self._schema = dict((await response.json())["action"])
            except failed as error:
                raise EnvironmentFailed(f"the server of OpenEnv at {self._url}: {one_line_of(error)}") from error
        return self._schema


class NoAction(Exception):
    """A reply that is no action; the message is for the model."""


class _ActionRefused(Exception):
    """The environment does not take an action; the message is for the model."""


class _ServerFull(Exception):
    """The server has as many sessions as it may have."""


class _Connection:
    """A session of the server."""

    def __init__(self, socket: Any, call_s: float) -> None:
        self._socket, self._call_s = socket, call_s

    async def call(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message; the observation, its reward, and whether the episode is over."""
        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        async with asyncio.timeout(self._call_s):
            message = await self._socket.receive()
        if not isinstance(message.data, str):
            raise EnvironmentFailed(f"{kind}: the server of OpenEnv has closed the connection ({message.data})")
        answer = json.loads(message.data)
        told = answer.get("data") or {}
        if answer.get("type") == "error":
            code = told.get("code")
            if code == _FULL:
                raise _ServerFull
            if code == "VALIDATION_ERROR" and kind == "step":
                raise _ActionRefused(
                    f"error: {told.get('message')}: {json.dumps(told.get('errors'), default=str)[:400]}"
                )
            raise EnvironmentFailed(f"{kind}: {told.get('message')} ({code})")
        return dict(told)


def action_in(reply: Reply, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The action in a reply: its JSON object, or, where an action is one text, the whole answer.

    Raises
    ------
    NoAction
        There is none.
    """
    if reply.finish_reason == "length":
        raise NoAction(CUT)
    answer = reply.answer.strip()
    field = _only_text(schema)
    found = _object_in(answer)
    if found is not None and (not field or set(found) & set(_own(schema))):
        return found
    if field and answer:
        return {field: answer}
    raise NoAction(_REMINDER.format(json.dumps(_own(schema))))


def _told_of(schema: Mapping[str, Any]) -> str:
    """How to act, for the model; empty where an action is just a text."""
    return "" if _only_text(schema) else _REMINDER.format(json.dumps(_own(schema)))


def _own(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in schema.get("properties", {}).items() if name not in _COMMON}


def _only_text(schema: Mapping[str, Any]) -> str:
    """The name of the only field of an action, if that is a text."""
    own = _own(schema)
    return next(iter(own)) if len(own) == 1 and next(iter(own.values())).get("type") == "string" else ""


def _object_in(text: str) -> dict[str, Any] | None:
    """The last JSON object of a text that stands for itself."""
    decoder, found = json.JSONDecoder(), None
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            found = value if isinstance(value, dict) else found
        except ValueError:
            end = at + 1
        at = text.find("{", end)
    return found


def _text(answer: Mapping[str, Any]) -> str:
    """An observation for the model: its only text, or its JSON."""
    observation = answer.get("observation", {})
    if not isinstance(observation, Mapping):
        return str(observation)
    own = {name: value for name, value in observation.items() if name not in _COMMON}
    if len(own) == 1 and isinstance(only := next(iter(own.values())), str):
        return only
    return json.dumps(own, ensure_ascii=False)


def _ws_limit() -> Any:
    import aiohttp

    return aiohttp.ClientWSTimeout(ws_close=5.0)
