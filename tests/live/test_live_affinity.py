"""Classes of hardware on a live cluster: where domains run, and prefill and decode on different engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from worlds.live_agents import echo_tool
from worlds.live_world import control_lines, emulated, run
from worlds.shared_cluster import shared_cluster

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId
from heddle_dask.core.journal_codec import decode, replay
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Context, Environment, Task
from heddle_dask.environments.mix import MixedEnvironment
from heddle_dask.live.driver.batch import Batch
from heddle_dask.live.driver.options import Engines, Patience
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import Strategy, strategies_of_run

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SPLIT = "affinity=prefill-decode,prefill=H800,decode=H20,priced=False,least_tokens=8"
FOR_ALL = Patience(others_s=600.0)  # a run would begin with the first engine that answers


class TwoDomains:
    """Trajectories of three steps with observations; tasks of two domains in turn."""

    def __init__(self, name: str = "agent") -> None:
        self.name = name

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [Task(f"t{i}", "Prompt. " * 6, domain=("math", "game")[i % 2]) for i in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float | None:
        ctx.append("user", task.prompt)
        for step in range(3):
            await ctx.generate(max_tokens=12, temperature=0.0, ignore_eos=True)
            ctx.append("tool", await ctx.call(echo_tool, f"{task.task_id} {step} " * 8, 0.01))
        return 1.0


def roll(
    spec: EngineSpec, overrides: Sequence[str], out: Path | None, count: int = 8, env: Environment | None = None
) -> Batch:
    async def body() -> Batch:
        async with shared_cluster(hardware={"H800": 1, "H20": 1}) as client:
            rollout = Rollout(
                client,
                env=env or TwoDomains(),
                model=spec.model,
                engines=Engines(spec=spec, count=2, patience=FOR_ALL),
                strategy=Strategy("sticky-least-loaded", overrides),
                seed=3,
                out=out,
            )
            played: Batch = await rollout.run(count)
            return played

    batch: Batch = run(body(), 500)
    assert [record.detail for record in batch if record.status != "completed"] == []
    return batch


def tokens_of(batch: Batch) -> dict[str, list[int]]:
    return {record.trajectory_id: record.branches[0].token_ids.tolist() for record in batch}


def check_separated(plain: Batch, split: Batch, out: Path) -> None:
    """Every prompt was computed on one engine and went on on the other, with its KV cache and the same tokens."""
    assert tokens_of(split) == tokens_of(plain)
    lines = control_lines(out)
    events = [decode(event) for event, _ in lines]
    commands = [decode(row) for _, rows in lines for row in rows]
    hardware = {e.engine.engine_id: e.engine.hardware for e in events if isinstance(e, ev.EngineJoined)}
    starts = [c for c in commands if isinstance(c, cmd.StartStep)]
    assert {hardware[c.engine_id] for c in starts if c.prefill_only} == {"H800"}
    assert {hardware[c.engine_id] for c in starts if not c.prefill_only} == {"H20"}
    first = [c for c in starts if c.step_id.attempt == 0]
    assert all(c.prefill_only for c in first if c.step_id.step_index == 0)
    moves = split.moves["transfer"]
    assert moves["started"] > moves["failed"] and moves["started"] == sum(c.prefill_only for c in starts)
    assert list(replay(Controller(strategies_of_run(RunReader(out).metadata)), lines)) == []


def test_domains_run_on_their_class_and_the_run_stores_it(model_dir: str, tmp_path: Path) -> None:
    """In a mix: by the name of a part, or by a kind of tasks of any part."""
    out = tmp_path / "run.zarr"
    spec = emulated(model_dir, seconds_per_token=0.001, slots=16, kv_transfer=True)
    mix = MixedEnvironment([(TwoDomains("agent:hard"), 1.0), (TwoDomains("other"), 1.0)])
    batch = roll(spec, ["affinity=map,agent/math=H20,other=H20,default=H800"], out, env=mix)
    events = [decode(event) for event, _ in control_lines(out)]
    hardware = {e.engine.engine_id: e.engine.hardware for e in events if isinstance(e, ev.EngineJoined)}
    ran = {(record.domain, hardware[EngineId(step.engine_id)]) for record in batch for step in record.steps}
    by_domain = {"agent:hard/math": "H20", "agent:hard/game": "H800", "other/math": "H20", "other/game": "H20"}
    assert ran == set(by_domain.items())
    assert RunReader(out).metadata["hardware"] == {"H800": 1, "H20": 1}
    with pytest.raises(BadInput, match="hardware 'H100', which no engine has; classes: H20, H800"):
        roll(spec, ["affinity=map,default=H100"], None)
    with pytest.raises(BadInput, match="names 'agents', of which there is no task; the names are agent, agent/game"):
        roll(spec, ["affinity=map,agents=H20"], None)


def test_prefill_and_decode_on_different_engines_change_no_token(model_dir: str, tmp_path: Path) -> None:
    spec = emulated(model_dir, seconds_per_token=0.001, slots=8, kv_transfer=True)
    plain = roll(spec, [], None)
    check_separated(plain, roll(spec, [SPLIT], tmp_path / "run.zarr"), tmp_path / "run.zarr")


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
def test_greedy_vllm_output_is_the_same_with_prefill_elsewhere(model_dir: str, tmp_path: Path) -> None:
    spec = EngineSpec("vllm", model_dir, slots=4, max_model_len=2048, dtype="float32", kv_transfer=True)
    plain = roll(spec, [], None, count=4)
    check_separated(plain, roll(spec, [SPLIT], tmp_path / "run.zarr", count=4), tmp_path / "run.zarr")
