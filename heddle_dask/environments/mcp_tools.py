"""Tools of MCP servers (package `mcp`), for `Context.set_template` and `ToolAgent`.

A call is an action, and waits for its turn as every other one. On the tool worker it goes to a session that all calls
of the same server share there: a server is started once on each worker, and again if it has ended. It ends with the
process of the worker in which coroutines run.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from heddle_dask.core.errors import BadInput, text_of

START_S = 60.0
"""Seconds in which a server must have started and answered."""
_MOST_TOOLS = 1000


class McpFailed(Exception):
    """A server could not be started, has ended, or a tool of it reported an error; the message is for the model."""


@dataclass(frozen=True)
class McpServer:
    """A server: a command that speaks MCP on its standard streams, or a URL (streamable HTTP).

    Attributes
    ----------
    command
        Program and arguments; found on each tool worker and, for `mcp_tools`, here.
    url
        Reached from each tool worker.
    variables
        Environment variables of the command, beside a few of the worker's (`PATH`, `HOME`).
    directory
        Working directory of the command; empty: that of the worker.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    directory: str = ""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise BadInput("MCP server: give a command or a URL")

    @classmethod
    def of(cls, server: McpServer | str | Sequence[str]) -> McpServer:
        """A server from a URL, a command line, or a program with its arguments."""
        if isinstance(server, McpServer):
            return server
        if isinstance(server, str) and server.startswith(("http://", "https://")):
            return cls(url=server)
        words = shlex.split(server) if isinstance(server, str) else list(server)
        if not words or not all(isinstance(word, str) for word in words):
            raise BadInput(f"MCP server {server!r}: use a command or a URL, http://… or https://…")
        return cls(command=tuple(words))

    @property
    def told(self) -> str:
        """Its URL or command, for messages."""
        return self.url.partition("?")[0] or shlex.join(self.command)


class McpTool(partial[Any]):
    """One tool of a server: a coroutine function of its arguments by name, with the schema that the server gives."""

    tool_schema: Mapping[str, Any]
    __name__: str


def mcp_tools(server: McpServer | str | Sequence[str], *, only: Sequence[str] | None = None) -> list[McpTool]:
    """The tools of a server, which is started here for a moment to tell them.

    Parameters
    ----------
    only
        Names of those that are wanted; None: all.

    Raises
    ------
    BadInput
        The package `mcp` is missing, the server cannot be asked, or has no tool of that name.
    """
    asked = McpServer.of(server)
    found: list[Any] = []
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            found.extend(asyncio.run(_listed(asked)))
        except BaseException as error:
            failures.append(error)

    # A loop of its own: the caller may be within one.
    thread = threading.Thread(target=ask, name="heddle-mcp")
    thread.start()
    thread.join()
    if failures:
        raise BadInput(f"MCP server {asked.told}: {_reason(failures[0])}") from failures[0]
    named = {each.name: each for each in found}
    for name in only or ():
        if name not in named:
            raise BadInput(f"MCP server {asked.told}: no tool {name!r}; it has {', '.join(named)}")
    return [_tool(asked, each) for name, each in named.items() if only is None or name in only]


async def call_mcp_tool(server: McpServer, tool_name: str, /, **arguments: Any) -> str:
    """Call a tool in this process's session of the server, and give what it answers as a text.

    Raises
    ------
    McpFailed
        The server failed, or the tool reported an error.
    """
    session = _session_of(server)
    client = await session.client()
    try:
        result = await client.call_tool(tool_name, arguments)
    except Exception as error:
        if not _is_refusal(error):
            session.end()  # the next call starts it again
        raise McpFailed(f"{tool_name}: {_reason(error)}") from error
    text = _text(result)
    if result.is_error:
        raise McpFailed(text or f"{tool_name} failed")
    return text


class _McpSession:
    """A connection that lives in a task of its own, until it is broken or this process ends."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"mcp {server.told}")

    async def client(self) -> Any:
        """What calls its tools. Whoever else waits for it goes on if one of them is cancelled."""
        return await asyncio.shield(self._ready)

    def end(self) -> None:
        """Close it; calls from now on make another one."""
        self._over.set()
        if _sessions.get(self._server) is self:
            del _sessions[self._server]

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(START_S) as limit, _client(self._server) as client:
                limit.reschedule(None)
                self._ready.set_result(client)
                await self._over.wait()
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(McpFailed(f"MCP server {self._server.told}: {_reason(error)}"))
        finally:
            self.end()


# Of this process: each tool worker has one in which coroutines run.
_sessions: dict[McpServer, _McpSession] = {}


def _session_of(server: McpServer) -> _McpSession:
    if server not in _sessions:
        _sessions[server] = _McpSession(server)
    return _sessions[server]


def _is_refusal(error: Exception) -> bool:
    """Whether the server has answered, with an error."""
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.code != CONNECTION_CLOSED


async def _listed(server: McpServer) -> list[Any]:
    async with asyncio.timeout(START_S), _client(server) as client:
        tools: list[Any] = []
        cursor = None
        while len(tools) < _MOST_TOOLS:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        return tools


def _client(server: McpServer) -> Any:
    try:
        from mcp import Client, StdioServerParameters
    except ImportError:
        raise BadInput("tools of MCP servers need the package mcp: pip install 'mcp>=2.3'") from None
    if server.url:
        return Client(server.url)
    program, *arguments = server.command
    return Client(
        StdioServerParameters(
            command=program,
            args=arguments,
            env=dict(server.variables) or None,
            cwd=server.directory or os.getcwd(),
        )
    )


def _tool(server: McpServer, told: Any) -> McpTool:
    made = McpTool(call_mcp_tool, server, told.name)
    made.__name__ = told.name
    function = {"name": told.name, "description": told.description or "", "parameters": dict(told.input_schema)}
    made.tool_schema = {"type": "function", "function": function}
    return made


def _text(result: Any) -> str:
    """The texts of an answer; of other contents, their kind."""
    parts = [each.text if each.type == "text" else f"[{each.type}]" for each in result.content]
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """The first cause in groups of exceptions, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {START_S:.0f} s"
    return " ".join(f"{text_of(error)}".split()) or type(error).__name__
