"""A server of OpenEnv with the environment that its own command `openenv init` makes, unchanged."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "build" / "peers" / "site"
TEMPLATE = SITE / "openenv" / "cli" / "templates" / "openenv_env"
NAMES = {"__ENV_NAME__": "echo", "__ENV_CLASS_NAME__": "Echo", "__ENV_TITLE_NAME__": "Echo"}
# OpenEnv imports this package for tools of environments; this environment has none.
NO_TOOLS = {
    "__init__.py": "class Client:\n    pass\n\n\nclass FastMCP:\n    pass\n",
    "client/__init__.py": "",
    "client/client.py": "class CallToolResult:\n    pass\n",
}


def initialised(folder: Path) -> Path:
    """What `openenv init echo` writes: the template with its names filled in."""
    shutil.copytree(TEMPLATE, folder / "echo", ignore=shutil.ignore_patterns("__pycache__"))
    for path in [each for each in (folder / "echo").rglob("*") if each.is_file()]:
        text = path.read_text()
        for old, new in NAMES.items():
            text = text.replace(old, new)
        path.write_text(text)
        if path.name.startswith("__ENV_NAME__"):
            path.rename(path.with_name(path.name.replace("__ENV_NAME__", "echo")))
    for name, text in NO_TOOLS.items():
        (folder / "fastmcp" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "fastmcp" / name).write_text(text)
    return folder


@contextlib.contextmanager
def openenv_server(folder: Path) -> Iterator[str]:
    """Its URL on loopback."""
    if not TEMPLATE.is_dir():
        pytest.skip("the wheel of openenv is not in build/peers: `make test` brings it")
    initialised(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(folder), str(SITE)])
    command = [sys.executable, "-m", "uvicorn", "echo.server.app:app", "--port", str(port), "--log-level", "error"]
    log = folder / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert server.poll() is None, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            time.sleep(0.05)
        yield url
    finally:
        server.kill()
        server.wait()
