"""Recorded trajectories drawn again: groups stay whole, steps stay as recorded, any number comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.workloads.bootstrap import bootstrap, file_domain
from heddle_dask.workloads.planned import PlannedStep, is_replayable, planned_trace
from heddle_dask.workloads.recorded import RECORDED
from heddle_dask.workloads.traces import read_traces

FIT = {"token_scale": 1.0, "tool_scale": 1.0, "max_context_tokens": 10**6}


def trace(name: str, group: str, generated: int = 5, observed: int | None = 7) -> dict[str, Any]:
    """A trajectory of two steps; a test of 0.5 s lies between them."""
    first = {"gen_tokens": generated, "obs_tokens": observed, "tool": "test", "tool_s": 0.5}
    last = {"gen_tokens": 3, "obs_tokens": None, "tool": None, "tool_s": None}
    return {
        "id": name,
        "group": group,
        "prompt_tokens": 11,
        "complete": True,
        "success": None,
        "steps": [first, last],
    }


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "small.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Groups of 3, 1 and 2, with their lines mixed."""
    return written(
        tmp_path,
        trace("a0", "a", 10),
        trace("b0", "b", 20),
        trace("a1", "a", 11),
        trace("c0", "c", 30),
        trace("a2", "a", 12),
        trace("c1", "c", 31),
    )


def test_whole_groups_come_and_every_one_has_fresh_ids(small: Path) -> None:
    planned = bootstrap(small, trajectories=500, seed=0, max_context_tokens=1000)
    assert len(planned) == 500 == len({one.trajectory_id for one in planned})
    groups: dict[str, list[Any]] = {}
    for one in planned:
        groups.setdefault(one.group_id, []).append(one)
    sizes = {"a": 3, "b": 1, "c": 2}
    *whole, _ = groups.items()  # the last may be cut short
    for group_id, members in whole:
        name, number = group_id.split("~")
        assert [one.trajectory_id for one in members] == [f"{name}{i}~{number}" for i in range(sizes[name])]
        assert [one.sample_index for one in members] == list(range(sizes[name]))
    assert [group_id.split("~")[1] for group_id in groups] == [str(i) for i in range(len(groups))]
    drawn = Counter(group_id[0] for group_id in groups)
    assert min(drawn[name] for name in "abc") > 50, "every group is as likely as another"


def test_steps_are_the_recorded_ones(small: Path) -> None:
    recorded = {one.trajectory_id: one for one in read_traces(small)}
    for one in bootstrap(small, trajectories=40, seed=1, token_scale=2.0, tool_scale=3.0, max_context_tokens=1000):
        source = recorded[one.trajectory_id.split("~")[0]]
        assert one.steps == (
            PlannedStep(2 * source.steps[0].generated_tokens, 14, "test", 1.5),  # type: ignore[operator]
            PlannedStep(6, 0, None, 0.0),
        )
        assert (one.prompt_tokens, one.domain) == (22, "small")


def test_a_seed_decides_and_more_trajectories_change_nothing(small: Path) -> None:
    def names(trajectories: int, seed: int) -> list[str]:
        planned = bootstrap(small, trajectories=trajectories, seed=seed, max_context_tokens=1000)
        return [one.trajectory_id for one in planned]

    assert names(30, 0) == names(200, 0)[:30]
    assert names(30, 0) != names(30, 1)


def test_the_same_under_every_hash_seed(small: Path) -> None:
    program = (
        "import sys; from heddle_dask.workloads.bootstrap import bootstrap\n"
        "print(bootstrap(sys.argv[1], trajectories=50, seed=2, max_context_tokens=999))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program, str(small)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            timeout=120,
            check=True,
        ).stdout
        for hash_seed in ("0", "4294967295")
    ]
    assert outputs[0] == outputs[1]


def test_a_trajectory_ends_where_its_context_is_full(small: Path) -> None:
    fitted = bootstrap(small, trajectories=20, seed=0, max_context_tokens=40)
    scales = {"token_scale": 1.0, "tool_scale": 1.0}
    whole = bootstrap(small, trajectories=20, seed=0, max_context_tokens=10**6, **scales)
    cut = [one.context_tokens < other.context_tokens for one, other in zip(fitted, whole, strict=True)]
    assert any(cut) and not all(cut)
    for one, other in zip(fitted, whole, strict=True):
        assert one.context_tokens == min(40, other.context_tokens)
        assert one.prompt_tokens == other.prompt_tokens


def test_unknown_token_counts_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, trace("a0", "a", observed=None), trace("a1", "a"))
    planned = bootstrap(path, trajectories=2, seed=0, max_context_tokens=100)
    assert [(one.trajectory_id, one.sample_index) for one in planned] == [("a1~0", 0), ("a1~1", 0)]


def test_bad_files_and_counts(tmp_path: Path, small: Path) -> None:
    def message(path: Path, trajectories: int = 1, context: int = 100) -> str:
        with pytest.raises(BadInput) as error:
            bootstrap(path, trajectories=trajectories, seed=0, max_context_tokens=context)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "0 trajectories asked, give 1 or more" in message(small, trajectories=0)
    assert "a prompt of 11 tokens fills a context of 11; use a smaller token_scale" in message(small, context=11)
    assert "id 'a0' comes twice" in message(written(tmp_path, trace("a0", "a"), trace("a0", "b")))
    assert "no trajectory with known token counts" in message(written(tmp_path, trace("a0", "a", observed=None)))
    assert "no trajectory with known token counts" in message(written(tmp_path))
    assert "No such file" in message(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(("name", "domain"), [("x/a.b.jsonl.gz", "a.b"), ("a.jsonl", "a"), ("a.gz", "a"), ("a", "a")])
def test_the_domain_is_the_file_name_without_endings(name: str, domain: str) -> None:
    assert file_domain(name) == domain


@pytest.mark.parametrize("name", RECORDED)
def test_real_traces_give_any_number(name: str) -> None:
    plans = {
        one.trajectory_id: planned_trace(one, domain="d", **FIT) for one in read_traces(name) if is_replayable(one)
    }
    planned = bootstrap(name, trajectories=20_000, seed=0, **FIT)
    assert len(planned) == 20_000 == len({one.trajectory_id for one in planned})
    for one in planned:
        plan = plans[one.trajectory_id.rsplit("~", 1)[0]]
        assert (one.prompt_tokens, one.steps) == (plan.prompt_tokens, plan.steps)
    # Every trajectory is as likely as it is in the file: the mean length is the file's.
    recorded = [sum(step.generated_tokens for step in plan.steps) for plan in plans.values()]
    drawn = [one.generated_tokens for one in planned]
    assert sum(drawn) / len(drawn) == pytest.approx(sum(recorded) / len(recorded), rel=0.15)
