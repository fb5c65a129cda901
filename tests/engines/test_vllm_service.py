"""A real vLLM server as a model service: its scores are those of the CPU back end. A CPU build does not sleep.

Its logprobs and its judgements are compared in tests/pipelines/test_grpo_vllm.py, on a server that runs there anyway.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from worlds.model_files import classifier

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.engines.model_services.host import HostDevices, ModelHost
from heddle_dask.engines.model_services.spec import ServiceFailed, ServiceSpec

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

CHUNK = GpuChunk(0, 1)


def test_vllm_scores_as_the_cpu_back_end_and_an_eviction_frees_its_place(tmp_path: Path) -> None:
    inputs = ["good", "a longer text", list(b"What is 2+3? It is 5.")]
    model = classifier(tmp_path / "classifier")

    async def body() -> None:
        host = ModelHost(HostDevices(gpus=1), tmp_path / "logs", lambda *what: None)
        scores = []
        try:
            for backend in ("cpu", "vllm"):
                spec = ServiceSpec(backend, model, backend, max_tokens=256, batch=4, dtype="float32")  # type: ignore[arg-type]
                await host.load(spec, CHUNK, cold=True, keep=True)
                copy = host.resident(backend, CHUNK)
                scores.append(await copy.server.score(inputs))
                await host.evict(backend, CHUNK)
            assert scores[1] == pytest.approx(scores[0], abs=2e-3)
            assert copy.process_id == 0
            with pytest.raises(ServiceFailed):
                host.resident("vllm", CHUNK)
        finally:
            await host.close()

    asyncio.run(asyncio.wait_for(body(), 500))
