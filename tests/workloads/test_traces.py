"""Trace files: real ones are read whole, wrong ones are named by file, line and field."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.workloads.traces import TracedStep, read_traces

STEP = {"gen_tokens": 5, "obs_tokens": 7, "tool": "bash", "tool_s": 0.5, "in_tokens": 11, "human": 1}
GOOD = {"id": "a", "group": "g", "prompt_tokens": 11, "complete": True, "success": None}
GOOD["steps"] = [STEP, {"gen_tokens": 1, "obs_tokens": None, "tool": None, "tool_s": None}]


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_fields_are_read(tmp_path: Path) -> None:
    (trace,) = read_traces(written(tmp_path, GOOD))
    assert (trace.trajectory_id, trace.group_id, trace.prompt_tokens) == ("a", "g", 11)
    assert (trace.complete, trace.success) == (True, None)
    assert trace.steps == (
        TracedStep(5, 7, 11, "bash", 0.5, None, True),
        TracedStep(1, None, None, None, None, None, False),
    )


def test_facts_of_the_task_are_read(tmp_path: Path) -> None:
    told = {"source": "tau", "domain": "airline", "kind": "main", "model": "m", "agent": "react"}
    limits = {"user_tokens": 4, "max_turns": 10}
    cached = {**GOOD, "steps": [{**STEP, "cached_tokens": 5}]}
    one, other, nothing = read_traces(written(tmp_path, {**GOOD, **told, **limits}, cached, GOOD))
    assert (one.domain, one.policy) == ("tau/airline/main", "m/react")
    assert (one.message_tokens, one.max_steps) == (4, 10)
    # What was not cached of the first prompt is what no earlier request had in front of it.
    assert (other.message_tokens, other.max_steps) == (6, 0)
    assert (nothing.domain, nothing.policy, nothing.message_tokens, nothing.max_steps) == ("", "", 0, 0)


def test_gzip_is_read_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(f"\n{json.dumps(GOOD)}\n\n".encode()))
    assert len(list(read_traces(path))) == 1


@pytest.mark.parametrize(
    ("file", "count", "steps"),
    [
        ("claude_code_transcripts", 1866, 19206),
        ("claude_code_proxy", 4872, 42721),
        ("tau_dialogues", 1570, 19187),
        ("intercode", 16409, 90811),
    ],
)
def test_real_files_are_read_whole(file: str, count: int, steps: int) -> None:
    traces = list(read_traces(file))
    assert (len(traces), sum(len(trace.steps) for trace in traces)) == (count, steps)


def test_a_log_of_single_requests_is_no_trace(tmp_path: Path) -> None:
    path = written(tmp_path, {"t_s": 0.0, "in": 4808, "out": 10})
    with pytest.raises(BadInput, match=r"t\.jsonl.*line 1: field 'steps' is missing"):
        list(read_traces(path))


@pytest.mark.parametrize("field", ["id", "group", "prompt_tokens", "complete", "steps"])
def test_missing_field_is_named_with_its_line(tmp_path: Path, field: str) -> None:
    bad = {key: value for key, value in GOOD.items() if key != field}
    with pytest.raises(BadInput, match=rf"t\.jsonl', line 2: field '{field}' is missing"):
        list(read_traces(written(tmp_path, GOOD, bad)))


@pytest.mark.parametrize("field", ["gen_tokens", "obs_tokens", "tool", "tool_s"])
def test_missing_step_field_is_named(tmp_path: Path, field: str) -> None:
    bad: Any = copy.deepcopy(GOOD)
    del bad["steps"][1][field]
    with pytest.raises(BadInput, match=rf"line 1, step 2: field '{field}' is missing"):
        list(read_traces(written(tmp_path, bad)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("gen_tokens", 1.5), ("gen_tokens", -1), ("obs_tokens", "3"), ("tool_s", True), ("tool", 3)],
)
def test_wrong_types_are_named(tmp_path: Path, field: str, value: Any) -> None:
    bad: Any = copy.deepcopy(GOOD)
    bad["steps"][0][field] = value
    with pytest.raises(BadInput, match=f"line 1, step 1: field '{field}' is"):
        list(read_traces(written(tmp_path, bad)))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "line 1: not JSON"), (b"[]\n", "not a JSON object"), (b"\xff\n", "cannot be read")],
)
def test_files_that_are_no_json_lines_are_bad_input(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match=message):
        list(read_traces(tmp_path / "x.jsonl"))


def test_absent_torn_and_wrong_gzip_files_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        list(read_traces(tmp_path / "none.jsonl"))
    whole = gzip.compress((json.dumps(GOOD) + "\n").encode() * 500)
    for name, content in {"torn": whole[:-20], "wrong": b"no gzip"}.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(content)
        with pytest.raises(BadInput, match="cannot be read"):
            list(read_traces(path))
