"""The whole path with real vLLM: agents, tools in the sandbox, records equal to what the engine saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from distributed import Client
from worlds.live_agents import RecordingWorker, ToolAgent
from worlds.live_world import check_against_engine, cluster, control_lines, kill, run, until

from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import replay
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.loading import load_environment
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.batch import Batch
from heddle_dask.live.driver.programs.services import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.session import open_session
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import DEFAULT_PRESET, build_strategies

pytestmark = [pytest.mark.cluster, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def engine(model: str) -> EngineSpec:
    return EngineSpec("vllm", model, slots=4, max_model_len=2048, dtype="float32")


def vllm_processes() -> list[psutil.Process]:
    marks = ("vllm.entrypoints", "VLLM::")
    return [
        p for p in psutil.Process().children(recursive=True) if any(m in " ".join(p.cmdline()) for m in marks)
    ]


def test_records_equal_what_vllm_saw_and_a_killed_worker_leaves_no_engine(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_path = tmp_path / "seen.jsonl"
    monkeypatch.setattr(
        open_session, "RolloutWorker", lambda spec, watch: RecordingWorker(spec, str(seen_path))
    )

    async def body() -> None:
        async with cluster(engines=1) as (made, client):
            rollout = Rollout(
                client,
                env=ToolAgent(steps=3, tokens=12),
                model=model_dir,
                engines=engine(model_dir),
                samples=3,
                out=tmp_path / "run.zarr",
            )
            async with rollout:
                batch = await rollout.run(4)
                assert batch.counts == {"completed": 12}
                engines = vllm_processes()
                assert len(engines) >= 2, "API server and engine core"
                nanny = psutil.Process(made.workers["rollout-0"]._process.program_pid)
                (worker,) = [c for c in nanny.children() if "resource_tracker" not in " ".join(c.cmdline())]
                kill(worker.pid)
                await until(lambda: not any(p.is_running() and p.status() != "zombie" for p in engines))

    run(body(), hang_s=400)
    records = list(RunReader(tmp_path / "run.zarr"))
    assert len(records) == 12
    check_against_engine(records, seen_path)
    lines = control_lines(tmp_path / "run.zarr")
    assert list(replay(Controller(build_strategies(DEFAULT_PRESET)), lines)) == []


@pytest.mark.parametrize("env", ["math", "code", "search"])
def test_the_shipped_agent_uses_its_tools_and_solves_tasks(
    env: str, vllm_session: Callable[[str], Batch]
) -> None:
    batch = vllm_session(env)
    assert batch.counts.get("completed", 0) >= 12, batch.counts
    assert all(record.reward is not None for record in batch)
    assert sum(record.reward for record in batch) >= 6, "the tiny agent solves a good share of easy tasks"
    assert sum(len(record.actions) for record in batch) >= 16
    assert {a.status for record in batch for a in record.actions} == {"ok"}
    lengths = {len(record.steps) for record in batch}
    assert len(lengths) > 1 or env == "code", "trajectories vary in length"


@pytest.fixture(scope="module")
def vllm_session(model_dir: str) -> Iterator[Callable[[str], Batch]]:
    """Runs environments one after another on one cluster whose engine stays."""
    with (
        LocalRolloutCluster(1, tool_cpus=8, dashboard=False) as made,
        Client(made) as client,
        Rollout(
            client,
            env=ToolAgent(steps=1),
            model=model_dir,
            engines=engine(model_dir),
            budget=Budget(max_step_tokens=512),
        ) as rollout,
    ):

        def roll(env: str) -> Batch:
            rollout.environment = load_environment(env)
            batch: Batch = rollout.run(16)
            return batch

        yield roll
