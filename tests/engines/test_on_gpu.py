"""What only a GPU shows: ``make gpu`` runs these, ``make test`` does not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from heddle_dask.cli.engine_option import shipped_model
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, SamplingParams
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import VllmOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def greedy(number: int, tokens: int = 48) -> GenerateRequest:
    context = [33 + (7 * index + number) % 90 for index in range(200)]
    return GenerateRequest(f"r{number}-{time.monotonic_ns()}", context, SamplingParams(tokens, 0.0, ignore_eos=True))


async def answers(client: EngineClient, count: int, tokens: int = 48) -> list[tuple[int, ...]]:
    replies = await asyncio.gather(*(client.generate(greedy(number, tokens)) for number in range(count)))
    return [tuple(reply.token_ids) for reply in replies]


def test_two_engines_that_start_at_once_share_a_card_and_repeat_greedy_tokens(tmp_path: Path) -> None:
    spec = EngineSpec("vllm", str(shipped_model()), slots=32, max_model_len=2048, devices=("0",), engines_per_gpu=2)
    phases: list[list[str]] = [[], []]
    processes = [EngineProcess(spec, tmp_path / str(n), on_phase=phases[n].append) for n in range(2)]

    async def body() -> None:
        try:
            addresses = await asyncio.gather(*(process.start(600.0) for process in processes))
            told = []
            for address in addresses:
                async with EngineClient(address, question_timeout_s=60.0) as client:
                    told.append([await answers(client, 1), await answers(client, 1)])
            assert told[0][0] == told[0][1] == told[1][0] == told[1][1]
            assert all("loading weights" in each for each in phases), phases
        finally:
            await asyncio.gather(*(process.stop() for process in processes))

    asyncio.run(body())


def test_steps_that_vllm_preempts_for_memory_come_back_whole(tmp_path: Path) -> None:
    """32 contexts of 200 tokens that grow by 400 do not fit into 16 MiB of KV: 16,384 tokens of the tiny agent."""
    options = VllmOptions(kv_cache_gib=1 / 64, gpu_memory_utilization=0.2)
    spec = EngineSpec("vllm", str(shipped_model()), slots=32, max_model_len=2048, devices=("0",), options=options)
    process = EngineProcess(spec, tmp_path)

    async def body() -> None:
        try:
            async with EngineClient(await process.start(600.0), question_timeout_s=60.0) as client:
                assert {len(tokens) for tokens in await answers(client, 32, 400)} == {400}
        finally:
            await process.stop()

    asyncio.run(body())
