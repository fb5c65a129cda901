"""The supervision of one engine: it never ends by itself, and notices an engine that is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import EngineInfo
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.worker.engine_host import EngineHost, Watch

CEILING_S = 60.0
WATCH = Watch(start_timeout_s=CEILING_S, health_interval_s=0.1, stopped_checks=3, backoff_s=0.05)


class Told:
    """What a host tells its worker, in order; `on_ready` may be made to raise."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.fails = 0

    def ready(self, client: EngineClient, info: EngineInfo) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no room for it")
        self.lines.append("ready")

    def lost(self, reason: str) -> None:
        self.lines.append(f"lost: {reason}")

    def start_failed(self, reason: str) -> None:
        self.lines.append(f"failed: {reason}")

    async def until(self, count: int) -> list[str]:
        while len(self.lines) < count:
            await asyncio.sleep(0.02)
        return self.lines[:count]


def supervised(directory: Path, told: Told) -> EngineHost:
    options = EmulatedOptions(cost={"seconds_per_token": 0.001})
    spec = EngineSpec("emulated", "none", slots=4, max_model_len=1000, options=options)
    return EngineHost(
        spec,
        directory,
        on_ready=told.ready,
        on_lost=told.lost,
        on_start_failed=told.start_failed,
        records=directory,
        watch=WATCH,
    )


def test_a_stopped_engine_is_lost_and_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        told = Told()
        host = supervised(tmp_path, told)
        host.start()
        try:
            await told.until(1)
            assert host._process is not None
            os.kill(host._process.engine_pid, signal.SIGSTOP)
            assert await told.until(3) == ["ready", "lost: its process is stopped (SIGSTOP)", "ready"]
        finally:
            await host.stop()

    asyncio.run(asyncio.wait_for(main(), CEILING_S))


def test_an_error_in_a_callback_starts_the_engine_again(tmp_path: Path) -> None:
    async def main() -> None:
        told = Told()
        told.fails = 1
        host = supervised(tmp_path, told)
        host.start()
        try:
            assert await told.until(2) == ["lost: RuntimeError: no room for it", "ready"]
        finally:
            await host.stop()

    asyncio.run(asyncio.wait_for(main(), CEILING_S))


def test_a_start_that_fails_unforeseen_is_told_and_tried_again(tmp_path: Path, monkeypatch) -> None:
    start, failures = EngineProcess.start, [OSError(28, "No space left on device")]

    async def full_disk_once(process: EngineProcess, timeout_s: float) -> str:
        if failures:
            raise failures.pop()
        return await start(process, timeout_s)

    monkeypatch.setattr(EngineProcess, "start", full_disk_once)

    async def main() -> None:
        told = Told()
        host = supervised(tmp_path, told)
        host.start()
        try:
            first, second = await told.until(2)
            assert first == "failed: OSError: [Errno 28] No space left on device"
            assert second == "ready"
        finally:
            await host.stop()

    asyncio.run(asyncio.wait_for(main(), CEILING_S))
