"""The process of a trainer, without a cluster around it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.trainer_spec import TrainerSpec


@dataclass(frozen=True)
class TrainerProcess:
    """A trainer that loads, and then answers on a socket."""

    socket: Path
    process: subprocess.Popen[bytes]

    async def publish(self, version: PolicyVersion, store: str) -> str:
        """Publish what it has; returns the URI of the manifest."""
        body: dict[str, Any] = {"lineage": version.lineage, "number": version.number, "store": store}
        assert await self.ask("POST", "/publish", body) == {"copied": True}
        return str((await self.ask("POST", "/published", body))["manifest"])

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to an order."""
        while not self.socket.exists():
            assert self.process.poll() is None, "the trainer has ended"
            await asyncio.sleep(0.05)
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket))) as session,
            session.request(method, f"http://trainer{path}", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            return await response.json()


@contextmanager
def trainer_process(model: Path, folder: Path, lineage: str, **options: Any) -> Iterator[TrainerProcess]:
    """Start a trainer of a model; its weights are version 0 of a lineage, or those of a process before."""
    folder.mkdir(exist_ok=True)
    (folder / "socket").unlink(missing_ok=True)
    spec = TrainerSpec(str(model), str(folder / "checkpoints"), lineage, device="cpu", **options)
    (folder / "trainer.json").write_text(json.dumps(spec.to_mapping()))
    arguments = ["--config", str(folder / "trainer.json"), "--socket", str(folder / "socket")]
    process = subprocess.Popen([sys.executable, "-m", "pipelines.grpo", *arguments])
    try:
        yield TrainerProcess(folder / "socket", process)
    finally:
        process.terminate()
        process.wait()
