"""The registry of engine kinds, and a third kind that is one file (`echo_engine`)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from worlds.live_world import run
from worlds.shared_cluster import shared_cluster

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, KvTransferFailed, SamplingParams
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import ENGINE_KINDS, EngineSpec, engine_kind
from heddle_dask.environments.base import Task
from heddle_dask.live.driver.options import Engines
from heddle_dask.live.driver.rollout import Rollout

ECHO = "worlds.echo_engine:ECHO"


def test_a_kind_is_found_by_its_name_or_as_an_object_of_a_module():
    assert all(engine_kind(name).name == name for name in ENGINE_KINDS)
    assert engine_kind(ECHO).name == "echo"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sglang", "engine kind 'sglang' is unknown: use vllm or emulated"),
        ("no.such:KIND", "engine kind 'no.such:KIND' cannot be imported: No module named 'no'"),
        ("json:KIND", "cannot be imported: module 'json' has no attribute 'KIND'"),
        (None, "engine kind None is unknown"),
    ],
)
def test_a_kind_that_is_none_is_refused_with_the_kinds_there_are(name: Any, message: str):
    with pytest.raises(BadInput, match=message):
        EngineSpec(name, "none", 1, 9)


def test_only_kinds_that_take_a_cost_keep_one():
    cost = {"seconds_per_token": 0.5}
    for kind in map(engine_kind, ENGINE_KINDS):
        options = kind.options_for(cost, time_scale=2.0)
        assert kind.takes_cost == (kind.default_cost is not None) == (options.cost == cost)
        assert options.time_scale == (2.0 if kind.takes_cost else 1.0)
        assert kind.options_type.from_mapping(json.loads(json.dumps(options.to_mapping()))) == options


def test_options_that_a_third_kind_alone_has_travel_with_its_spec():
    mapping = {"kind": ECHO, "model": "none", "slots": 2, "max_model_len": 512, "options": {"times": 3}}
    spec = EngineSpec.from_mapping(mapping)
    assert spec.to_mapping()["options"]["times"] == 3


def test_a_third_kind_starts_and_answers_in_its_own_dialect(tmp_path: Path):
    async def body() -> None:
        process = EngineProcess(EngineSpec(ECHO, "none", 2, 512), tmp_path)
        try:
            async with EngineClient(await process.start(60.0), engine_kind(ECHO).dialect) as client:
                assert (await client.describe()).slots == 2
                request = GenerateRequest("a", [5, 7], SamplingParams(3))
                assert (await client.generate(request)).token_ids == (7, 7, 7)
                with pytest.raises(KvTransferFailed, match="transfers no KV"):
                    await client.export_kv("b", [5, 7])
        finally:
            await process.stop()

    asyncio.run(body())


async def _agent(task: Task, ctx: Any) -> float:
    for _ in range(2):
        ctx.append("user", task.prompt)
        await ctx.generate(max_tokens=4, ignore_eos=True)
    return 1.0


@pytest.mark.cluster
def test_a_rollout_runs_on_a_third_kind(model_dir: str):
    # Scheduler and workers import the kind by its name: shared clusters find modules of the tests.
    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            spec = EngineSpec(ECHO, model_dir, slots=2, max_model_len=1024)
            async with Rollout(client, env=_agent, model=model_dir, engines=Engines(spec=spec, count=1)) as rollout:
                batch = await rollout.run(["one", "two"])
            assert batch.counts == {"completed": 2}, [record.detail for record in batch]
            assert batch.generated_tokens == 2 * 2 * 4

    run(body())
