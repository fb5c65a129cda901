"""Rewards after the end of a program, on a real cluster: overlap, failures, groups, resumption, an adaptive pool."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from worlds.live_world import control_lines, emulated, run, until
from worlds.shared_cluster import shared_cluster

from benchmarks.actions.api_server import api_server
from heddle_dask.apis.rewarded import HttpReward, rewarded
from heddle_dask.core.resources import ApiQuota
from heddle_dask.environments.base import Context, Reward, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.rewards import RewardContext, Transcript
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.reader import RunReader

pytestmark = pytest.mark.cluster
# Workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


async def _wait_for(path: str) -> float:
    """A reward that takes until a file is there."""
    while not Path(path).exists():
        await asyncio.sleep(0.01)
    return 1.0


def _length(task: Task, transcript: Transcript) -> Reward:
    return Reward(len(transcript.replies), parts={"chars": len(transcript.text)}, metadata={"by": "length"})


def _raises(task: Task, transcript: Transcript) -> float:
    raise ValueError("no such answer")


class Steps(FunctionEnvironment):
    """One LLM step for each task; subclasses have rewards."""

    def __init__(self) -> None:
        super().__init__(self.attempt, name="steps")
        self.solved: list[str] = []

    async def attempt(self, task: Task, ctx: Context) -> None:
        self.solved.append(task.task_id)
        ctx.metadata["solved"] = True
        ctx.append("user", "hello")
        await ctx.generate(max_tokens=4, ignore_eos=True)


class SlowFirst(Steps):
    """The reward of the first task waits for the end of the last program."""

    def __init__(self, flag: Path, tasks: int) -> None:
        super().__init__()
        self.flag, self.count = flag, tasks

    async def attempt(self, task: Task, ctx: Context) -> None:
        await super().attempt(task, ctx)
        if len(self.solved) == self.count:
            self.flag.touch()

    async def reward(self, task: Task, transcript: Transcript, ctx: RewardContext) -> float:
        assert transcript.metadata == {"solved": True} and len(transcript.replies) == 1
        return float(await ctx.call(_wait_for, str(self.flag), label="wait"))


class Ranked(Steps):
    """Rewards by the place in the group; the second group fails."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[tuple[str, int]] = []
        self.failed = False

    async def attempt(self, task: Task, ctx: Context) -> None:
        await super().attempt(task, ctx)
        if task.task_id.endswith("0") and not self.failed:
            self.failed = True
            raise RuntimeError("one attempt at the first task fails")

    async def group_reward(self, task: Task, transcripts: Sequence[Transcript], ctx: RewardContext) -> list[float]:
        self.groups.append((task.task_id, len(transcripts)))
        if task.task_id.endswith("1"):
            raise LookupError("no ranking")
        return [float(await ctx.call(max, each.sample_index, 0)) for each in transcripts]


def _rollout(client: Any, model: str, env: Any, out: Path | None = None, **more: Any) -> Rollout:
    resume = more.pop("resume", False)
    output = None if out is None else Output(out, mode="resume" if resume else "create")
    return Rollout(client, env=env, model=model, engines=emulated(model), out=output, **more)


def test_rewards_follow_their_programs_and_hold_nobody_up(model_dir: str, tmp_path: Path) -> None:
    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            await _overlap(client, model_dir, tmp_path)
            await _given_and_failed(client, model_dir, tmp_path)
            await _endpoint(client, model_dir)
            await _groups(client, model_dir)
            await _resumed(client, model_dir, tmp_path)

    run(body())


