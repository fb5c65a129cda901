"""Replay: exactly the trace's tokens and seconds, fitted into any context by clipping what was read."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Reply, Task
from heddle_dask.environments.replay import (
    ReplayEnvironment,
    wait_like_tool,
)
from heddle_dask.workloads.planned import PromptDoesNotFit, is_replayable, planned_trace
from heddle_dask.workloads.traces import TracedStep, TracedTrajectory, read_traces


class RecordingContext:
    """Remembers what the agent program asked for; samples nothing real."""

    seed = 1
    done = False

    def __init__(self, max_context_tokens: int = 10_000) -> None:
        self.max_context_tokens = max_context_tokens
        self.context: list[int] = []
        self.log: list[Any] = []

    @property
    def context_tokens(self) -> int:
        return len(self.context)

    def append(self, role: str, text: str) -> None:
        raise AssertionError("a replay appends token ids only")

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        self.context += token_ids
        self.log.append(("append", len(token_ids)))

    async def generate(self, *, max_tokens: int, ignore_eos: bool, **_: Any) -> Reply:
        assert ignore_eos
        self.context += [0] * max_tokens
        assert len(self.context) <= self.max_context_tokens
        self.log.append(("generate", max_tokens))
        return Reply("", (0,) * max_tokens, (0.0,) * max_tokens, "length")

    async def call(
        self,
        function: Callable[..., Any],
        seconds: float,
        *,
        cpus: tuple[int, int],
        label: str,
        timeout_s: float,
    ) -> None:
        assert function is wait_like_tool
        assert timeout_s == float("inf"), "a recorded tool takes as long as it took"
        assert cpus == (0, 0), "waiting takes no CPU"
        self.log.append(("tool", label, seconds))


def line(name: str, group: str, prompt: int | None, *steps: Sequence[Any]) -> str:
    keys = ("gen_tokens", "obs_tokens", "tool", "tool_s", "human")
    body = [dict(zip(keys, step, strict=False)) for step in steps]
    data = {"id": name, "group": group, "prompt_tokens": prompt, "complete": True, "steps": body}
    return json.dumps(data) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    path.write_text(
        line("a", "g", 10, (5, 20, "bash", 1.5), (6, 30, "user", 900.0, 1), (7, None, None, None))
        + line("b", "g", 10, (4, 3, "sql", None), (2, 0, "sql", 9.0))
        + line("unknown", "h", 10, (None, 3, "sql", 1.0))
        + line("unread", "h", 10, (1, None, "sql", 1.0), (1, 0, None, None))
    )
    return path


def replayed(environment: ReplayEnvironment, name: str, context: RecordingContext) -> list[Any]:
    reward = asyncio.run(environment.solve(Task(name, ""), context))  # type: ignore[arg-type]
    assert reward is None
    return context.log


def test_steps_and_tools_follow_the_trace(path: Path) -> None:
    assert replayed(ReplayEnvironment(path), "a", RecordingContext()) == [
        ("append", 10),
        ("generate", 5),
        ("tool", "bash", 1.5),
        ("append", 20),
        ("generate", 6),
        ("tool", "user", 0.0),
        ("append", 30),
        ("generate", 7),
    ]


def test_unknown_tool_time_is_zero_and_the_last_tool_is_not_run(path: Path) -> None:
    log = replayed(ReplayEnvironment(path), "b", RecordingContext())
    assert log[1:] == [("generate", 4), ("tool", "sql", 0.0), ("append", 3), ("generate", 2)]


def test_scales_apply(path: Path) -> None:
    environment = ReplayEnvironment(path, token_scale=0.1, tool_scale=2.0)
    log = replayed(environment, "a", RecordingContext())
    assert log[:5] == [
        ("append", 1),
        ("generate", 1),
        ("tool", "bash", 3.0),
        ("append", 2),
        ("generate", 1),
    ]


def test_a_group_shares_its_prompt_and_nothing_else(path: Path) -> None:
    first, second, again = (RecordingContext() for _ in range(3))
    environment = ReplayEnvironment(path)
    replayed(environment, "a", first)
    replayed(environment, "b", second)
    replayed(ReplayEnvironment(path), "a", again)
    assert first.context[:10] == second.context[:10]
    assert first.context[15:18] != second.context[14:17]
    assert first.context == again.context
    assert all(33 <= token <= 126 for token in first.context[:10])


def test_a_replay_ends_where_its_context_is_full_and_is_counted(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    environment = ReplayEnvironment(path)
    context = RecordingContext(max_context_tokens=40)
    log = replayed(environment, "a", context)
    assert log[:4] == replayed(ReplayEnvironment(path), "a", RecordingContext())[:4]
    assert log[4:] == [("generate", 5)]
    assert len(context.context) == 40
    assert (environment.cut_trajectories, environment.cut_tokens) == (1, 78 - 40)
    assert "ends 38 tokens early, at the end of a context of 40" in caplog.text


def test_a_prompt_that_fills_the_context_is_an_error(path: Path) -> None:
    with pytest.raises(PromptDoesNotFit, match="a prompt of 10 tokens fills a context of 10"):
        replayed(ReplayEnvironment(path), "a", RecordingContext(max_context_tokens=10))


def test_unknown_token_counts_leave_a_trajectory_out(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environment = ReplayEnvironment(path)
    assert environment.skipped == 2
    assert "left out 2 trajectories" in caplog.text
    assert {task.task_id for task in environment.tasks(2, seed=0)} == {"a", "b"}


def test_a_task_knows_what_its_replay_will_generate_and_wait_for(path: Path) -> None:
    traces = [trace for trace in read_traces(path) if is_replayable(trace)]
    environment = ReplayEnvironment(path, token_scale=0.5, tool_scale=0.1)
    tasks = {task.task_id: task for task in environment.tasks(len(traces), seed=0)}
    for trace in traces:
        plan = planned_trace(trace, domain="d", token_scale=0.5, tool_scale=0.1, max_context_tokens=10**6)
        task = tasks[trace.trajectory_id]
        assert task.known_tokens == plan.generated_tokens
        assert task.known_tools_s == pytest.approx(plan.tools_s)
    assert any(task.known_tools_s > 0 for task in tasks.values())


def test_tasks_depend_on_the_seed_alone() -> None:
    path = "tau_dialogues"
    environment = ReplayEnvironment(path)
    first = [task.task_id for task in environment.tasks(20, seed=1)]
    assert first == [task.task_id for task in ReplayEnvironment(path).tasks(20, seed=1)]
    assert first != [task.task_id for task in environment.tasks(20, seed=2)]
    assert len(set(first)) == 20
    assert all(task.payload["group"] for task in environment.tasks(20, seed=1))
    assert environment.name == "replay:tau_dialogues.jsonl.gz"


def test_too_many_tasks_and_wrong_scales_are_bad_input(path: Path) -> None:
    with pytest.raises(BadInput, match=r"3 tasks asked .* has 2 trajectories"):
        ReplayEnvironment(path).tasks(3, seed=0)
    with pytest.raises(BadInput, match="token scale 0: must be greater than 0"):
        ReplayEnvironment(path, token_scale=0)
    with pytest.raises(BadInput, match="tool scale -1"):
        ReplayEnvironment(path, tool_scale=-1)


def test_file_without_known_tokens_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(line("a", "g", None, (1, 1, None, None)))
    with pytest.raises(BadInput, match="no trajectory with known token counts"):
        ReplayEnvironment(tmp_path / "x.jsonl")


counts = st.integers(0, 3000)


@given(
    st.integers(0, 2000),
    st.lists(st.tuples(counts, counts), min_size=1, max_size=8),
    st.sampled_from([0.01, 0.5, 1.0, 3.0]),
    st.integers(1, 20_000),
)
def test_what_comes_before_the_end_of_the_context_does_not_depend_on_it(
    prompt: int, pairs: list[tuple[int, int]], scale: float, room: int
) -> None:
    steps = tuple(TracedStep(g, o, None, "t", 1.0, None, False) for g, o in pairs)
    trace = TracedTrajectory("t", "g", prompt, True, None, steps)
    scaled = {"domain": "d", "token_scale": scale, "tool_scale": 1.0}
    whole = planned_trace(trace, max_context_tokens=1 << 62, **scaled)
    longest = max(1, round(prompt * scale)) + room
    cut = planned_trace(trace, max_context_tokens=longest, **scaled)
    assert cut.prompt_tokens == whole.prompt_tokens
    if whole.context_tokens <= longest:
        assert cut == whole
        return
    assert cut.context_tokens == longest
    # The last step, or the observation before it, is cut; all before is as recorded.
    same = max(0, len(cut.steps) - 2)
    assert cut.steps[:same] == whole.steps[:same]
    for ours, theirs in zip(cut.steps, whole.steps, strict=False):
        assert 0 < ours.generated_tokens <= theirs.generated_tokens
        assert ours.observation_tokens <= theirs.observation_tokens
