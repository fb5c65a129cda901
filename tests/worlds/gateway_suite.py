"""What a sandbox with a gateway must do, on the machine's tools and with an image, as root and as an ordinary user.

Also a program, for a user to run. Imports nothing that is not in the standard library, but for the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from heddle_dask.sandbox.process_accounting import ProcessAccounting
from heddle_dask.sandbox.stateful.contract import MIB, Command, SandboxSpec
from heddle_dask.sandbox.stateful.kinds import kind_named
from heddle_dask.sandbox.stateful.local_sandbox import LocalSandbox

CLIENT = b"""
import socket, sys, threading

def connected():
    return socket.create_connection(("127.0.0.1", 8911), 20)

def echoed(content):
    with connected() as end:
        sender = threading.Thread(target=lambda: (end.sendall(content), end.shutdown(socket.SHUT_WR)))
        sender.start()
        got = b""
        while chunk := end.recv(1 << 16):
            got += chunk
        sender.join()
    return got

if sys.argv[1] == "echo":
    size = int(sys.argv[2])
    content = bytes(range(256)) * (size // 256)
    print(echoed(b"E" + content) == content)
elif sys.argv[1] == "many":
    ends = [connected() for _ in range(int(sys.argv[2]))]
    for number, end in enumerate(ends):
        end.sendall(b"E%d" % number)
    got = [end.recv(16) for end in ends]
    print(got == [b"%d" % number for number in range(len(ends))])
elif sys.argv[1] == "leave":
    end = connected()
    end.sendall(b"S")
    end.recv(10)
elif sys.argv[1] == "ended":
    end = connected()
    end.sendall(b"C")
    print(end.recv(10))
elif sys.argv[1] == "outside":
    for address in [("1.1.1.1", 80), ("127.0.0.1", int(sys.argv[2]))]:
        try:
            socket.create_connection(address, 5).close()
            print("reached", address)
        except OSError:
            pass
    print(sorted(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line))
"""


class Gateway:
    """Answers by the first byte: E sends back what comes, S sends without end, C closes; counts those that left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.connections = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError):
            what = await reader.read(1)
            if what == b"E":
                while chunk := await reader.read(1 << 16):
                    writer.write(chunk)
                    await writer.drain()
            elif what == b"S":
                gone = asyncio.ensure_future(reader.read())
                while not gone.done():
                    writer.write(b"x" * 100)
                    await asyncio.sleep(0.005)
                self.left.set()
        writer.close()


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[Gateway]:
    gateway = Gateway()
    server = await asyncio.start_unix_server(gateway.answer, path)
    path.chmod(0o600)  # the sandbox's user could not open it
    try:
        yield gateway
    finally:
        server.close()


async def check_gateway(image: str, base: Path) -> None:
    """One sandbox through its life; without an image: on the machine's own tools."""
    other = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    async with served(base / "gateway") as gateway:
        folder = base / "agent"
        folder.mkdir()
        (folder / "client.py").write_bytes(CLIENT)
        spec = SandboxSpec(
            image=image, gateway=str(base / "gateway"), folders=(str(folder),), memory_bytes=400 * MIB, max_processes=60
        )
        box = LocalSandbox("one", spec, kind_named(""), base, ProcessAccounting())
        await box.start()

        async def ran(*arguments: object) -> str:
            python = "python" if image else "python3"
            result = await box.exec(Command(" ".join([python, f"{folder}/client.py", *map(str, arguments)])))
            assert result.ok, result
            return result.stdout.strip()

        assert await ran("echo", 8 * MIB) == "True"
        assert await ran("many", 80) == "True"
        assert await ran("outside", port) == "['lo']"
        assert await ran("ended") == "b''"
        # A client that goes away in the midst of a stream is seen to go, and so is a command that is killed.
        await ran("leave")
        await asyncio.wait_for(gateway.left.wait(), 20)
        gateway.left.clear()
        python = "python" if image else "python3"
        text = f'{python} -c \'import socket as s; e = s.create_connection(("127.0.0.1", 8911)); e.sendall(b"S")\n'
        result = await box.exec(Command(text + "while e.recv(9): pass'", timeout_s=1.0))
        assert result.ended_by == "timeout", result
        await asyncio.wait_for(gateway.left.wait(), 20)
        # The programs of the agent cannot be changed, and a service has a gateway too.
        assert not (await box.exec(Command(f"touch {folder}/other"))).ok
        loop = f"while true; do {python} {folder}/client.py many 2 >> ticks; done"
        await box.exec(Command(loop, service="ticker"))
        seen = await box.exec(Command("until test -s ticks; do sleep 0.05; done; head -n 1 ticks", timeout_s=60))
        assert seen.stdout == "True\n", seen
        before = gateway.connections
        await asyncio.sleep(0.3)
        assert gateway.connections <= before + 2, "it is frozen between commands"
        await box.stop()
        (folder / "client.py").unlink()
        folder.rmdir()
    # A gateway that is not there: the connection closes at once.
    other.close()


if __name__ == "__main__":
    os.umask(0o022)
    base, *images = sys.argv[1:]
    for image in images:
        asyncio.run(asyncio.wait_for(check_gateway(image, Path(base)), 200))
    print(json.dumps({"euid": os.geteuid()}))
