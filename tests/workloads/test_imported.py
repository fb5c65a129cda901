"""Logs of others become traces: lengths as the logs count them, histories joined, and what is no log is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from worlds.record_builders import plain_trajectory

from heddle_dask.cli.main import heddle
from heddle_dask.core.errors import BadInput
from heddle_dask.records.reader import RunReader
from heddle_dask.records.store import RunStore
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.exports.trajectories import export_trajectories
from heddle_dask.workloads.imported.log_files import logged_trajectories
from heddle_dask.workloads.traces import TracedTrajectory, read_traces


def imported(tmp_path: Path, *sources: Path) -> list[TracedTrajectory]:
    out = tmp_path / "trace.jsonl.gz"
    outcome = CliRunner().invoke(heddle, ["import", *map(str, sources), str(out), "--json"])
    assert outcome.exit_code == 0, outcome.output
    found = list(read_traces(out))
    assert json.loads(outcome.stdout)["trajectories"] == len(found)
    return found


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def with_a_branch(record: TrajectoryRecord) -> TrajectoryRecord:
    """It goes on once more from the end of its second step."""
    second = record.steps[1]
    branch = record.branches[0].shared(second.token_stop)
    branch.append_sampled([1, 2, 3], [-0.5] * 3, 0)
    stop = len(branch)
    step = replace(second, step_index=3, branch=1, token_start=stop - 3, token_stop=stop, generated_tokens=3)
    step = replace(step, prompt_tokens=stop - 3)
    return replace(record, branches=(record.branches[0], branch), steps=(*record.steps, step))


def test_an_exported_run_keeps_its_lengths(tmp_path: Path) -> None:
    records = [plain_trajectory(0), with_a_branch(plain_trajectory(1, steps=3, tokens=7))]
    with RunStore.create(tmp_path / "run.zarr", {"model": "m"}) as store:
        store.append(records)
    export_trajectories(RunReader(tmp_path / "run.zarr"), tmp_path / "atif", "atif", lambda ids: "x" * len(ids))
    found = {one.trajectory_id: one for one in imported(tmp_path, tmp_path / "atif")}
    assert set(found) == {"t0", "t1", "t1#1"}
    for record in records:
        trace = found[record.trajectory_id]
        main = [step for step in record.steps if step.branch == 0]
        assert trace.prompt_tokens == main[0].prompt_tokens
        assert [step.generated_tokens for step in trace.steps] == [step.generated_tokens for step in main]
        grown = [after.token_start - before.token_stop for before, after in itertools.pairwise(main)]
        assert [step.observation_tokens for step in trace.steps[:-1]] == grown
        assert [step.tool_s for step in trace.steps[:-1]] == [0.75] * (len(main) - 1)
        assert (trace.success, trace.complete) == (record.reward == 1.0, True)
    assert [step.generated_tokens for step in found["t1#1"].steps] == [3]
    assert found["t1#1"].group_id == found["t1"].group_id


CALL = {"id": "c", "type": "function", "function": {"name": "grep", "arguments": "{}"}}


def test_requests_that_go_on_with_an_earlier_one_are_one_trajectory(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "q" * 40}]
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    following = [*question, answer, {"role": "tool", "tool_call_id": "c", "content": "r" * 80}]

    def request(messages: Any, message: Any, prompt: int, completion: int) -> dict[str, Any]:
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": 8},
        }
        response = {"choices": [{"message": message}], "usage": usage, "model": "gpt"}
        return {"request": {"messages": messages, "model": "gpt"}, "response": response, "llm_s": 1.5}

    done = {"role": "assistant", "content": "done"}
    log = lines(
        tmp_path / "log.jsonl",
        request(question, answer, 20, 12),
        request(question, done, 20, 3),  # another attempt at the same task
        request(following, done, 50, 4),
    )
    first, second = imported(tmp_path, log)
    assert [(s.generated_tokens, s.observation_tokens, s.tool) for s in first.steps] == [(12, 18, "grep"), (4, 0, None)]
    assert (first.prompt_tokens, first.steps[0].llm_s, first.policy) == (20, 1.5, "gpt")
    assert first.group_id == second.group_id and len(second.steps) == 1


def test_conversations_without_usage_are_counted_by_characters(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "s" * 40},
        {"role": "user", "content": [{"type": "text", "text": "u" * 39}]},
        {"role": "assistant", "content": "a" * 20},
        {"role": "user", "content": "b" * 8},
        {"role": "assistant", "content": "c" * 4},
    ]
    (trace,) = imported(tmp_path, lines(tmp_path / "chats.jsonl", {"id": "x", "messages": chat}))
    assert (trace.trajectory_id, trace.prompt_tokens) == ("x", 20)
    assert [(s.generated_tokens, s.observation_tokens, s.human) for s in trace.steps] == [(5, 2, True), (1, 0, False)]


def atif(**changes: Any) -> dict[str, Any]:
    steps = [
        {"step_id": 1, "source": "user", "message": "hello"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "",
            "timestamp": "2026-01-01T00:00:00Z",
            "tool_calls": [{"tool_call_id": "c", "function_name": "bash", "arguments": {}}],
            "observation": {"results": [{"content": "ok"}]},
            "metrics": {"prompt_tokens": 100, "completion_tokens": 10},
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "bye",
            "timestamp": "2026-01-01T00:00:05Z",
            "metrics": {"prompt_tokens": 60, "completion_tokens": 10},
        },
    ]
    return {"schema_version": "ATIF-v1.6", "agent": {"name": "a", "version": "1"}, "steps": steps, **changes}


def test_trials_of_harbor_are_told_apart_and_a_cut_history_is_no_negative_length(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
        (tmp_path / "jobs" / name / "trajectory.json").write_text(json.dumps(atif()))
        (tmp_path / "jobs" / name / "result.json").write_text("{}")
    first, second = imported(tmp_path, tmp_path / "jobs")
    assert (first.trajectory_id, second.trajectory_id) == ("one/trajectory", "two/trajectory")
    (call, _) = first.steps
    assert (call.tool, call.tool_s, call.observation_tokens) == ("bash", 5.0, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"messages": []}', "line 1: it has no messages"),
        ('{"messages": [1]}', "messages 1 is 1, not a JSON object"),
        ('{"schema_version": "ATIF-v1.8", "steps": 3}', "field 'steps' is 3, not a list"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no trajectory"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput, match=message):
        list(logged_trajectories([path]))


def test_an_import_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(atif()))
    imported(tmp_path, path)
    trace = str(tmp_path / "trace.jsonl.gz")
    asked = ["simulate", "--workload", trace, "--cluster", "hopper64", "--strategy", "sticky-forecast", "--seeds", "1"]
    outcome = CliRunner().invoke(heddle, [*asked, "--trajectories", "8", "--samples", "1", "--json"])
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads(outcome.stdout.splitlines()[-1])["rows"]
    assert (row["trajectories"], row["tokens"]) == (8, 8 * 20)
