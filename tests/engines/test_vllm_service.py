"""A real vLLM server as a model service: its answers are those of the CPU back end. A CPU build does not sleep."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from worlds.model_files import AGENT, classifier

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.engines.model_services.host import HostDevices, ModelHost
from heddle_dask.engines.model_services.spec import ServiceFailed, ServiceRefused, ServiceSpec

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

CHUNK = GpuChunk(0, 1)


def spec(name: str, model: Path, backend: str) -> ServiceSpec:
    return ServiceSpec(name, model, backend, max_tokens=256, batch=4, dtype="float32")  # type: ignore[arg-type]


def test_vllm_answers_as_the_cpu_back_end_and_an_eviction_frees_its_place(tmp_path: Path) -> None:
    tokens = list(b"What is 2+3? It is 5.")
    scorer = classifier(tmp_path / "classifier")

    async def body() -> None:
        host = ModelHost(HostDevices(gpus=1), tmp_path / "logs", lambda *what: None)
        try:
            wanted: dict[str, Any] = {}
            chat = [{"role": "user", "content": "What is 2+3?"}]
            for name, model in (("teacher", AGENT), ("scorer", scorer)):
                await host.load(spec(f"cpu-{name}", model, "cpu"), CHUNK, cold=True, keep=True)
                copy = host.resident(f"cpu-{name}", CHUNK)
                if name == "teacher":
                    wanted[name] = await copy.server.logprobs(tokens, 1)
                    wanted["judge"] = await copy.server.judge(chat, 64, 0.0)
                    assert wanted["judge"]["finish_reason"] == "stop"
                    assert (await copy.server.judge(chat, 4, 0.0))["finish_reason"] == "length"
                else:
                    wanted[name] = await copy.server.score(["good", "a longer text", tokens])
                await host.evict(f"cpu-{name}", CHUNK)

            await host.load(spec("teacher", AGENT, "vllm"), CHUNK, cold=True, keep=True)
            teacher = host.resident("teacher", CHUNK)
            assert await teacher.server.logprobs(tokens, 1) == pytest.approx(wanted["teacher"], abs=2e-3)
            assert await teacher.server.logprobs(tokens, 18) == pytest.approx(wanted["teacher"][17:], abs=2e-3)
            with pytest.raises(ServiceRefused):
                await teacher.server.logprobs([1] * 300, 1)
            assert await teacher.server.judge(chat, 64, 0.0) == wanted["judge"]
            assert (await teacher.server.judge(chat, 4, 0.0))["finish_reason"] == "length"
            await host.evict("teacher", CHUNK)
            assert teacher.process_id == 0
            with pytest.raises(ServiceFailed):
                host.resident("teacher", CHUNK)

            await host.load(spec("scorer", scorer, "vllm"), CHUNK, cold=True, keep=True)
            scores = await host.resident("scorer", CHUNK).server.score(["good", "a longer text", tokens])
            assert scores == pytest.approx(wanted["scorer"], abs=2e-3)
        finally:
            await host.close()

    asyncio.run(asyncio.wait_for(body(), 500))
