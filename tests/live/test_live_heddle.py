"""Predictions, preemption and moves on a live cluster: what they do, that they lose nothing, that they replay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds.live_agents import RecordingWorker, ToolAgent, echo_tool
from worlds.live_world import (
    check_against_engine,
    control_lines,
    emulated,
    engine_process,
    kill,
    run,
    until,
)
from worlds.shared_cluster import shared_cluster

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.journal_codec import decode, replay
from heddle_dask.engines.emulated.options import emulated_options
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.driver.batch import Batch
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.live.driver.options import Engines, Patience
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.session import open_session
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import Strategy, strategies_of_run

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
FOR_ALL = Patience(others_s=600.0)  # a run would begin with the first engine that answers


class UnevenAgent:
    """Trajectories of 2 to 6 steps; every third samples four times as much, and comes last: it has to overtake."""

    name = "uneven-agent"

    def __init__(self, tokens: int, tool_s: float = 0.2) -> None:
        self.tokens = tokens
        self.tool_s = tool_s

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [
            Task(f"t{i}", "Prompt. " * 4, known_tokens=self._steps(i) * self._step_tokens(i))
            for i in sorted(range(count), key=lambda i: (i % 3 == 0, i))
        ]

    def _steps(self, number: int) -> int:
        return 2 + number % 5

    def _step_tokens(self, number: int) -> int:
        return self.tokens * (4 if number % 3 == 0 else 1)

    async def solve(self, task: Task, ctx: Context) -> float | None:
        number = int(task.task_id.removeprefix("t"))
        ctx.append("user", task.prompt)
        for step in range(self._steps(number)):
            await ctx.generate(max_tokens=self._step_tokens(number), temperature=0.0, ignore_eos=True)
            ctx.append("tool", await ctx.call(echo_tool, f"{number} {step}", self.tool_s))
        return 1.0


def roll(
    spec: EngineSpec,
    strategy: str,
    overrides: Sequence[str],
    out: Path | None,
    agents: Sequence[tuple[Any, int]],
    degrees: Sequence[int] = (),
    enough: Callable[[Sequence[Batch]], bool] = lambda batches: False,
) -> list[Batch]:
    """One batch of each agent, with so many tasks, on the same engines; ends early where these are enough."""

    async def body() -> list[Batch]:
        batches: list[Batch] = []
        async with shared_cluster(sum(degrees) or 2) as client:
            rollout = Rollout(
                client,
                env=agents[0][0],
                model=spec.model,
                engines=Engines(spec=spec, count=sum(degrees) or 2, tp_degrees=degrees or None, patience=FOR_ALL),
                strategy=Strategy(strategy, overrides),
                seed=3,
                out=out,
            )
            async with rollout:
                for agent, count in agents:
                    rollout.environment = agent
                    batches.append(await rollout.run(count))
                    assert [record.detail for record in batches[-1] if record.status != "completed"] == []
                    assert len(batches[-1]) == count
                    if enough(batches):
                        break
        return batches

    batches: list[Batch] = run(body(), 500)
    return batches


BUSY = ("predictor=oracle", "preemption=hysteresis,ratio=1.0,margin_tokens=1,least_wait_tokens=0")


def roll_until_it_acts(
    spec: EngineSpec, agent: Any, count: int, out: Path, degrees: Sequence[int] = (), *, preempts: bool = True
) -> Batch:
    """A batch with at least one move, and one preemption if it `preempts`: whether they come depends on timing."""

    def acted(batches: Sequence[Batch]) -> bool:
        *before, last = (started_moves(batch) for batch in batches)
        preempted = any(step.preemptions for record in batches[-1] for step in record.steps)
        return last > max(before, default=0) and (preempted or not preempts)

    batches = roll(spec, "heddle-paper", BUSY, out, [(agent, count)] * 3, degrees, acted)
    assert acted(batches), f"nothing was moved or preempted in three batches: {batches[-1].moves}"
    return batches[-1]


def started_moves(batch: Batch) -> int:
    """Those of this batch and of the ones before it on the same engines."""
    return sum(int(totals["started"]) for totals in batch.moves.values())


def kinds(lines: list[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for event, commands in lines:
        for row in (event, *commands):
            found[row[0]] = found.get(row[0], 0) + 1
    return found


@pytest.mark.parametrize("strategy", ["heddle", "heddle-paper"])
def test_heddle_loses_nothing_and_its_journal_replays(
    strategy: str, model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_path, out = tmp_path / "seen.jsonl", tmp_path / "run.zarr"
    monkeypatch.setattr(open_session, "RolloutWorker", lambda spec, watch: RecordingWorker(spec, str(seen_path)))
    spec = emulated(model_dir, seconds_per_token=0.005, slots=2, kv_transfer=True)
    (batch,) = roll(spec, strategy, (), out, [(ToolAgent(steps=4, tokens=15), 20)])
    check_against_engine(list(batch), seen_path)
    lines = control_lines(out)
    submitted = [event[2] for event, _ in lines if event[0] == "TrajectorySubmitted"]
    told = {record.trajectory_id: (record.domain, record.message_tokens, record.max_steps) for record in batch}
    assert {spec[0]: (spec[3], *spec[5:7]) for spec in submitted} == told
    assert told["t2/0"] == ("tool-agent/size 3", submitted[2][4], 4)
    found = kinds(lines)
    # At the start, at the end of every step, and when its tool is called.
    calls = found["ActionRequested"]
    assert 20 + 3 * 20 + calls <= found["PredictRemaining"] <= 20 + 4 * 20 + calls
    assert found["PredictionMade"] >= 60
    assert list(replay(Controller(strategies_of_run(RunReader(out).metadata)), lines)) == []


def test_preempted_steps_keep_their_tokens_and_moves_their_contexts(model_dir: str, tmp_path: Path) -> None:
    spec = emulated(model_dir, seconds_per_token=0.005, slots=2, kv_transfer=True)
    agent = UnevenAgent(tokens=25)
    (plain,) = roll(spec, "sticky-least-loaded", (), None, [(agent, 18)])
    busy = roll_until_it_acts(spec, agent, 18, tmp_path / "run.zarr")
    found = kinds(control_lines(tmp_path / "run.zarr"))
    assert found["AbortStep"] > 0
    assert batch_tokens(busy) == batch_tokens(plain)
    assert started_moves(busy) == found["MoveContext"]


def moves_under_way(lines: Sequence[Any]) -> list[cmd.MoveContext]:
    """Those that were ordered and of which nothing more was heard."""
    moving: dict[str, cmd.MoveContext] = {}
    for line in lines:
        event, commands = decode(line[0]), [decode(row) for row in line[1]]
        if isinstance(event, ev.MoveEnded):
            moving.pop(event.trajectory_id, None)
        moving.update((c.trajectory_id, c) for c in commands if isinstance(c, cmd.MoveContext))
    return list(moving.values())


@pytest.mark.parametrize("end", ["source", "target"])
def test_an_engine_that_is_killed_while_contexts_move_costs_no_trajectory(
    end: str, model_dir: str, tmp_path: Path
) -> None:
    """A transfer takes seconds here, so that the engine dies in the middle of one."""
    out = tmp_path / "run.zarr"
    spec = emulated(model_dir, seconds_per_token=0.005, slots=2, kv_transfer=True)
    agent = UnevenAgent(tokens=25)
    (plain,) = roll(spec, "sticky-least-loaded", (), None, [(agent, 12)])
    options = replace(emulated_options(spec.options), emulation={"transfer_fixed_s": 4.0})
    slow = replace(spec, options=options)

    async def body() -> tuple[Batch, cmd.MoveContext]:
        async with shared_cluster() as client:
            chosen: dict[str, Any] = {"strategy": Strategy("heddle-paper", BUSY), "seed": 3, "out": out}
            async with Rollout(
                client, env=agent, model=slow.model, engines=Engines(spec=slow, count=2), **chosen
            ) as rollout:
                batch = asyncio.create_task(rollout.run(12))
                move = (await until(lambda: journal_path(out).exists() and moves_under_way(control_lines(out))))[0]
                # Its worker's name opens an engine's.
                victim = move.source_engine_id if end == "source" else move.target_engine_id
                kill(engine_process(next(n for n in ("rollout-0", "rollout-1") if n in victim)).pid)
                return await batch, move

    busy, move = run(body(), 300)
    assert [record.detail for record in busy if record.status != "completed"] == []
    assert batch_tokens(busy) == batch_tokens(plain)
    lines = control_lines(out)
    events = [decode(event) for event, _ in lines]
    ended = [e for e in events if isinstance(e, ev.MoveEnded) and e.trajectory_id == move.trajectory_id]
    lost = [e for e in events if isinstance(e, ev.EngineLost)]
    assert lost[0].engine_id == (move.source_engine_id if end == "source" else move.target_engine_id)
    assert ended and not ended[0].ok and ended[0].cause
    assert list(replay(Controller(strategies_of_run(RunReader(out).metadata)), lines)) == []


def batch_tokens(batch: Batch) -> dict[str, list[int]]:
    """The tokens of each task's trajectory."""
    return {record.task_id: record.branches[0].token_ids.tolist() for record in batch}


