"""A host of model services with real processes: loads, evictions, answers, deaths. Starts processes with torch."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from worlds.model_files import classifier, enlarged

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.engines.model_services.host import HostDevices, ModelHost
from heddle_dask.engines.model_services.spec import ServiceFailed, ServiceRefused, ServiceSpec

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(560)]

CHUNK = GpuChunk(0, 1)
MIB = 1 << 20


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 500))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included (RSS)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")


def test_two_models_share_a_slot_that_is_too_small_for_both(tmp_path: Path) -> None:
    large = ServiceSpec("teacher", enlarged(tmp_path / "large"), "cpu", batch=4, max_tokens=64)
    reward = ServiceSpec("reward/model", classifier(tmp_path / "classifier"), "cpu", batch=4, max_tokens=64)
    tokens = list(b"What is 2+3?")
    lost: list[tuple[str, GpuChunk, str]] = []

    async def body() -> None:
        devices = HostDevices(gpus=1, slot_bytes=34 * MIB)
        host = ModelHost(devices, tmp_path / "logs", lambda *what: lost.append(what))
        try:
            await host.load(large, CHUNK, cold=True, keep=True)
            teacher = host.resident("teacher", CHUNK)
            assert 30 * MIB < await teacher.resident_bytes() <= 34 * MIB
            first = await teacher.server.logprobs(tokens, 1)
            assert len(first) == len(tokens) - 1 and all(each < 0 and math.isfinite(each) for each in first)
            # Of a batch, each answer is that of the request alone.
            several = await asyncio.gather(*(teacher.server.logprobs(tokens[:n], n - 1) for n in range(2, 10)))
            assert [each for (each,) in several] == pytest.approx(first[:8], abs=1e-3)

            with pytest.raises(ServiceFailed, match="no free place: evict a service first"):
                await host.load(reward, CHUNK, cold=True, keep=True)
            loaded = resident_bytes(teacher.process_id)
            await host.evict("teacher", CHUNK)
            assert loaded - resident_bytes(teacher.process_id) > 25 * MIB
            with pytest.raises(ServiceFailed, match="not resident"):
                host.resident("teacher", CHUNK)
            with pytest.raises(ServiceFailed, match="not resident"):
                await teacher.server.logprobs(tokens, 1)

            await host.load(reward, CHUNK, cold=True, keep=False)
            scorer = host.resident("reward/model", CHUNK)
            scores = await scorer.server.score(["good", "bad", list(b"good")])
            assert scores[0] == pytest.approx(scores[2], abs=1e-5) and scores[0] != scores[1]
            with pytest.raises(ServiceRefused, match="gives no logprobs"):
                await scorer.server.logprobs(tokens, 1)
            with pytest.raises(ServiceRefused, match="65 tokens; the service takes 64"):
                await scorer.server.score(["x" * 65])
            with pytest.raises(ServiceRefused, match="token ids outside"):
                await scorer.server.score([[400]])
            await host.evict("reward/model", CHUNK)

            # Restored from host memory, by the same process.
            pid = teacher.process_id
            await host.load(large, CHUNK, cold=False, keep=True)
            assert host.resident("teacher", CHUNK).process_id == pid
            # A pickled one asks by itself.
            elsewhere = pickle.loads(pickle.dumps(teacher.server))
            assert await elsewhere.logprobs(tokens, 1) == pytest.approx(first, abs=1e-5)

            # A death in the middle of a request: the request fails, and the slot is free again.
            os.kill(pid, signal.SIGSTOP)
            request = asyncio.ensure_future(teacher.server.logprobs(tokens, 1))
            await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ServiceFailed, match="does not answer"):
                await request
            await host.after_failure("teacher", CHUNK)
            assert [(name, chunk) for name, chunk, _ in lost] == [("teacher", CHUNK)]
            await host.load(reward, CHUNK, cold=True, keep=True)
            assert await scorer.server.score(["good"]) == pytest.approx(scores[:1], abs=1e-5)
        finally:
            await host.close()

    run(body())


def test_a_model_larger_than_its_slots_is_refused_and_fits_into_two(tmp_path: Path) -> None:
    large = ServiceSpec("teacher", enlarged(tmp_path / "large", 4_000), "cpu", gpus=(1, 2), max_tokens=64)

    async def body() -> None:
        host = ModelHost(HostDevices(gpus=2, slot_bytes=3 * MIB), tmp_path / "logs", lambda *what: None)
        try:
            with pytest.raises(ServiceFailed, match=r"weights of 5\.\d MiB do not fit into 3\.0 MiB"):
                await host.load(large, CHUNK, cold=True, keep=True)
            await host.close()
            # A host that was cleared takes new loads.
            await host.load(large, GpuChunk(0, 2), cold=True, keep=True)
            both = host.resident("teacher", GpuChunk(0, 2))
            assert len(await both.server.logprobs(list(b"hello"), 3)) == 2
        finally:
            await host.close()

    run(body())


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    model = classifier(tmp_path / "model")
    (model / "config.json").write_text('{"model_type": "nothing-known"}')

    async def body() -> None:
        host = ModelHost(HostDevices(gpus=1), tmp_path / "logs", lambda *what: None)
        try:
            with pytest.raises(ServiceFailed, match=r"ended while it started: .*nothing-known"):
                await host.load(ServiceSpec("rm", model, "cpu"), CHUNK, cold=True, keep=True)
        finally:
            await host.close()

    run(body())
