"""``heddle eval`` as its users run it: several arms on one cluster, stopped, gone on with, repaired, topped up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from worlds.command_agents import script

from heddle_dask.cli.eval.command import NOT_OF_ROLLOUT
from heddle_dask.cli.main import heddle
from heddle_dask.cli.rollout.command import rollout
from heddle_dask.environments.agent_description import AgentDescription
from heddle_dask.records.reader import RunReader

HANG_S = 120.0
TESTS = str(Path(__file__).parents[1])
PROGRAMS = """
import asyncio
from pathlib import Path

from heddle_dask.environments.base import EnvironmentFailed, Task


def tasks(count, seed):
    return [Task(f"t{n}", f"Task {n}.", domain="odd" if n % 2 else "even") for n in range(count)]


async def first(task, ctx):
    ctx.append("user", task.prompt)
    await ctx.generate(max_tokens=8, ignore_eos=True)
    if task.task_id == "t1" and not Path("repaired").exists():
        raise EnvironmentFailed("the game server has gone")
    return float(task.task_id != "t0")


async def second(task, ctx):
    ctx.append("user", task.prompt)
    await ctx.generate(max_tokens=8, ignore_eos=True)
    if task.task_id == "t3" and not Path("goes-on").exists():
        Path("reached").touch()
        await asyncio.sleep(3600)
    if task.task_id == "t2":
        raise KeyError("this agent is broken")
    return 1.0
"""


class Evaluation:
    """One evaluation in a directory of its own."""

    def __init__(self, directory: Path, *arms: str) -> None:
        self.directory = directory
        self.command = [sys.executable, "-c", "from heddle_dask.cli.main import main; main()", "eval", "--json"]
        self.command += ["--out", "ev", *arms]
        self.command += ["--engine", "emulated", "--sandbox", "weak", "--tool-cpus", "1", "--no-dashboard"]
        self.command += ["--retries", "max_environment_attempts=1"]

    def start(self, *more: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])}
        return subprocess.Popen([*self.command, *more], cwd=self.directory, text=True, env=environment, **pipes)

    def run(self, *more: str) -> tuple[dict[str, Any], str]:
        process = self.start(*more)
        said, told = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, told
        return json.loads(said.splitlines()[-1]), told

    def records(self, arm: str) -> list[Any]:
        (store,) = (self.directory / "ev/arms").glob(f"programs-{arm}-*.zarr")
        return list(RunReader(store))


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.cluster
@pytest.mark.slow
def test_an_evaluation_goes_on_makes_again_what_the_infrastructure_ended_and_takes_more_samples(tmp_path: Path) -> None:
    (tmp_path / "programs.py").write_text(PROGRAMS)
    evaluation = Evaluation(tmp_path, "--env", "programs:first", "--env", "programs:second", "--tasks", "4")
    stopped = evaluation.start()
    wait_for(tmp_path / "reached", stopped)
    stopped.send_signal(signal.SIGTERM)
    stopped.communicate(timeout=HANG_S)
    assert stopped.returncode == 143
    (tmp_path / "goes-on").touch()

    result, told = evaluation.run()
    first, second = result["arms"]
    assert "1 attempts were ended by the infrastructure: the same command makes them again" in told
    assert (first["samples"], first["pass_at"]["1"]["mean"]) == (3, pytest.approx(2 / 3))
    failures = first["infrastructure"]  # also that of the first session, if it came to it
    assert failures in (1, 2)
    assert second["pass_at"]["1"]["mean"] == 0.75 and set(second["domains"]) == {"even", "odd"}
    assert [row["cause"] for row in second["failures"]["agent"]] == ["agent"]
    assert result["differences"][0]["tasks"] == 3
    # The attempt that was stopped went on behind the step that it had made.
    (resumed,) = [each for each in evaluation.records("second") if each.task_id == "t3"]
    assert len(resumed.steps) == 1 and resumed.status == "completed"
    kept = {each.trajectory_id: each.steps for each in evaluation.records("first")}

    (tmp_path / "repaired").touch()
    result, told = evaluation.run("--samples", "3")
    first, second = result["arms"]
    assert (first["samples"], first["infrastructure"], second["samples"]) == (12, failures, 12)
    assert result["to_make_again"] == 0 and first["pass_at"]["3"] == {**first["pass_at"]["3"], "mean": 0.75, "tasks": 4}
    records = evaluation.records("first")
    assert Counter(each.task_id for each in records) == {"t0": 3, "t1": 3 + failures, "t2": 3, "t3": 3}
    assert kept.items() <= {each.trajectory_id: each.steps for each in records}.items()
    assert "Task by task" in (tmp_path / "ev/index.html").read_text()

    _, told = evaluation.run("--samples", "2")
    assert "nothing is left to do" in told
    others = evaluation.start("--samples", "2", "--temperature", "0.1")
    _, told = others.communicate(timeout=HANG_S)
    assert others.returncode == 2 and "temperature" in told, "its figures would not be comparable"


def describe(agent: AgentDescription, path: Path) -> str:
    command = ", ".join(map(json.dumps, agent.command))
    path.write_text(f'name = "{agent.name}"\nmemory = "64 MiB"\ncommand = [{command}]\n')
    return str(path)


@pytest.mark.cluster
@pytest.mark.slow
def test_agents_are_compared_on_a_set_of_tasks(tmp_path: Path) -> None:
    writes = script('ask(sys.argv[1])\nopen("answer.txt", "w").write("hello")', "writes")
    idles = script("ask(sys.argv[1], ask(sys.argv[1]), 'and now?')", "idles")
    arms = [word for agent in (writes, idles) for word in ("--agent", describe(agent, tmp_path / f"{agent.name}.toml"))]
    evaluation = Evaluation(tmp_path, *arms, "--tasks", "worlds.command_agents:WriteFile", "--tasks", "2")
    result, told = evaluation.run()
    first, second = result["arms"]
    assert [first["name"], second["name"]] == ["writes.toml", "idles.toml"], told
    assert [each["pass_at"]["1"]["mean"] for each in (first, second)] == [1.0, 0.0]
    assert result["differences"][0]["pass_at_1"]["mean"] == -1.0
    costs = first["costs"]
    assert costs["generated_tokens"] > 0 and 0 < costs["tool_s"] < costs["wall_s"]


def refusal(*arguments: str) -> str:
    outcome = CliRunner().invoke(heddle, ["eval", *arguments])
    assert outcome.exit_code == 2, outcome.output
    return outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "e"), "give --env NAME, or --agent NAME with --tasks DIR"),
        (("--env", "math", "--tasks", "some/dir", "--out", "e"), "--tasks some/dir is for --agent"),
        (("--env", "math", "--tasks", "4", "--tasks", "5", "--out", "e"), "give one number"),
        (("--env", "math", "--env", "math", "--out", "e"), "the same arm is asked for twice"),
        (("--env", "math", "--model", "/none", "--out", "e"), "model directory /none does not exist"),
        (("--env", "nonsense", "--engine", "emulated", "--out", "e"), "no environment 'nonsense'"),
        (("--agent", "codex", "--out", "e"), "--agent needs --tasks"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal(*arguments)
    assert not os.listdir(tmp_path)


def test_options_of_a_rollout_that_an_evaluation_leaves_out_are_options_of_a_rollout() -> None:
    names = {option.name for option in rollout.params}
    assert names >= NOT_OF_ROLLOUT
