"""Trainings by the command of users, an arm each, and a row for each of their evaluations.

A training is a directory: one that has begun is resumed, one that has ended is read. So a study of hours may be
interrupted at any time. What a training says goes to a log beside its directory. Seconds are those of its own logs and,
of a process that was interrupted, those after its last step; the time between two processes does not count.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.row_file import Row, RowFile
from heddle_dask.core.errors import BadInput
from heddle_dask.records.reader import RunReader
from heddle_dask.records.trajectory_prefix import prefix_facts
from heddle_dask.training.json_lines import append_lines, read_lines
from heddle_dask.training.run_directory import TrainingDirectory

ARMS: Final[Mapping[str, Sequence[str]]] = {
    "sync": ("--mode", "sync"),
    "async": (),  # as shipped
    "prefix": ("--prefix-sampling",),
}
_LOOK_S = 5.0
_NOTHING_TO_LEARN: Final = "nothing to learn:"  # how `NothingToLearn` begins


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One training. `options` are those that all arms share; they name it in rows."""

    env: str
    seed: int
    arm: str
    options: tuple[str, ...]
    folder: Path

    @property
    def key(self) -> Row:
        shared = {"env": self.env, "seed": self.seed, "arm": self.arm}
        return {"kind": "training", **shared, "conditions": " ".join(self.options)}

    @property
    def directory(self) -> TrainingDirectory:
        return TrainingDirectory(self.folder / f"{self.env.replace(':', '-')}-{self.seed}-{self.arm}")

    @property
    def log(self) -> Path:
        """What its processes said."""
        return self.folder / f"{self.directory.path.name}.log"

    @property
    def processes(self) -> Path:
        """A JSON line for each process that has ended: rows of metrics by then, and seconds after its last one."""
        return self.folder / f"{self.directory.path.name}.processes.jsonl"

    def has_ended(self) -> bool:
        """Whether its last weights have been evaluated."""
        last = int(self.options[self.options.index("--steps") + 1])
        out = self.directory
        return out.is_training() and any(int(row["number"]) == last for row in read_lines(out.evaluations))

    @property
    def command(self) -> list[str]:
        out = self.directory
        resumes = ("--resume",) if out.is_training() else ()
        program = "from heddle_dask.cli.main import main; main()"
        given = ("--env", self.env, "--seed", str(self.seed), "--out", str(out.path), *self.options)
        return [sys.executable, "-c", program, "train", *given, *ARMS[self.arm], *resumes]


def train(run: StudyRun, rows: RowFile, code: str) -> Iterator[Row]:
    """Run a training to its end; yields each new row, of its evaluations and at last of itself.

    A training that finds nothing more to learn has ended, too: its row says so.

    Raises
    ------
    BadInput
        The training failed: its log says why.
    """
    if rows.find(run.key) is not None:
        return
    if run.has_ended():
        yield from _read(run, rows, code)
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    began_s, rows_before = time.monotonic(), len(read_lines(run.directory.metrics))
    with run.log.open("a+", encoding="utf-8", errors="replace") as log:
        said_before = log.seek(0, 2)
        process = subprocess.Popen(run.command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(_LOOK_S)
                yield from _new(run, rows, code)
        except KeyboardInterrupt:
            process.wait()  # it was told by the terminal as well, and ends after the step that is being trained
            raise
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            _log_process(run, time.monotonic() - began_s, rows_before)
        yield from _new(run, rows, code)  # a training that failed has evaluations too
        log.seek(said_before)
        said = [line.removeprefix("heddle: ").strip() for line in log]
    ended = [line for line in said if line.startswith(_NOTHING_TO_LEARN)]
    if process.returncode and not ended:
        last = said[-1] if said else "nothing was said"
        raise BadInput(f"{run.log}: heddle train ended with {process.returncode}: {last}; give the command again")
    yield from _read(run, rows, code, *ended)


def _log_process(run: StudyRun, seconds: float, rows_before: int) -> None:
    metrics = read_lines(run.directory.metrics)
    logged_s = float(metrics[-1]["elapsed_s"]) if len(metrics) > rows_before else 0.0
    append_lines(run.processes, [{"rows": len(metrics), "unlogged_s": round(seconds - logged_s, 1)}])


def _read(run: StudyRun, rows: RowFile, code: str, ended: str = "") -> Iterator[Row]:
    yield from _new(run, rows, code)
    row = {**run.key, **_whole(run.directory), **({"ended": ended} if ended else {}), "code": code}
    rows.add(row)
    yield row


def _new(run: StudyRun, rows: RowFile, code: str) -> Iterator[Row]:
    logged = (run.directory.metrics, run.directory.evaluations, run.processes)
    for figures in evaluation_figures(*map(read_lines, logged)):
        row = {**run.key, "kind": "evaluation", **figures, "code": code}
        if rows.find(row) is None:
            rows.add(row)
            yield row


def evaluation_figures(
    metrics: Sequence[Row], evaluations: Sequence[Row], processes: Sequence[Row] = ()
) -> Iterator[dict[str, Any]]:
    """Held-out reward with its interval, and the tokens and seconds that its weights took, in order of the weights.

    A row of metrics counts seconds and tokens from the start of its process; a step that was trained twice counts
    twice, as it cost. Of tokens after the last row of a process nothing is known.
    """
    unlogged_s: Counter[int] = Counter()
    for each in processes:
        unlogged_s[each["rows"]] += each["unlogged_s"]
    spent: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    seconds = tokens = before_s = before_tokens = 0.0
    for place, row in enumerate(metrics):
        now_s, now_tokens = float(row["elapsed_s"]), float(row["tokens_per_s"]) * float(row["elapsed_s"])
        if now_s < before_s or place in unlogged_s:  # a new process
            before_s, before_tokens = -unlogged_s[place], 0.0
        seconds, tokens = seconds + now_s - before_s, tokens + now_tokens - before_tokens
        before_s, before_tokens = now_s, now_tokens
        spent[int(row["step"])] = (seconds, tokens)
    newest = {int(row["number"]): row for row in evaluations}
    for number, row in sorted(newest.items()):
        if number in spent and row["reward"] is not None:
            after_s, after = spent[number]
            interval = [round(each, 4) for each in row["reward_ci"]]
            yield {
                "number": number,
                "reward": round(row["reward"], 4),
                "reward_ci": interval,
                "seconds": round(after_s, 1),
                "tokens": round(after),
                "rewards": row["rewards"],
            }


def _whole(directory: TrainingDirectory) -> dict[str, Any]:
    """What a training that has ended rolled out, what its groups were worth, and how far samples lay off."""
    metrics = read_lines(directory.metrics)
    run = RunReader(directory.rollout)
    behind = sum(prefix_facts(run.trajectory(row)) is not None for row in range(len(run)))
    return {
        "steps": len(metrics),
        "trajectories": len(run),
        "behind_prefix": behind,
        "without_variance_share": round(metrics[-1]["without_variance_share"], 4) if metrics else None,
        "importance_weight_max": max(
            (round(row["trainer"]["importance_weight_max"], 4) for row in metrics), default=None
        ),
    }
