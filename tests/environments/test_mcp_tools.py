"""Tools of MCP servers: the reference server of the protocol's own project, unchanged, and servers that fail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import psutil
import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.function_tools import ToolAgent, ToolTurns
from heddle_dask.environments.mcp_tools import McpFailed, McpServer, mcp_tools
from heddle_dask.environments.tool_schema import arguments_for

PEERS = Path(__file__).parents[2] / "build" / "peers" / "site"
OTHERS = '''
import asyncio, sys
from mcp.server.mcpserver import MCPServer
server = MCPServer("others")

@server.tool()
def many(name: str, server: str = "x", cpus: int = 1) -> list[str]:
    """Names that a caller may have, too."""
    return [name, server, str(cpus)]

@server.tool()
async def slow() -> str:
    await asyncio.sleep(60)
    return "late"

@server.tool()
def ends() -> str:
    import os
    os._exit(3)

server.run()
'''


@pytest.fixture
def reference() -> McpServer:
    if not (PEERS / "mcp_server_time").is_dir():
        pytest.skip("the wheel of mcp-server-time is not in build/peers: `make test` brings it")
    words = (sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC")
    return McpServer(words, variables={"PYTHONPATH": str(PEERS)})


@pytest.fixture
def others(tmp_path: Path) -> Iterator[McpServer]:
    (tmp_path / "others.py").write_text(OTHERS)
    yield McpServer.of([sys.executable, str(tmp_path / "others.py")])
    assert not [each for each in psutil.Process().children() if "others.py" in " ".join(each.cmdline())]


def test_the_reference_server_of_time_is_used_unchanged(reference: McpServer) -> None:
    tools = mcp_tools(reference)
    schemas = ToolTurns().given(tools)
    assert [each["function"]["name"] for each in schemas] == ["get_current_time", "convert_time"]
    assert schemas[1]["function"]["parameters"]["required"] == ["source_timezone", "time", "target_timezone"]
    (convert,) = cloudpickle.loads(cloudpickle.dumps(mcp_tools(reference, only=["convert_time"])))
    given = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    assert arguments_for(convert, given) == given

    async def body() -> None:
        texts = await asyncio.gather(*(convert(**given) for _ in range(8)))
        assert len(set(texts)) == 1 and "T21:00:00+09:00" in texts[0]
        with pytest.raises(McpFailed, match="Invalid timezone"):
            await convert(**given | {"target_timezone": "Nowhere"})
        (started,) = [each for each in psutil.Process().children() if "mcp_server_time" in each.cmdline()]
        started.kill()
        with pytest.raises(McpFailed, match="Connection closed"):
            await convert(**given)
        assert await convert(**given) == texts[0]

    asyncio.run(body())


def test_calls_do_not_disturb_each_other(others: McpServer) -> None:
    tools = {tool.__name__: tool for tool in mcp_tools(others)}

    async def body() -> None:
        slow = asyncio.create_task(tools["slow"]())
        assert (await tools["many"](name="a", server="b", cpus=3)).split() == ["a", "b", "3"]
        assert not slow.done()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert await tools["many"](name="a")
        with pytest.raises(McpFailed, match="ends: Connection closed"):
            await tools["ends"]()

    asyncio.run(body())


def test_an_agent_of_nothing_else_takes_them(others: McpServer) -> None:
    agent = ToolAgent(mcp_tools(others, only=["many"]), lambda task, answer: 1.0, name="mcp")
    assert agent.name == "mcp"
    with pytest.raises(BadInput, match="no tool 'few'; it has many, slow, ends"):
        mcp_tools(others, only=["few"])


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("no-such-program --x", "No such file"),
        ("true", "Connection closed"),
        ("http://127.0.0.1:9/mcp", "connection attempts failed"),
        ("", "use a command or a URL"),
    ],
)
def test_servers_that_cannot_be_asked_say_why_in_one_line(server: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as told:
        mcp_tools(server)
    assert "\n" not in str(told.value)