async def _overlap(client: Any, model: str, tmp_path: Path) -> None:
    """With one admission place, a reward that waits for the last program would never end if it held the place."""
    env, out = SlowFirst(tmp_path / "last program has ended", 4), tmp_path / "overlap.zarr"
    strategy = _one_at_a_time()
    async with _rollout(client, model, env, out, strategy=strategy) as rollout:
        batch = await rollout.run(4)
    records = list(batch)
    assert [record.reward for record in records] == [1.0] * 4
    assert {action.kind for record in records for action in record.actions} == {"reward"}
    kinds = [event[0] for event, _ in control_lines(out)]
    assert kinds.index("ProgramEnded") < kinds.index("TrajectoryEnded")
    assert kinds.count("ProgramEnded") == 4


def _one_at_a_time() -> Any:
    from heddle_dask.strategies.presets import Strategy

    return Strategy("sticky-least-loaded", overrides=("admission=at-most,alive=1",))


async def _given_and_failed(client: Any, model: str, tmp_path: Path) -> None:
    async with _rollout(client, model, rewarded(Steps(), _length)) as rollout:
        (record,) = list(await rollout.run(1))
    assert record.reward == 1.0 and record.reward_parts["chars"] > 0
    assert record.metadata == {"solved": True, "by": "length"} and record.reward_cause == ""

    out = tmp_path / "failed.zarr"
    async with _rollout(client, model, rewarded(Steps(), _raises), out) as rollout:
        await rollout.run(1)
    (record,) = RunReader(out)
    assert record.reward is None and record.status == "completed", "unknown, and never 0"
    assert record.reward_cause == "raised" and "ValueError: no such answer" in record.reward_detail
    assert record.metadata == {"solved": True}


async def _endpoint(client: Any, model: str) -> None:
    quota = ApiQuota("judge", 1, backoff_s=0.01)
    async with api_server(quota, answers=lambda number: (503, "") if number == 0 else (200, "")) as server:
        env = rewarded(Steps(), HttpReward(server.url, api="judge"))
        async with _rollout(client, model, env, pools=Pools(quotas=[quota])) as rollout:
            records = list(await rollout.run(2))
        assert [record.reward for record in records] == [0.5, 0.5]
        assert sorted(server.statuses) == [200, 200, 503]


async def _groups(client: Any, model: str) -> None:
    env = Ranked()
    async with _rollout(client, model, env, samples=2) as rollout:
        records = sorted(await rollout.run(2), key=lambda each: each.trajectory_id)
    assert sorted(env.groups) == [(records[0].task_id, 1), (records[2].task_id, 2)]
    assert sorted(record.status for record in records[:2]) == ["completed", "failed"]
    good = next(record for record in records[:2] if record.status == "completed")
    assert good.reward == float(good.sample_index)
    assert [record.reward for record in records[2:]] == [None, None]
    assert {record.reward_cause for record in records[2:]} == {"hook"}
    assert "LookupError: no ranking" in records[2].reward_detail


class Stuck(Steps):
    """A reward that does not come in the first session."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag, self.asked = flag, 0

    async def reward(self, task: Task, transcript: Transcript, ctx: RewardContext) -> float:
        self.asked += 1
        return float(await ctx.call(_wait_for, str(self.flag)))


async def _resumed(client: Any, model: str, tmp_path: Path) -> None:
    """A run that ends between a program and its reward: only the reward is computed again."""
    out, flag = tmp_path / "resumed.zarr", tmp_path / "reward may come"
    first, second = Stuck(flag), Stuck(flag)
    async with _rollout(client, model, first, out) as rollout:
        running = asyncio.ensure_future(rollout.run(2))
        await until(lambda: first.asked == 2)
        rollout.interrupt(to_resume=True)
        await running
    assert len(RunReader(out)) == 0
    sampled = _steps_finished(out)
    assert sampled == 2
    flag.touch()
    async with _rollout(client, model, second, out, resume=True) as rollout:
        await rollout.run(2)
    assert second.asked == 2 and _steps_finished(out) == sampled, "no step was sampled again"
    assert [record.reward for record in RunReader(out)] == [1.0, 1.0]


def _steps_finished(out: Path) -> int:
    return sum(event[0] == "StepFinished" for event, _ in control_lines(out))
