"""The command line without a cluster: parsing, configuration, bad input, what is shown of a stored run."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from worlds.core_builders import Stage
from worlds.record_builders import plain_trajectory

from heddle_dask.cli.cluster_choice import LocalShape
from heddle_dask.cli.doctor import checks
from heddle_dask.cli.engine_option import chosen_model, shipped_model
from heddle_dask.cli.main import heddle
from heddle_dask.cli.rollout.summary import Tally
from heddle_dask.cli.shared_options import whole_numbers
from heddle_dask.cli.stored_run import StoredRun, remove_if_empty
from heddle_dask.core.errors import BadInput
from heddle_dask.core.journal_codec import gap
from heddle_dask.cost.measured import MeasuredTable
from heddle_dask.engines.gpus import InstalledGpu
from heddle_dask.engines.vllm_command import VllmOptions
from heddle_dask.environments.loading import load_environment
from heddle_dask.live.driver.files.continuation import task_list
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.live.driver.inputs.loaded_model import tokenizer_digest
from heddle_dask.live.driver.inputs.rollout_inputs import tasks_of
from heddle_dask.live.driver.options import Budget, Sampling
from heddle_dask.live.driver.runs.progress import Meter, ProgressDisplay, Snapshot, duration
from heddle_dask.records.journal import Journal
from heddle_dask.records.store import RunStore
from heddle_dask.records.trajectory import (
    TRAJECTORY_FINISHED,
    ActionRecord,
    TrajectoryRecord,
    trajectory_to_body,
)

JSON_KEYS = [
    *("trajectories", "completed", "truncated", "aborted", "failed", "lost", "steps", "actions", "tokens"),
    *("makespan_s", "tokens_per_s", "reward_mean", "preemptions", "migrations", "bound_s", "bound_share"),
    *("out", "causes", "mix"),
]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(heddle, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """The one line that refuses these arguments."""
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def config(text: str) -> Path:
    path = Path("heddle.toml")
    path.write_text(text)
    return path


def stored(path: str, *records: TrajectoryRecord, **metadata: object) -> Path:
    with RunStore.create(path, {"environment": "math", "seed": 0, "samples": 1, **metadata}) as store:
        store.append(records)
    return Path(path)


def named(name: str) -> TrajectoryRecord:
    return replace(plain_trajectory(0), trajectory_id=name)


def timed(name: str, start: float, steps: list[tuple[float, float]], run: float = 0.0) -> TrajectoryRecord:
    """Steps as (end, seconds on the engine), then one action of `run` seconds."""
    record = named(name)
    some = record.steps[0]
    made = [
        replace(some, step_index=i, submitted_s=start, finished_s=end, prefill_s=0.0, decode_s=seconds)
        for i, (end, seconds) in enumerate(steps)
    ]
    end_s = steps[-1][0] + run
    action = ActionRecord(0, 0, "tool", "python", 2, "ok", steps[-1][0], end_s, 0.0, run)
    return replace(record, steps=tuple(made), actions=(action,), started_s=start, finished_s=end_s)


# -- parsing ---------------------------------------------------------------------------------------


def test_unknown_command_is_refused_with_a_close_match():
    line = refused("rolout")
    assert "rolout" in line and "rollout" in line and "doctor" in line


def test_unknown_option_is_refused_with_a_close_match_and_what_is_allowed():
    line = refused("rollout", "--task", "3")
    assert "--tasks" in line and "--strategy" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--samples", 0], "--samples"),
        (["--tasks", "many"], "many"),
        (["--tasks"], "--tasks"),
        (["--engine", "sglang"], "emulated"),
        (["--top-p", 1.5], "--top-p"),
        (["stray"], "stray"),
        (["--env", "nope"], "package.module:function"),
        (["--env", "math:medium"], "easy"),
        (["--env", "no_such_module:solve"], "no_such_module"),
        (["--env", "replay:missing.jsonl"], "missing.jsonl"),
        (["--strategy", "best"], "sticky-least-loaded"),
        (["--set", "placement=best"], "round-robin"),
        (["--set", "speed=high"], "placement"),
        (["--set", "admission=at-most,alife=3"], "alife"),
        (["--env", "math", "--token-scale", 2], "token_scale"),
        (["--append"], "--out"),
        (["--append", "--overwrite", "--out", "x.zarr"], "exclude"),
        (["--resume", "--out", "x.zarr"], "x.zarr"),
        (["--scheduler", "tcp://127.0.0.1:9", "--cluster", "c.toml"], "exclude"),
        (["--cluster", "missing.toml"], "missing.toml"),
        (["--model", "no/such/dir"], "no/such/dir"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--tp", "3,x"], "whole numbers"),
        (["--engines", 2, "--tp", "2,2"], "--engines 4"),
        (["--gpu-memory-utilization", 0.9], "--gpu-memory-utilization is an option of vLLM engines"),
        (["--gpu-memory-utilization", 1.5], "1.5"),
        (["--quantization", "fp8"], "--quantization is an option of vLLM engines, not of emulated ones"),
        (["--logprobs", "raw_logprobs"], "processed"),
        (["--logprobs", "raw"], "--logprobs is an option of vLLM engines"),
        (["--engine-arg", "enforce-eager"], "--engine-arg is an option of vLLM engines"),
        (["--engine", "vllm", "--engine-arg", "api-key=sesame"], "--api-key is refused"),
        (["--engine", "vllm", "--engine-arg", "max-num-seqs=4"], "use the engine's slots"),
        (["--engine", "vllm", "--engine-arg", "=4"], "use KEY=VALUE"),
        (["--engine", "vllm", "--quantization", "no method"], "use a name such as 'fp8'"),
        (["--dtype", "int3"], "bfloat16"),
    ],
)
def test_rollout_refuses_in_one_line(arguments, said):
    assert said in refused("rollout", "--engine", "emulated", *arguments)


def test_rollout_refuses_degrees_of_a_real_model_before_a_cluster_starts():
    line = refused("rollout", "--engine", "vllm", "--engines", 4, "--tp", "3,1")
    assert "TP degree 3 does not divide the 4 attention heads" in line


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.json.gz", None, "absent.json.gz"),
        ("other.json.gz", b"no predictor", "other.json.gz"),
        ("old.json.gz", gzip.compress(b'{"format": "heddle predictor", "version": 1}', mtime=0), "version"),
        ("trace.jsonl", b"{}", "line 1"),
    ],
)
def test_rollout_refuses_a_predictor_that_it_cannot_read_before_it_starts_anything(name, content, said):
    if content is not None:
        Path(name).write_bytes(content)
    arguments = ("--engine", "emulated", "--strategy", "heddle", "--set", f"predictor=xgboost,warm={name}")
    assert said in refused("rollout", *arguments)


def test_rollout_refuses_a_table_of_another_model_than_its_real_engines(model_dir):
    table = MeasuredTable.load("tiny-agent-cpu").to_mapping()
    table["shape"]["layers"] += 1
    Path("other.json").write_text(json.dumps(table))
    assert "another model" in refused("rollout", "--model", model_dir, "--cost", "other.json")
    Path("broken.json").write_text("{}")
    assert "broken.json" in refused("rollout", "--engine", "emulated", "--cost", "broken.json")


def test_rollout_refuses_a_model_directory_that_is_no_model():
    Path("empty").mkdir()
    assert "config.json" in refused("rollout", "--model", "empty")
    assert "tokenizer" in refused("rollout", "--engine", "emulated", "--model", "empty")


def test_rollout_refuses_an_out_path_that_exists_and_says_what_to_do():
    stored("x.zarr")
    line = refused("rollout", "--engine", "emulated", "--out", "x.zarr")
    assert "--append" in line and "--overwrite" in line and "--resume" in line


def test_rollout_refuses_an_out_path_that_cannot_be_written():
    Path("file").write_text("")
    assert "not a directory" in refused("rollout", "--engine", "emulated", "--out", "file/x.zarr")
    assert "/proc" in refused("rollout", "--engine", "emulated", "--out", "/proc/x/y.zarr")


def test_rollout_refuses_to_resume_with_other_options(model_dir):
    stored("x.zarr", samples=4, seed=3)
    resume = ("rollout", "--engine", "emulated", "--model", model_dir, "--env", "math", "--resume")
    assert "samples 4, not 2" in refused(*resume, "--out", "x.zarr", "--samples", 2, "--seed", 3)
    assert "seed 3, not 0" in refused(*resume, "--out", "x.zarr", "--samples", 4)


def stored_by_the_command_line(model_dir: str, **changed: object) -> None:
    """A run of `rollout --engine emulated --tasks 2 --samples 1`, without any trajectory."""
    tasks = tasks_of(2, load_environment("math"), 0)
    facts = {
        "model": model_dir,
        "tokenizer": tokenizer_digest(model_dir),
        "engine": {"kind": "emulated"},
        "sampling": asdict(Sampling()),
        "limits": Budget(max_steps=64).replayed,
        "task_list": task_list(tasks),
        "heddle_dask": version("heddle-dask"),
    }
    stored("x.zarr", **{**facts, **changed})


@pytest.mark.parametrize(
    ("options", "changed", "said"),
    [
        (["--tasks", 3], {}, "made with 2 tasks, not 3"),
        (["--seed", 1], {}, "made with seed 0, not 1"),
        (["--temperature", 0.5], {}, "made with sampling "),
        (["--max-steps", 3], {}, "made with limits "),
        (["--env", "code"], {}, "made with environment math, not code"),
        ([], {"heddle_dask": "0.0.1"}, "made with heddle_dask 0.0.1, not "),
        ([], {"task_list": {"count": 2, "digest": "0"}}, "made with 2 other tasks than these 2"),
        ([], {"tokenizer": "0"}, "made with tokenizer 0, not "),
        ([], {"weights": "0"}, "made with other weights than those that are now in "),
        ([], {"engine": {"kind": "vllm"}}, "made with engine vllm, not emulated"),
        ([], {"batch_facts": [{}, {"seed": 7}], "batches": 2}, "made with seed 7, not 0"),
    ],
)
def test_resume_with_anything_else_starts_and_changes_nothing(model_dir, options, changed, said, monkeypatch):
    stored_by_the_command_line(model_dir, **changed)
    monkeypatch.setattr("heddle_dask.cli.rollout.run.RolloutRun.run", None)  # nothing may be started
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    arguments = ("--engine", "emulated", "--model", model_dir, "--tasks", 2, "--samples", 1, *options)
    line = refused("rollout", *arguments, "--out", "x.zarr", "--resume")
    assert said in line and "it can only be resumed with the same" in line
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_resume_of_a_run_that_has_ended_starts_no_cluster(model_dir, monkeypatch):
    stored_by_the_command_line(model_dir)
    tasks = tasks_of(2, load_environment("math"), 0)
    with RunStore.append_to("x.zarr") as store:
        store.append([named(f"{task.task_id}/0") for task in tasks])
    monkeypatch.setattr("heddle_dask.cli.rollout.run.RolloutRun._client", None)  # nothing may be started
    arguments = (
        "--engine",
        "emulated",
        "--model",
        model_dir,
        "--tasks",
        2,
        "--samples",
        1,
        "--out",
        "x.zarr",
    )
    result = invoke("rollout", *arguments, "--resume", "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["trajectories"] == 2
    assert "every trajectory of x.zarr has ended: nothing is left to do" in result.stderr


def test_append_is_refused_before_a_cluster_starts(model_dir, monkeypatch):
    stored_by_the_command_line(model_dir)
    monkeypatch.setattr("heddle_dask.cli.rollout.run.RolloutRun.run", None)
    arguments = ("--engine", "emulated", "--model", model_dir, "--tasks", 3, "--seed", 1, "--out", "x.zarr")
    line = refused("rollout", *arguments, "--temperature", 0.5, "--append")
    assert "made with sampling " in line and line.endswith("it can only be appended to with the same")


def test_rollout_refuses_an_address_that_is_none(model_dir):
    line = refused("rollout", "--engine", "emulated", "--model", model_dir, "--scheduler", "somewhere")
    assert "somewhere" in line and "tcp://" in line


def test_rollout_refuses_a_scheduler_that_does_not_answer(model_dir, monkeypatch):
    monkeypatch.setattr("heddle_dask.cli.rollout.run.CONNECT_TIMEOUT_S", 1.0)
    line = refused("rollout", "--engine", "emulated", "--model", model_dir, "--scheduler", "127.0.0.1:9")
    assert "127.0.0.1:9" in line


# -- configuration ---------------------------------------------------------------------------------


def test_config_with_an_unknown_key_names_it_and_the_allowed_ones():
    line = refused("rollout", "--config", config("max-stepz = 8"))
    assert "max-stepz" in line and "'max-steps'" in line and "temperature" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("samples = 0", "0"),
        ("samples = 1.5", "1.5"),
        ("samples = true", "samples"),
        ("append = 1", "true or false"),
        ("env = ['math']", "env"),
        ("samples = ", "TOML"),
        ("config = 'other.toml'", "config"),
        ("[rollout]\nsamples = 2", "rollout"),
    ],
)
def test_config_values_are_checked_like_options(text, said):
    assert said in refused("rollout", "--config", config(text))


def test_options_win_over_the_config():
    path = config("strategy = 'nope'\nenv = 'nope-too'\nappend = true\nset = ['placement=sticky']")
    assert "'nope-too'" in refused("rollout", "--overwrite", "--out", "x.zarr", "--strategy", "sticky",
                                   "--config", path)  # fmt: skip
    assert "'nope'" in refused("rollout", "--config", path, "--env", "math", "--out", stored("y.zarr"))


def test_cluster_file_is_overlaid_except_by_what_was_given():
    shape = LocalShape(engines=1, slots=16, tool_workers=1, tool_cpus=None)
    path = config("engines = 3\nslots = 4\ntool-cpus = 5")
    assert shape.overlaid(path, frozenset({"slots"})) == LocalShape(3, 16, 1, 5)
    with pytest.raises(BadInput, match=r"'gpus'.*allowed: engines, slots, tool-workers, tool-cpus"):
        shape.overlaid(config("gpus = 3"), frozenset())
    with pytest.raises(BadInput, match="engines is 0"):
        shape.overlaid(config("engines = 0"), frozenset())


# -- the same as `dask heddle`; quick ----------------------------------------------------------------


@pytest.mark.cluster
def test_dask_heddle_answers_like_heddle():
    command = [sys.executable, "-m", "dask", "heddle", "rollout", "--sampels", "3"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr.splitlines() == [refused("rollout", "--sampels", "3")]


def test_help_imports_nothing_heavy():
    heavy = ["distributed", "zarr", "numpy", "transformers", "rich", "aiohttp"]
    code = (
        f"import sys; from heddle_dask.cli.main import heddle; sys.exit(sum(name in sys.modules for name in {heavy}))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert "rollout" in invoke().output and "rollout" in invoke("--help").output


# -- counting --------------------------------------------------------------------------------------


def test_tally_of_nothing_has_every_key_and_no_invented_number():
    result = Tally().result("x.zarr")
    assert list(result) == JSON_KEYS
    assert result["reward_mean"] is None and result["bound_s"] is None and result["tokens_per_s"] is None
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_bound_is_the_longest_trajectory_without_queueing():
    tally = Tally(slots=8, tool_cpus=8)
    tally.add(timed("a", 0.0, [(2.0, 1.0), (5.0, 2.0)], run=0.5))
    tally.add(timed("b", 0.0, [(6.0, 1.0)], run=1.0))
    result = tally.result(None)
    assert result["bound_s"] == pytest.approx(3.5)
    assert result["makespan_s"] == pytest.approx(7.0)
    assert result["bound_share"] == pytest.approx(0.5)


def test_bound_is_work_over_capacity_when_that_is_larger():
    tally = Tally(slots=1, tool_cpus=2)
    for name in "abc":
        tally.add(timed(name, 0.0, [(9.0, 3.0)]))
    assert tally.bound_s == pytest.approx(9.0)
    tally.tool_cpus, tally.slots = 1, 8
    tally.add(timed("d", 0.0, [(1.0, 1.0)], run=7.0))
    assert tally.bound_s == pytest.approx(14.0)  # 7 s on 2 CPUs, one CPU there is


def test_bound_counts_actions_side_by_side_once():
    record = timed("a", 0.0, [(1.0, 1.0)], run=2.0)
    twice = replace(record, actions=(record.actions[0], replace(record.actions[0], action_index=1)))
    tally = Tally(slots=8, tool_cpus=8)
    tally.add(twice)
    assert tally.critical_s == pytest.approx(3.0)


def test_bound_counts_decoding_alone_where_the_engine_queues_before_the_first_token():
    queued = timed("a", 0.0, [(4.0, 1.0)])
    step = replace(queued.steps[0], prefill_s=3.0)
    tally = Tally(slots=1, queued_inside=True)
    tally.add(replace(queued, steps=(step,)))
    told = Tally(slots=1)
    told.add(replace(queued, steps=(step,)))
    assert (tally.bound_s, told.bound_s) == (step.decode_s, 3.0 + step.decode_s)


def test_bound_leaves_out_what_the_engine_does_not_say():
    nan = float("nan")
    tally = Tally()
    tally.add(timed("a", 0.0, [(4.0, nan)]))
    assert tally.bound_s is None
    tally.add(timed("b", 0.0, [(4.0, 1.0)]))
    assert tally.bound_s == pytest.approx(1.0)


def test_times_of_an_earlier_session_are_left_out():
    tally = Tally()
    tally.add(timed("a", 100.0, [(400.0, 1.0)]), timed=False)
    tally.add(timed("b", 0.0, [(4.0, 1.0)]))
    assert tally.trajectories == 2 and tally.makespan_s == pytest.approx(4.0)


# -- progress --------------------------------------------------------------------------------------


def test_meter_tells_rate_and_time_left():
    clock = iter([10.0, 12.0, 20.0, 21.0, 22.0])
    counts: dict[str, object] = {}
    meter = Meter(4, Tally(), lambda: counts, lambda: next(clock))
    assert meter.snapshot().left_s is None
    counts.update(alive=4, finished=0, tokens=100, generating=3, next=1, queued=1, acting=1, actions_waiting=1)
    first = meter.snapshot()
    assert (first.running, first.next, first.queued, first.in_tools) == (2, 1, 1, 2)
    assert first.tokens_per_s == pytest.approx(50.0)
    counts.update(finished=1, tokens=500)
    second = meter.snapshot()
    assert second.left_s == pytest.approx(24.0)  # one in 8 s, three to go
    assert "done 1/4" in second.line() and "24 s left" in second.line()
    counts.update(engines_ready=0, engines_told="next job in 96 s", generating=0)
    assert meter.snapshot().line().endswith("tok/s · no engine; next job in 96 s")
    counts.update(engines_ready=1)
    assert "no engine" not in meter.snapshot().line()


def test_the_progress_line_has_the_reward():
    tally = Tally()
    meter = Meter(4, tally, lambda: {"generating": 20, "next": 4, "finished": 2}, lambda: 1.0)
    assert "reward" not in meter.snapshot().line()
    for number, reward in enumerate((1.0, 0.0)):
        tally.rewards.add(f"g{number % 1}", reward)
    line = meter.snapshot().line()
    assert "16 running, 4 next" in line
    assert "reward 0.500 ± 0.50, solved 50%, 0% of groups without spread" in line


def test_the_progress_line_fits_a_terminal_of_80_columns():
    reward = "reward 0.682 ± 0.47, solved 68%, 50% of groups without spread"
    large = Snapshot(1234, 64000, 512, 96, 3300, 190, 12, 12345.6, 7500.0, reward=reward)
    for width in (63, 69, 120):
        lines = large.lines(width)
        assert max(map(len, lines)) <= width and len(lines) <= 4
        assert " · ".join(lines) == large.line()
    said = io.StringIO()
    ProgressDisplay(Console(file=said, width=80)).show(large)
    shown = said.getvalue().splitlines()
    assert max(map(len, shown)) <= 80 and shown[1].startswith(" " * 11) and "done 1234/64000" in shown[0]


def test_what_two_runs_say_at_the_same_time_is_shown_once():
    said = io.StringIO()
    display = ProgressDisplay(Console(file=said, width=80))
    for text in ("0 of 1 engines ready", "0 of 1 engines ready", "1 of 1", "0 of 1 engines ready"):
        display.message(text)
    assert [line.partition("] ")[2] for line in said.getvalue().splitlines()] == [
        *("0 of 1 engines ready", "1 of 1", "0 of 1 engines ready")
    ]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (190, "3 min 10 s"), (7500, "2 h 05 min")])
def test_duration_is_for_people(seconds, text):
    assert duration(seconds) == text


# -- show ------------------------------------------------------------------------------------------


def test_show_counts_what_only_the_journal_has_and_changes_nothing():
    path = stored("x.zarr", named("a"))
    with Journal.create(journal_path(path)) as journal:
        for name in "ab":
            journal.append(TRAJECTORY_FINISHED, trajectory_to_body(named(name)))
        journal.append("step", {"trajectory_id": "c"})
    with journal_path(path).open("ab") as file:
        file.write(b"torn")
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in Path().rglob("*") if p.is_file()}
    result = invoke("show", path, "--json")
    shown = json.loads(result.stdout.splitlines()[-1])
    assert (shown["trajectories"], shown["stored"], shown["recovered"], shown["unfinished"]) == (2, 1, 1, 1)
    assert shown["dropped_bytes"] == 4 and [key for key in shown if key in JSON_KEYS] == JSON_KEYS
    assert "killed" in result.stderr
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in Path().rglob("*") if p.is_file()}


def test_replay_compares_session_by_session():
    """Two sessions of one run have a controller each; of one whose commands are others the first event is named."""
    stages = [Stage("least-load"), Stage("sticky-least-loaded")]
    for stage in stages:
        stage.join("E1")
        stage.submit("a")
        stage.finish(stage.placed("a"))
    path = Path("run.zarr")
    with Journal.create(journal_path(path)) as journal:
        for stage, strategy in zip(stages, ("least-load", "sticky-least-loaded"), strict=True):
            journal.append("session", {"strategy": strategy, "overrides": [], "seed": 0, "cost": None})
            for line in stage.journal:
                journal.append("control", {"lines": [line]})
    result = invoke("replay", path, "--json")
    told = json.loads(result.stdout.splitlines()[-1])
    assert (result.exit_code, told["same"]) == (0, True)
    assert [row["strategy"] for row in told["sessions"]] == ["least-load", "sticky-least-loaded"]
    assert all(row["events"] >= 4 for row in told["sessions"])

    event, _ = stages[1].journal[-1]
    with Journal.open_append(journal_path(path)) as journal:
        journal.append("session", {"strategy": "least-load", "overrides": [], "seed": 0, "cost": None})
        for line in [*stages[1].journal[:-1], (event, [["GiveUpAction", "x", "never"]])]:
            journal.append("control", {"lines": [line]})
    result = invoke("replay", path)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].endswith(f"other commands at event {len(stages[1].journal)}, {event[0]}")


def test_replay_of_a_journal_that_lacks_events_says_so_and_does_not_diverge():
    stage = Stage("least-load")
    stage.join("E1")
    stage.submit("a")
    stage.finish(stage.placed("a"))
    path = Path("run.zarr")
    with Journal.create(journal_path(path)) as journal:
        journal.append("session", {"strategy": "least-load", "overrides": [], "seed": 0, "cost": None})
        journal.append("control", {"lines": [*stage.journal[:2], gap(1_200)]})
        journal.append("control", {"lines": stage.journal[3:]})
    result = invoke("replay", path, "--json")
    (row,) = json.loads(result.stdout.splitlines()[-1])["sessions"]
    assert result.exit_code == 1
    assert (row["same"], row["missing"], row["event"]) == (False, 1_200, None)
    assert row["events"] == len(stage.journal) - 1
    assert len(result.stderr.splitlines()) == 1
    assert "the same commands up to event 2; 1,200 events are missing there" in result.stderr


def test_replay_without_a_journal_is_refused():
    assert "run.zarr" not in refused("replay", "nowhere.zarr") and "nowhere.journal" in refused(
        "replay", "nowhere.zarr"
    )


def test_show_of_one_trajectory_is_a_transcript(model_dir):
    record = replace(named("a/0"), reward_parts={"format": 0.25}, metadata={"turns": 3})
    path = stored("x.zarr", record, model=model_dir)
    by_id = invoke("show", path, "--trajectory", "a/0", "--json")
    by_index = invoke("show", path, "--trajectory", "0", "--json")
    shown = json.loads(by_id.stdout.splitlines()[-1])
    assert shown == json.loads(by_index.stdout.splitlines()[-1])
    assert shown["trajectory_id"] == "a/0" and shown["steps"] == len(record.steps)
    authors = [passage["author"] for passage in shown["passages"] if passage["author"]]
    assert "policy" in authors and sum(p["tokens"] for p in shown["passages"]) == len(record.branches[0])
    assert "step 0" in by_id.stderr
    assert (shown["reward_parts"], shown["metadata"]) == ({"format": 0.25}, {"turns": 3})
    assert "{'format': 0.25}" in by_id.stderr and "{'turns': 3}" in by_id.stderr


def test_show_of_a_forked_trajectory_tells_the_branches_apart(model_dir):
    record = named("a/0")
    (branch,) = record.branches
    fork = branch.fork(record.steps[0].token_stop).shared()
    start = len(fork)
    fork.append_sampled([65, 66], [-0.5, -0.5], 0)
    step = replace(record.steps[1], branch=1, token_start=start, token_stop=start + 2, generated_tokens=2)
    action = replace(record.actions[1], branch=1, label="in the fork")
    record = replace(
        record,
        branches=(branch, fork),
        steps=(*record.steps, step),
        actions=(*record.actions, replace(action, after_step=0), action),
    )
    path = stored("x.zarr", record, model=model_dir)
    shown = json.loads(invoke("show", path, "--trajectory", "0", "--json").stdout.splitlines()[-1])
    titles = [passage["title"] for passage in shown["passages"]]
    second = titles[titles.index("branch 1") :]
    assert not any("in the fork" in title for title in titles[: titles.index("branch 1")])
    assert second[1].startswith("tool call 1: in the fork"), "before the fork's first step"
    assert second[2] == f"shared with an earlier branch · {start} tokens"
    assert second[3].startswith("step 1 on ") and second[4].startswith("tool call 1: in the fork")
    assert len(second) == 5 and shown["branches"] == 2


def test_show_without_the_model_counts_tokens():
    path = stored("x.zarr", named("a"), model="gone")
    result = invoke("show", path, "--trajectory", "a")
    assert result.exit_code == 0 and "tokens]" in result.stdout


def test_show_counts_failures_by_cause_and_lists_them():
    """Those that only the journal has are counted, too; messages are shown as they are, not as markup."""
    told = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: [red]bad[/]\n'
    failed = [replace(named(name), status="failed", cause="agent", detail=told, reward=None) for name in ("b", "c")]
    late = replace(named("d"), status="truncated", cause="time", detail="it took longer than 1 s")
    path = stored("x.zarr", named("a"), *failed)
    with Journal.create(journal_path(path)) as journal:
        journal.append(TRAJECTORY_FINISHED, trajectory_to_body(late))
    result = invoke("show", path, "--json")
    assert json.loads(result.stdout.splitlines()[-1])["causes"] == [
        {
            **{"status": "failed", "cause": "agent", "count": 2},
            **{"first_message": "ValueError: [red]bad[/]", "first_trajectory": "b"},
        },
        {
            **{"status": "truncated", "cause": "time", "count": 1},
            **{"first_message": "it took longer than 1 s", "first_trajectory": "d"},
        },
    ]
    assert "failed by agent" in result.stderr and "2, first b: ValueError: [red]bad[/]" in result.stderr

    result = invoke("show", path, "--failed", "--json")
    rows = json.loads(result.stdout.splitlines()[-1])["failed"]
    assert [(row["trajectory_id"], row["status"], row["cause"]) for row in rows] == [
        ("b", "failed", "agent"),
        ("c", "failed", "agent"),
        ("d", "truncated", "time"),
    ]
    assert result.stderr.splitlines()[-1] == "d  truncated  time  it took longer than 1 s"
    assert "exclude" in refused("show", path, "--failed", "--trajectory", "b")


def test_a_run_is_failed_when_nothing_came_of_any_trajectory():
    tally = Tally()
    assert tally.failure is None
    tally.add(replace(named("a"), status="failed", cause="agent", detail="ValueError: x", reward=None))
    assert tally.failure == "all 1 trajectories failed; 1 failed by agent, the first a: ValueError: x"
    tally.add(named("b"))
    assert tally.failure is None


def test_show_gives_no_makespan_of_a_run_that_two_sessions_wrote():
    for sessions, known in ((1, True), (2, False)):
        path = stored(f"{sessions}.zarr", timed("a", 3.0, [(5.0, 1.0)]), sessions=sessions)
        shown = json.loads(invoke("show", path, "--json").stdout.splitlines()[-1])
        assert (shown["makespan_s"] is not None) is known
        assert (re.search(r"makespan +unknown", invoke("show", path).stdout) is None) is known


def test_show_imports_nothing_that_a_stored_run_names():
    Path("trap.py").write_text("from pathlib import Path\nPath('sprung').touch()\n")
    path = stored("x.zarr", named("a"), engine={"kind": "trap:KIND"}, model="trap")
    assert invoke("show", path).exit_code == 0
    assert invoke("show", path, "--trajectory", "a").exit_code == 0
    assert not Path("sprung").exists()


def test_show_refuses_what_is_not_there():
    assert "nope" in refused("show", "nope.zarr")
    Path("dir").mkdir()
    assert "dir" in refused("show", "dir")
    path = stored("x.zarr", named("a"))
    assert "'z'" in refused("show", path, "--trajectory", "z")
    assert "below 1" in refused("show", path, "--trajectory", "1")
    assert "RUN" in refused("show")


# -- leftovers -------------------------------------------------------------------------------------


def test_a_new_run_is_removed_only_when_nothing_has_begun():
    assert not remove_if_empty(Path("none.zarr"))
    full = stored("full.zarr", named("a"))
    assert not remove_if_empty(full) and len(StoredRun(full)) == 1
    begun = stored("begun.zarr")
    with Journal.create(journal_path(begun)) as journal:
        journal.append("step", {"trajectory_id": "c"})
    assert not remove_if_empty(begun) and begun.exists()
    empty = stored("empty.zarr")
    with Journal.create(journal_path(empty)) as journal:
        journal.append("session", {})
    with RunStore.append_to(empty):
        assert not remove_if_empty(empty)  # another process writes it
    assert remove_if_empty(empty) and not empty.exists() and not journal_path(empty).exists()


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_checks_and_says_so_in_one_line_each():
    result = invoke("doctor", "--json")
    answer = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == (0 if answer["ok"] else 1)
    assert len(result.stderr.splitlines()) == len(answer["checks"])
    verdicts = {check["name"]: check["verdict"] for check in answer["checks"]}
    assert verdicts["python"] == "ok" and verdicts["packages"] == "ok" and verdicts["loopback"] == "ok"
    assert set(verdicts.values()) <= {"ok", "warn", "fail"}


def test_doctor_tells_each_gpu_and_which_are_usable(monkeypatch):
    found = (InstalledGpu("0", "NVIDIA H100", 81920, 1024), InstalledGpu("1", "NVIDIA H100", 81920, 0))
    monkeypatch.setattr(checks, "CUDA_DEVICES", Path("/dev/null"))
    monkeypatch.setattr("heddle_dask.engines.vllm_command.installed_vllm_build", lambda: "gpu")
    monkeypatch.setattr(checks, "installed_gpus", lambda: found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    check = checks._accelerator()
    assert check.verdict == "ok"
    assert check.found.endswith(
        "; GPU 0 NVIDIA H100, 79 of 80 GiB free; GPU 1 NVIDIA H100, 80 of 80 GiB free; CUDA_VISIBLE_DEVICES: 1"
    )
    model = checks._model(None)
    assert model.verdict == "ok" and model.found.endswith("; free: GPU 0 79.0 GiB, GPU 1 80.0 GiB")
    monkeypatch.setattr(checks, "installed_gpus", lambda: (InstalledGpu("0", "NVIDIA T4", 1024, 0),))
    assert checks._model(None).verdict == "warn"
    monkeypatch.setattr(checks, "installed_gpus", lambda: None)
    assert checks._accelerator().verdict == "warn"


def test_doctor_knows_the_other_distribution_of_xgboost(monkeypatch):
    versions = {name: "1.0" for name in checks._PACKAGES if name != "xgboost"}
    monkeypatch.setattr(checks, "_version", versions.get)
    assert checks._packages().advice == "run `pip install xgboost`"
    versions["xgboost-cpu"] = "3.2.0"
    assert checks._packages().verdict == "ok" and "xgboost-cpu 3.2.0" in checks._packages().found


def test_a_folder_without_weights_is_a_model_where_vllm_makes_them_up(tmp_path):
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(shipped_model() / file, tmp_path)
    with pytest.raises(BadInput, match=r"no weights \(\*.safetensors\); --engine-arg load-format=dummy makes some up"):
        chosen_model(str(tmp_path), "vllm")
    for extra_args in (("--load-format", "dummy"), ("--load-format=dummy",)):
        assert chosen_model(str(tmp_path), "vllm", VllmOptions(extra_args=extra_args)) == str(tmp_path)


def test_doctor_fails_when_the_scheduler_does_not_answer():
    result = invoke("doctor", "--json", "--scheduler", "not-an-address")
    answer = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 1 and answer["failed"] >= 1
    assert answer["checks"][-1]["name"] == "scheduler" and answer["checks"][-1]["verdict"] == "fail"


def test_whole_numbers_keep_their_order_and_refuse_what_is_none() -> None:
    assert whole_numbers("--engines", "16, 4,16", "16,64") == [16, 4, 16]
    for text in ("", "0,4", "4,many", "1.5"):
        with pytest.raises(BadInput, match=r"^--engines .*: use whole numbers of at least 1, for example 16,64$"):
            whole_numbers("--engines", text, "16,64")


def test_a_model_of_a_hub_is_refused_with_how_to_download_it():
    line = refused("rollout", "--engine", "emulated", "--model", "Qwen/Qwen3-8B")
    assert "hf download Qwen/Qwen3-8B --local-dir DIR" in line


def test_the_shipped_model_is_found_beside_this_package_whatever_a_project_calls_its_own(model_dir):
    """A program of its own: in this one the packages are imported already."""
    for name in ("pipelines", "workers"):
        Path(name).mkdir()
        (Path(name) / "__init__.py").write_text("")
    program = (
        "from heddle_dask.cli.engine_option import shipped_model\n"
        "from heddle_dask.preload import rollout_worker, scheduler, tool_worker\n"
        "print(shipped_model(), *(each.__file__ for each in (scheduler, rollout_worker, tool_worker)))"
    )
    root = str(Path(model_dir).parents[2])
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), root])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert said[0] == model_dir and all(Path(path).is_file() for path in said[1:])


@pytest.mark.parametrize("words", [["overhead", "--json"], [], ["--help"]])
def test_bench_says_where_the_measurements_are(words: list[str]) -> None:
    answer = CliRunner().invoke(heddle, ["bench", *words])
    assert (answer.exit_code, answer.stdout, answer.stderr.count("\n")) == (2, "", 1)
    assert f"python -m benchmarks {words[0] if words[:1] == ['overhead'] else 'NAME'} …" in answer.stderr


def test_an_agent_comes_with_a_set_of_tasks(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    for given, told in (
        (["--agent", "codex"], "--agent needs --tasks DIR or NAME"),
        (["--tasks", "rows.jsonl"], "a set of tasks is for --agent"),
        (["--agent", "codex", "--env", "math", "--tasks", str(rows)], "--agent and --env exclude each other"),
        (["--agent", "none", "--tasks", str(rows)], "no agent 'none': allowed are"),
        (["--agent", "codex", "--tasks", str(tmp_path / "none")], "there is no such path"),
        (["--tasks", "0"], "0 is not in the range"),
    ):
        result = CliRunner().invoke(heddle, ["rollout", *given, "--out", str(tmp_path / "r.zarr")])
        assert result.exit_code == 2 and told in " ".join(result.output.split()), result.output