LONG_STEPS = (UnevenAgent(tokens=40, tool_s=0.5), 12)
# Two ranks on CPUs busy-wait for each other in every layer: beside other processes a token takes some ten milliseconds.
SHORT_STEPS = (UnevenAgent(tokens=8, tool_s=0.1), 6)


@pytest.fixture(scope="module")
def plain_vllm(model_dir: str) -> list[Batch]:
    """What one vLLM engine says when nothing is preempted or moved; float32 and temperature 0."""
    spec = EngineSpec("vllm", model_dir, slots=2, max_model_len=2048, dtype="float32")
    return roll(spec, "sticky-least-loaded", (), None, [LONG_STEPS, SHORT_STEPS], degrees=(1,))


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
def test_greedy_vllm_output_is_the_same_with_preemptions_and_moves(
    plain_vllm: list[Batch], model_dir: str, tmp_path: Path
) -> None:
    """Real vLLM: stopping, continuing and moving with the KV cache change no token."""
    spec = EngineSpec("vllm", model_dir, slots=2, max_model_len=2048, dtype="float32", kv_transfer=True)
    busy = roll_until_it_acts(spec, *LONG_STEPS, tmp_path / "run.zarr")
    totals = busy.moves["transfer"]
    assert totals["started"] > totals["failed"]
    assert batch_tokens(busy) == batch_tokens(plain_vllm[0])


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
def test_contexts_move_between_vllm_engines_of_unlike_degrees(
    plain_vllm: list[Batch], model_dir: str, tmp_path: Path
) -> None:
    """At TP 2 and TP 1, KV caches are split differently: contexts are recomputed, though both can transfer KV."""
    spec = EngineSpec("vllm", model_dir, slots=2, max_model_len=2048, dtype="float32", kv_transfer=True)
    busy = roll_until_it_acts(spec, *SHORT_STEPS, tmp_path / "run.zarr", degrees=(2, 1), preempts=False)
    assert set(busy.moves) == {"recompute"}
    totals = busy.moves["recompute"]
    assert totals["started"] > totals["failed"]
    assert batch_tokens(busy) == batch_tokens(plain_vllm[1])


def test_a_predictor_file_that_cannot_be_read_is_the_users_to_mend(model_dir: str, tmp_path: Path) -> None:
    absent = tmp_path / "absent.json.gz"
    damaged = tmp_path / "damaged.json.gz"
    damaged.write_bytes(b"no predictor")

    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            for path in (absent, damaged):
                rollout = Rollout(
                    client,
                    env=ToolAgent(),
                    model=model_dir,
                    engines=emulated(model_dir),
                    strategy=Strategy("heddle", [f"predictor=xgboost,warm={path}"]),
                )
                with pytest.raises(BadInput, match=path.name) as raised:
                    await rollout.run(2)
                assert "\n" not in str(raised.value)

    run(body())
