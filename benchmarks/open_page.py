"""An open tab of the dashboard's page, without a browser: it receives what a browser would, and draws nothing.

Run as a program of its own: ``python -m benchmarks.open_page URL`` opens the page, prints ``open`` when the
first update has come, and at the end of its standard input the number of messages and bytes that came since.
"""

from __future__ import annotations

import asyncio
import re
import sys

import aiohttp

_TOKEN = re.compile(r'"token":\s*"([^"]+)"')


async def receive(url: str, until: asyncio.Event) -> tuple[int, int]:
    """Open the page and take what its session sends, until the event: messages and bytes.

    Raises
    ------
    RuntimeError
        The page is not one of Bokeh.
    """
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            found = _TOKEN.search(await answer.text())
        if found is None:
            raise RuntimeError(f"{url} is no page of Bokeh")
        socket_url = url.replace("http://", "ws://").rstrip("/") + "/ws"
        messages = received_bytes = 0
        async with session.ws_connect(socket_url, protocols=("bokeh", found[1]), max_msg_size=0, compress=0) as socket:
            ending = asyncio.create_task(until.wait())
            while not ending.done():
                next_message = asyncio.create_task(socket.receive())
                await asyncio.wait({ending, next_message}, return_when=asyncio.FIRST_COMPLETED)
                if not next_message.done():
                    next_message.cancel()
                    break
                message = next_message.result()
                if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    break
                if messages == 0:
                    sys.stdout.write("open\n")
                    sys.stdout.flush()
                messages += 1
                received_bytes += len(message.data)
            ending.cancel()
        return messages, received_bytes


async def _main(url: str) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    messages, received_bytes = await receive(url, ended)
    sys.stdout.write(f"{messages} {received_bytes}\n")


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
