"""``heddle train`` as its users run it, with a real trainer, which is killed; then the driver is, then it is stopped.

Engines are emulated. They take weights as real ones do, but what they sample follows from none: nothing is learned.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from worlds.live_world import control_lines

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.journal_codec import decode
from heddle_dask.records.journal import JournalReader
from heddle_dask.training.batch_files import load_batch
from heddle_dask.training.buffer_events import BatchFormed, GroupAccepted, event_from_body
from heddle_dask.training.json_lines import read_lines
from heddle_dask.training.plan import ASYNC_ALPHA
from heddle_dask.training.run_directory import TrainingDirectory
from heddle_dask.training.stored_samples import BUFFER_LOG
from heddle_dask.weights.store import WeightStore

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

HANG_S = 280.0
STEPS = 6
GROUPS, SAMPLES = 2, 4
AGENT = """
from heddle_dask.environments.base import Reward, Task


def tasks(count, seed):
    return [Task(f"t{seed}-{number}", f"Task {number}.") for number in range(count)]


async def solve(task, ctx):
    ctx.append("user", task.prompt)
    step = await ctx.generate(max_tokens=8, ignore_eos=True)
    return Reward(None, turns=[sum(step.token_ids) % 2])
"""


class Training:
    """Runs ``heddle train`` in one directory."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.directory = TrainingDirectory(folder / "run")
        self.options = [
            # A mix, with an affinity by the names of its parts.
            *("--env", "coin:solve,flip:solve", "--hardware", "A=1,B=1", "--slots", "64"),
            *(
                "--set",
                "affinity=map,coin=B,default=A",
                "--engine",
                "emulated",
                "--model",
                model,
                "--steps",
                str(STEPS),
            ),
            *("--groups", str(GROUPS), "--samples", str(SAMPLES), "--out", "run", "--no-dashboard", "--json"),
            *("--eval-tasks", "4", "--sandbox", "weak"),
            *("--staleness", "pace", "--extra-samples", "1", "--max-repeats", "5", "--tp", "1,1"),
        ]
        for part in ("coin", "flip"):
            (folder / f"{part}.py").write_text(AGENT)

    def start(self, *options: str) -> subprocess.Popen[str]:
        program = "from heddle_dask.cli.main import main; main()"
        with (self.folder / "stderr.txt").open("a") as told:
            return subprocess.Popen(
                [sys.executable, "-c", program, "train", *self.options, *options],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                start_new_session=True,
            )

    def rows(self) -> list[dict[str, Any]]:
        return read_lines(self.directory.metrics)

    def wait_until(self, holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + HANG_S
        while not holds():
            assert process.poll() is None, (self.folder / "stderr.txt").read_text()
            assert time.monotonic() < deadline, (self.folder / "stderr.txt").read_text()
            time.sleep(0.02)

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        told, _ = process.communicate(timeout=HANG_S)
        return process.returncode, told


@pytest.fixture
def training(tmp_path: Path, model_dir: str) -> Iterator[Training]:
    made = Training(tmp_path, model_dir)
    yield made
    for process in psutil.Process().children():
        process.kill()
        process.wait()


def test_a_training_survives_the_death_of_its_trainer_and_its_driver(training: Training) -> None:
    # What emulated engines sample follows from no weights: their logprobs are not the trainer's.
    code, _ = training.end(training.start())
    told = (training.folder / "stderr.txt").read_text().splitlines()
    assert (code, len(training.rows())) == (1, 1), told
    assert any(line.endswith("starting 2 of 2 engines, of TP degrees 1,1") for line in told), told
    (line,) = (line for line in told if "logprobs of engines and trainer differ by" in line)
    assert line.startswith("heddle: step 1: ") or "step 1: logprobs" in line

    training.options += ["--mismatch", "tell"]
    driver = training.start("--resume")
    training.wait_until(lambda: len(training.rows()) >= 2, driver)
    _process_of(driver, "pipelines.grpo").kill()
    directory = training.directory
    training.wait_until(lambda: len(training.rows()) >= 3, driver)
    assert not directory.checkpoints.exists(), "its time has not come: batches are what there is to go on from"
    driver.kill()
    training.end(driver)

    driver = training.start("--resume")
    training.wait_until(lambda: len(training.rows()) >= 4, driver)
    driver.send_signal(signal.SIGINT)
    code, _ = training.end(driver)
    told = (training.folder / "stderr.txt").read_text()
    assert code == 130, told
    assert "the trainer goes on from step 0, its newest checkpoint" in told
    stopped = len(training.rows())
    assert (directory.checkpoints / f"step-{stopped:06d}" / "trainer.json").exists()
    assert (directory.checkpoints / "models" / f"step-{stopped:06d}" / "model.safetensors").exists()
    assert "go on by the same command with --resume" in told

    assert "dashboard:" not in told
    code, output = training.end(training.start("--resume", "--dashboard"))
    told = (training.folder / "stderr.txt").read_text()
    assert code == 0, told
    assert re.search(r"^\[.* s\] dashboard: http://127.0.0.1:\d+/heddle$", told, re.MULTILINE)
    result = json.loads(output.splitlines()[-1])
    assert (result["steps"], result["samples"]) == (STEPS, STEPS * GROUPS * SAMPLES)
    assert result["reward_before"] is not None
    assert result["reward_after"] is not None
    _check_steps(training, stopped)
    _check_affinity(directory.rollout)


def _check_affinity(out: Path) -> None:
    """Steps of each part of the mix ran on its class, but for those while its only engine changed its weights."""
    domains: dict[str, str] = {}
    classes: dict[str, str] = {}
    present: set[str] = set()
    ran: Counter[tuple[str, str]] = Counter()
    for event, commands in ((decode(event), [decode(row) for row in rows]) for event, rows in control_lines(out)):
        if isinstance(event, ev.TrajectorySubmitted):
            domains[event.trajectory.trajectory_id] = event.trajectory.domain.partition(":")[0]
        elif isinstance(event, ev.EngineJoined):
            classes[event.engine.engine_id] = event.engine.hardware
            present.add(event.engine.engine_id)
        elif isinstance(event, ev.EngineLost):
            present.discard(event.engine_id)
        both = {classes[engine_id] for engine_id in present} == {"A", "B"}
        for command in commands if both else []:
            if isinstance(command, cmd.StartStep):
                ran[domains[command.step_id.trajectory_id], classes[command.engine_id]] += 1
    assert ran["coin", "B"] > 2 * ran["coin", "A"], ran
    assert ran["flip", "A"] > 2 * ran["flip", "B"], ran


def _check_steps(training: Training, stopped: int) -> None:
    """Each step once, no sample twice or too old, weights of one line of training that grow."""
    directory = training.directory
    rows = training.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert len({row["lineage"] for row in rows}) == 1
    assert all(int(age) <= ASYNC_ALPHA for row in rows for age in row["staleness"])
    members: dict[str, tuple[str, ...]] = {}
    used: list[str] = []
    for record in list(JournalReader(directory.path / BUFFER_LOG))[1:]:
        event = event_from_body(record.kind, record.body)
        if isinstance(event, GroupAccepted):
            members[event.group.group_id] = event.group.trajectory_ids
        if isinstance(event, BatchFormed):
            assert len(event.group_ids) == GROUPS
            used += [name for group_id in event.group_ids for name in members[group_id]]
    for path in directory.batches.glob("step-*.npz"):
        every = [member for group in load_batch(path).groups for member in group.members]
        assert all(member.turn_rewards == (member.reward,) for member in every)
    assert len(used) == len(set(used)) == STEPS * GROUPS * SAMPLES
    # The stop wrote a checkpoint: nothing needs the batches before it any more.
    assert [path.name for path in sorted(directory.batches.glob("step-*.npz"))] == [
        f"step-{number:06d}.npz" for number in range(stopped + 1, STEPS + 1)
    ]
    assert f"step-{STEPS:06d}" in {path.name for path in (directory.checkpoints / "models").iterdir()}
    newest = WeightStore(str(directory.weights)).newest(rows[0]["lineage"])
    assert newest is not None
    assert newest.version.number == STEPS
    evaluations = read_lines(directory.evaluations)
    assert [row["number"] for row in evaluations] == [0, STEPS]
    for row in evaluations:  # the engines kept these weights until it had ended
        assert list(row["tokens_by_version"]) == [str(row["number"])]


def _process_of(driver: subprocess.Popen[str], module: str) -> psutil.Process:
    """The process below the driver that runs a module."""
    for process in psutil.Process(driver.pid).children(recursive=True):
        if process.cmdline()[2:4] == ["-m", module]:
            return process
    raise AssertionError(f"no process runs {module}")
