"""The supervision of one engine: it never ends by itself, and notices an engine that is stopped."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from engines.test_kv_transfer import check_blocks_are_let_go, spec_of

from heddle_dask.engines import watchdog
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import EngineInfo, EngineUnreachable, GenerateRequest, SamplingParams
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.health import HealthLimits
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.http_client import cluster_session
from heddle_dask.live.worker.engine_host import EngineHost, Watch

CEILING_S = 60.0
WATCH = Watch(start_timeout_s=CEILING_S, health=HealthLimits(0.1, stopped_checks=3), backoff_s=0.05)


class Told:
    """What a host tells its worker, in order; `on_ready` may be made to raise."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.fails = 0

    def ready(self, client: EngineClient, info: EngineInfo) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no room for it")
        self.client = client
        self.lines.append("ready")

    def lost(self, reason: str) -> None:
        self.lines.append(f"lost: {reason}")

    def start_failed(self, reason: str) -> None:
        self.lines.append(f"failed: {reason}")

    async def until(self, count: int) -> list[str]:
        while len(self.lines) < count:
            await asyncio.sleep(0.02)
        return self.lines[:count]


def supervised(
    directory: Path,
    told: Told,
    *,
    records: Path | None = None,
    watch: Watch = WATCH,
    slots: int = 4,
    cost: dict[str, float] | None = None,
    faults: dict[str, int] | None = None,
) -> EngineHost:
    options = EmulatedOptions(cost=cost or {"seconds_per_token": 0.001}, faults=faults)
    spec = EngineSpec("emulated", "none", slots=slots, max_model_len=4000, options=options)
    return EngineHost(
        spec,
        directory,
        on_ready=told.ready,
        on_lost=told.lost,
        on_start_failed=told.start_failed,
        records=records or directory,
        watch=watch,
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
            ready, lost, again = await told.until(3)
            assert (ready, again) == ("ready", "ready") and lost.startswith("lost: its process is stopped (SIGSTOP)")
        finally:
            await host.stop()

    asyncio.run(asyncio.wait_for(main(), CEILING_S))


def test_a_host_that_is_stopped_while_a_lost_engine_is_ended_waits_for_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        told = Told()
        host = supervised(tmp_path, told)
        host.start()
        try:
            await told.until(1)
            assert host._process is not None
            engine, guard = host._process.engine_pid, host._process.pid
            # Stopped, it does not end on request: its end takes the whole grace.
            os.kill(engine, signal.SIGSTOP)
            await told.until(2)
        finally:
            await host.stop()
        assert not watchdog.start_time(engine) and not watchdog.start_time(guard)

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


IMPATIENT = replace(WATCH, stall_s=0.4, canary_s=0.4)


def step(name: str, tokens: int, context: int = 3) -> GenerateRequest:
    return GenerateRequest(name, [1] * context, SamplingParams(tokens, ignore_eos=True))


def test_an_engine_that_is_healthy_and_runs_no_step_is_lost_and_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        told = Told()
        host = supervised(tmp_path, told, watch=IMPATIENT, faults={"stuck_after_requests": 1})
        host.start()
        try:
            await told.until(1)
            client = told.client
            await client.generate(step("a", 5))
            held = asyncio.ensure_future(client.generate(step("b", 5)))
            lines = await told.until(3)
            assert lines[0] == lines[2] == "ready"
            assert lines[1].startswith(
                "lost: it made no progress for 0.4 s with 1 steps in flight, and a one-token request failed: "
                "no answer within 0.4 s (log: "
            )
            with pytest.raises(EngineUnreachable):
                await held
        finally:
            await host.stop()

    asyncio.run(asyncio.wait_for(main(), CEILING_S))


@pytest.mark.parametrize(
    ("cost", "work"),
    [
        ({"seconds_per_token": 0.01}, step("a", 300)),
        ({"fixed_s": 0.001, "prefill_token_s": 0.001, "chunk_tokens": 32}, step("a", 1, context=3000)),
    ],
    ids=["generation", "prefill"],
)
def test_a_long_step_that_takes_all_slots_is_not_stuck(tmp_path: Path, cost, work) -> None:
    """A canary would have to wait for its end, which is longer than the limits."""

    async def main() -> None:
        told = Told()
        host = supervised(tmp_path, told, watch=IMPATIENT, slots=1, cost=cost)
        host.start()
        try:
            await told.until(1)
            result = await told.client.generate(work)
            assert result.prefill_s + result.decode_s > 2.0
            assert told.lines == ["ready"]
        finally:
            await host.stop()

    asyncio.run(asyncio.wait_for(main(), CEILING_S))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_lets_blocks_go_that_nobody_reads_and_counts_as_lost_when_it_is_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused, it freezes running steps and goes on answering its health checks, as when a GPU hangs."""
    monkeypatch.setattr("heddle_dask.engines.vllm_command.KV_LEASE_S", 4)

    async def main() -> None:
        told = Told()
        spec = replace(spec_of("vllm"), slots=2)
        watch = Watch(health=HealthLimits(0.5), stall_s=4.0, canary_s=4.0, backoff_s=600.0)
        host = EngineHost(
            spec,
            tmp_path,
            on_ready=told.ready,
            on_lost=told.lost,
            on_start_failed=told.start_failed,
            watch=watch,
        )
        host.start()
        try:
            assert await told.until(1) == ["ready"]
            client = told.client
            await check_blocks_are_let_go(client)
            steps = [asyncio.ensure_future(client.generate(step(name, 1900))) for name in "abcd"]
            while (await client.progress())[0] == 0:
                await asyncio.sleep(0.1)
            async with (
                cluster_session(client.address.socket) as session,
                session.post(f"{client.address.url}/pause?mode=keep") as answer,
            ):
                assert answer.status == 200
            assert await client.healthy()
            lost = (await told.until(2))[1]
            assert lost.startswith("lost: it made no progress for 4 s with ")
            results = await asyncio.gather(*steps, return_exceptions=True)
            assert any(isinstance(result, EngineUnreachable) for result in results)
        finally:
            await host.stop()

    asyncio.run(asyncio.wait_for(main(), 500.0))


def test_a_crash_is_told_with_its_cause_and_the_end_of_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        told = Told()
        host = supervised(tmp_path, told, faults={"crash_after_requests": 0})
        host.start()
        try:
            await told.until(1)
            with pytest.raises(EngineUnreachable):
                await told.client.generate(step("a", 5))
            lost = (await told.until(2))[1]
        finally:
            await host.stop()
        log = tmp_path / "engine-1" / "engine.log"
        assert lost.startswith("lost: its process ended with exit code 1: RuntimeError: crashed as asked (fault) ")
        assert f"(log: {log}; its last lines: emulated engine for none at unix:" in lost
        assert lost.endswith(" | RuntimeError: crashed as asked (fault))")
        assert "\n" not in lost and len(lost) < 1500

    asyncio.run(asyncio.wait_for(main(), CEILING_S))


def test_a_directory_that_is_not_ours_alone_is_told_and_tried_again(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    records = Path(tempfile.mkdtemp())  # short: the paths of sockets are limited to 107 bytes
    request.addfinalizer(lambda: shutil.rmtree(records))
    records.chmod(0o777)

    async def main() -> None:
        told = Told()
        host = supervised(tmp_path, told, records=records)
        host.start()
        try:
            (failed,) = await told.until(1)
            assert failed == (f"failed: directory {records} may be written by other users: remove it and what is in it")
            records.chmod(0o700)
            while told.lines[-1] != "ready":
                await asyncio.sleep(0.02)
        finally:
            await host.stop()

    asyncio.run(asyncio.wait_for(main(), CEILING_S))


def test_a_kill_names_the_signal(tmp_path: Path) -> None:
    async def main() -> None:
        told = Told()
        host = supervised(tmp_path, told)
        host.start()
        try:
            await told.until(1)
            assert host._process is not None
            os.kill(host._process.engine_pid, signal.SIGKILL)
            lost = (await told.until(2))[1]
            assert lost.startswith("lost: its process ended with exit code 137 (SIGKILL) (log: ")
        finally:
            await host.stop()

    asyncio.run(asyncio.wait_for(main(), CEILING_S))
