"""The whole path with real vLLM: agents, tools in the sandbox, records equal to what the engine saw."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client
from worlds.known_agents import EVERY, known_agent
from worlds.live_agents import RecordingWorker, ToolAgent
from worlds.live_world import check_against_engine, control_lines, kill, lives, run, until, worker_process
from worlds.tcp_door import tcp_door

from heddle_dask.apis.remote_model import RemoteModel
from heddle_dask.apis.rewarded import JudgeReward, rewarded
from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.resources import ApiQuota, QuotaWindow
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Context, Reward, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.loading import load_environment
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.batch import Batch
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.session import open_session
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import DEFAULT_PRESET, build_strategies

pytestmark = [pytest.mark.cluster, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


KEY = "sk-secret-of-this-test"
QUOTA = ApiQuota("judge", windows=(QuotaWindow(400, 2.0, "tokens"),))


def engine_socket() -> str:
    words = next(words for words in (p.cmdline() for p in vllm_processes()) if "--uds" in words)
    return words[words.index("--uds") + 1]


def vllm_processes() -> list[psutil.Process]:
    marks = ("vllm.entrypoints", "VLLM::")
    return [p for p in psutil.Process().children(recursive=True) if any(m in " ".join(p.cmdline()) for m in marks)]


class Session:
    """One cluster whose only engine stays, for environment after environment; what the engine saw is written down."""

    def __init__(self, model: str, folder: Path) -> None:
        self.seen, self.out = folder / "seen.jsonl", folder / "run.zarr"
        with contextlib.ExitStack() as stack:
            patched = stack.enter_context(pytest.MonkeyPatch.context())
            patched.setenv("JUDGE_KEY", KEY)
            port = stack.enter_context(tcp_door(engine_socket))
            judge = RemoteModel("judge", f"http://127.0.0.1:{port}/v1", model, "JUDGE_KEY")
            patched.setattr(open_session, "RolloutWorker", lambda spec, watch: RecordingWorker(spec, str(self.seen)))
            self.cluster = stack.enter_context(LocalRolloutCluster(1, tool_cpus=8, dashboard=False))
            self.rollout = stack.enter_context(
                Rollout(
                    stack.enter_context(Client(self.cluster)),
                    env=ToolAgent(steps=1),
                    model=model,
                    engines=EngineSpec("vllm", model, slots=4, max_model_len=2048, dtype="float32"),
                    budget=Budget(max_step_tokens=512),
                    pools=Pools(services=[judge], quotas=[QUOTA]),
                    out=self.out,
                )
            )
            self._stack = stack.pop_all()

    def roll(self, env: Any, count: int) -> Batch:
        self.rollout.environment = env
        batch: Batch = self.rollout.run(count)
        return batch

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def vllm_session(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    session = Session(model_dir, tmp_path_factory.mktemp("vllm"))
    yield session
    session.close()


@pytest.mark.parametrize("env", ["math", "code", "search"])
def test_the_shipped_agent_uses_its_tools_and_solves_tasks(env: str, vllm_session: Session) -> None:
    batch = vllm_session.roll(load_environment(env), 16)
    assert batch.counts.get("completed", 0) >= 12, batch.counts
    assert all(record.reward is not None for record in batch)
    assert sum(record.reward for record in batch) >= 6, "the tiny agent solves a good share of easy tasks"
    assert sum(len(record.actions) for record in batch) >= 16
    assert {a.status for record in batch for a in record.actions} == {"ok"}
    lengths = {len(record.steps) for record in batch}
    assert len(lengths) > 1 or env == "code", "trajectories vary in length"


async def says_nothing(task: Task, ctx: Context) -> None:
    return None


def test_an_engine_of_vllm_judges_as_a_remote_model_within_its_quota_of_tokens(vllm_session: Session) -> None:
    judged = rewarded(
        FunctionEnvironment(says_nothing, name="silent"), JudgeReward("judge", "{question}", read=len, max_tokens=64)
    )
    vllm_session.rollout.environment = judged
    batch = vllm_session.rollout.run([*["What is 2+3?"] * 12, "hello"])
    *right, cut = batch
    assert len({record.reward for record in right}) == 1 and (right[0].reward or 0.0) > 20
    assert cut.reward is None and cut.reward_cause == "raised" and "its reply was cut" in cut.reward_detail
    actions = [action for record in batch for action in record.actions]
    assert {(action.label, action.status) for action in actions} == {("judge:judge", "ok")}
    assert max(action.quota_s for action in actions) > 0
    lines = control_lines(vllm_session.out)
    used = [event[9] for event, _ in lines if event[0] == "ActionFinished" and event[9] is not None]
    assert len(used) == 13 and all(20 < tokens < 120 for tokens in used)
    stored = [path for path in vllm_session.out.parent.rglob("*") if path.is_file()]
    assert stored and not any(KEY.encode() in path.read_bytes() for path in stored)


class KnownAgents:
    """One task for each of the agents of other projects."""

    name = "known-agents"

    def __init__(self) -> None:
        self.agents = [known_agent(name, limit_s=60.0) for name in EVERY]

    def tasks(self, count: int, seed: int) -> list[Task]:
        (task,) = self.agents[0].tasks(1, seed)
        return [replace(task, task_id=name) for name in EVERY[:count]]

    async def solve(self, task: Task, ctx: Context) -> float | Reward | None:
        return await self.agents[EVERY.index(task.task_id)].solve(task, ctx)


def test_agents_of_other_projects_end_with_a_reward_or_a_cause(vllm_session: Session) -> None:
    """The shipped model has not learned their prompts, and some are longer than its context."""
    batch = vllm_session.roll(KnownAgents(), len(EVERY))
    assert len(batch) == len(EVERY)
    rows = [json.loads(line) for line in vllm_session.seen.read_text().splitlines()]
    for record in batch:
        said = (record.status, record.cause, record.detail, record.metadata)
        assert record.reward in (0.0, 1.0) or record.cause, said
        asked = record.metadata["gateway"]
        assert asked["requests"] > 0 and (record.steps or " context_length" in record.detail), said
        # What the engine has sampled is in the record, and nothing else.
        sampled = sorted(row["sampled"] for row in rows if row["trajectory"] == record.trajectory_id)
        stored = [record.branches[step.branch].token_ids[step.token_start : step.token_stop] for step in record.steps]
        assert sampled == sorted(ids.tolist() for ids in stored), said
    assert {record.task_id: len(record.steps) for record in batch}["openai-agents"] > 0


def test_records_equal_what_vllm_saw_and_a_killed_worker_leaves_no_engine(vllm_session: Session) -> None:
    """The last test of the session."""
    batch = vllm_session.roll(ToolAgent(steps=3, tokens=12), 12)
    assert batch.counts == {"completed": 12}
    engines = vllm_processes()
    assert len(engines) >= 2, "API server and engine core"
    kill(worker_process("rollout-0").pid)
    run(until(lambda: not any(map(lives, engines))))
    vllm_session.close()
    records = [record for record in RunReader(vllm_session.out) if record.environment == ToolAgent.name]
    assert len(records) == 12
    check_against_engine(records, vllm_session.seen)
    lines = control_lines(vllm_session.out)
    assert list(replay(Controller(build_strategies(DEFAULT_PRESET)), lines)) == []
