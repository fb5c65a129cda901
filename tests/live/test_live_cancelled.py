"""Programs that stop waiting: for a step, for a tool, for two steps at once. Other trajectories are not affected."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from worlds.live_world import control_lines, emulated, run, until
from worlds.shared_cluster import shared_cluster

from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import replay
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.driver.batch import Batch
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import strategies_of_run

pytestmark = [pytest.mark.cluster]


class Impatient:
    """The first trajectory is `solve_first`, the others take one short step and one short tool."""

    name = "impatient"

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [Task(f"t{i}", f"Task {i}") for i in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float | None:
        ctx.append("user", task.prompt)
        if task.task_id == "t0":
            return await self.solve_first(ctx)
        await ctx.generate(max_tokens=5, ignore_eos=True)
        await ctx.call(time.sleep, 0.01)
        return 1.0

    async def solve_first(self, ctx: Context) -> float | None:
        raise NotImplementedError


def roll(agent: Impatient, model: str, count: int = 4, out: Path | None = None, slots: int = 1) -> Batch:
    async def body() -> Batch:
        async with shared_cluster(engines=1) as client:
            spec = emulated(model, seconds_per_token=0.01, slots=slots)
            rollout = Rollout(client, env=agent, model=model, engines=spec, out=out)
            return await rollout.run(count)

    batch: Batch = run(body(), 100)
    assert len(batch) == count
    return batch


class GivesUpSteps(Impatient):
    """Its first step would take ten seconds."""

    async def solve_first(self, ctx: Context) -> float | None:
        before = ctx.context_tokens
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await ctx.generate(max_tokens=1000, ignore_eos=True)
        assert ctx.context_tokens == before
        ctx.append("user", "Shorter, please.")
        await ctx.generate(max_tokens=8, ignore_eos=True)
        await ctx.generate(max_tokens=4, ignore_eos=True)
        return 0.5


@pytest.mark.parametrize("slots", [1, 4])
def test_a_step_that_its_program_gives_up_frees_the_engine_and_the_next_one_runs(
    slots: int, model_dir: str, tmp_path: Path
) -> None:
    out = tmp_path / "run.zarr"
    batch = roll(GivesUpSteps(), model_dir, out=out, slots=slots)
    assert batch.counts == {"completed": 4}
    (first,) = (record for record in batch if record.task_id == "t0")
    assert [step.token_stop - step.token_start for step in first.steps] == [8, 4]
    assert int(first.branches[0].loss_mask.sum()) == 12, "nothing of what was given up is trained on"
    lines = control_lines(out)
    cancelled = [event for event, _ in lines if event[0] == "StepCancelled"]
    assert [event[2:] for event in cancelled] == [[["t0/0", 0, 0]], [["t0/0", 0, 1]]]
    assert list(replay(Controller(strategies_of_run(RunReader(out).metadata)), lines)) == []


class TwoAtOnce(Impatient):
    async def solve_first(self, ctx: Context) -> float | None:
        await asyncio.gather(ctx.generate(max_tokens=5), ctx.generate(max_tokens=5))
        return 1.0


def test_two_steps_at_once_fail_their_trajectory_and_no_other(model_dir: str) -> None:
    batch = roll(TwoAtOnce(), model_dir)
    assert batch.counts == {"failed": 1, "completed": 3}
    (first,) = (record for record in batch if record.task_id == "t0")
    assert "await one step after the other" in first.detail


def runs_an_hour(begun: str) -> None:
    Path(begun).touch()
    time.sleep(3600)


class GivesUpTools(Impatient):
    """Its second call asks for all CPUs while others have them; its third one has them, and would take an hour."""

    def __init__(self, begun: Path) -> None:
        self.begun = begun

    async def solve_first(self, ctx: Context) -> float | None:
        holding = asyncio.ensure_future(ctx.call(time.sleep, 1.0, cpus=(8, 8)))
        await asyncio.sleep(0.2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ctx.call(time.sleep, 0.01, cpus=(8, 8)), 0.2)
        await holding
        running = asyncio.ensure_future(ctx.call(runs_an_hour, str(self.begun), cpus=(8, 8)))
        await until(self.begun.exists)
        running.cancel()
        await ctx.call(time.sleep, 0.01, cpus=(8, 8))
        return 1.0


def test_tools_that_their_program_gives_up_are_dropped_or_killed(model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    batch = roll(GivesUpTools(tmp_path / "begun"), model_dir, out=out)
    assert batch.counts == {"completed": 4}
    (first,) = (record for record in batch if record.task_id == "t0")
    assert [action.status for action in first.actions].count("ok") == 2
    kinds = Counter(line[0] for event, commands in control_lines(out) for line in (event, *commands))
    assert (kinds["ActionRequested"], kinds["ActionCancelled"]) == (7, 2)
    assert (kinds["RunAction"], kinds["AbortAction"], kinds["ActionFinished"]) == (6, 1, 6), "one never ran"
    assert list(replay(Controller(strategies_of_run(RunReader(out).metadata)), control_lines(out))) == []


def test_details_say_what_went_wrong(model_dir: str) -> None:
    """A program that leaves by its own timeout is a failed trajectory, and the engine is free for the others."""

    class Leaves(Impatient):
        async def solve_first(self, ctx: Context) -> float | None:
            async with asyncio.timeout(0.2):
                await ctx.generate(max_tokens=1000, ignore_eos=True)
            return 1.0

    batch = roll(Leaves(), model_dir)
    assert batch.counts == {"failed": 1, "completed": 3}
    cause: Any = next(record for record in batch if record.task_id == "t0")
    assert "TimeoutError" in cause.detail
