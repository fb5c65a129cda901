"""Seconds, memory and size of ``heddle show --html`` and ``--perfetto``, by the number of trajectories.

The run is made without engines, with the writers of journal and store: lengths as of agents (a few steps, a long tail),
waits for admission and slots, moves, preemptions, tool calls, predictions, and the controller's lines for all of it.
The command then runs as a process of its own, as a user starts it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.tables import Column, print_measured_rows
from heddle_dask.cli.shared_options import shared_options, whole_numbers
from heddle_dask.core import commands as cm
from heddle_dask.core import events as ev
from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, StepId, TrajectoryId
from heddle_dask.core.journal_codec import encode
from heddle_dask.core.nouns import (
    ActionRequest,
    EngineDescription,
    HostDescription,
    Prediction,
    Priority,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.resources import Resources
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.journal import Journal
from heddle_dask.records.store import RunStore
from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import ActionRecord, StepRecord, TrajectoryRecord

ENGINES, SLOTS = 64, 64
_MEAN_STEPS = 20
_SHOW = "from heddle_dask.cli.main import main; main()"
_Line = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One run.

    Attributes
    ----------
    show_s, html_s, perfetto_s
        The whole command, interpreter included: without a file, with the report, with the trace.
    html_cpu_s
        CPU seconds of the command with the report: what another process does meanwhile does not count.
    html_peak_bytes
        Memory of the command with the report, at most.
    """

    trajectories: int
    steps: int
    events: int
    journal_bytes: int
    show_s: float
    html_s: float
    html_cpu_s: float
    html_bytes: int
    html_peak_bytes: int
    perfetto_s: float
    perfetto_bytes: int


def measure_reports(sizes: Sequence[int], *, seed: int, folder: Path | None = None) -> Iterator[ReportRow]:
    """A row per number of trajectories.

    Parameters
    ----------
    folder
        Where the runs are written, and removed again. None: the directory for temporary files.
    """
    # A process of its own: Linux counts the memory of who starts a command to that of the command.
    context = multiprocessing.get_context("spawn")
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            out = Path(place) / "run.zarr"
            with context.Pool(1) as pool:
                steps, events = pool.apply(write_run, (out, size, seed))
            show_s, _ = _measured(out)
            html, trace = Path(place) / "report.html", Path(place) / "run.pftrace"
            html_s, used = _measured(out, "--html", str(html))
            perfetto_s, _ = _measured(out, "--perfetto", str(trace))
            yield ReportRow(
                trajectories=size,
                steps=steps,
                events=events,
                journal_bytes=journal_path(out).stat().st_size,
                show_s=show_s,
                html_s=html_s,
                html_bytes=html.stat().st_size,
                html_cpu_s=round(used.ru_utime + used.ru_stime, 3),
                html_peak_bytes=used.ru_maxrss * 1024,
                perfetto_s=perfetto_s,
                perfetto_bytes=trace.stat().st_size,
            )


def _measured(out: Path, *options: str) -> tuple[float, resource.struct_rusage]:
    """Seconds of one ``heddle show``, and what it used."""
    command = [sys.executable, "-c", _SHOW, "show", str(out), "--json", *options]
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process.stdout as stream:
        said = stream.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began_s
    if process.returncode:
        raise RuntimeError(f"{command} exits with {process.returncode}")
    json.loads(said.splitlines()[-1])
    return round(seconds, 3), usage


def write_run(out: Path, size: int, seed: int) -> tuple[int, int]:
    """Write a run of this many trajectories; returns its steps and the events of its journal."""
    chance = random.Random(seed)
    engines = [EngineId(f"rollout-{number}/1-1") for number in range(ENGINES)]
    lines: list[_Line] = [(ev.HostJoined(0.0, HostDescription(HostId("tool-0/1"), Resources.of(cpus=256))),)]
    lines += [(ev.EngineJoined(0.5, EngineDescription(each, SLOTS, 65_536)),) for each in engines]
    records = []
    for number in range(size):
        record, mine = _trajectory(number, size, engines, chance)
        records.append(record)
        lines += mine
    lines.sort(key=lambda line: float(line[0].at))
    with Journal.create(journal_path(out)) as journal:
        journal.append("session", {"strategy": "heddle", "seed": seed})
        for start in range(0, len(lines), 500):
            rows = [
                [encode(event), [encode(each) for each in commands]] for event, *commands in lines[start : start + 500]
            ]
            journal.append("control", {"lines": rows})
    store = RunStore.create(out, {"environment": "bench", "strategy": "heddle", "seed": seed, "sessions": 1})
    try:
        for start in range(0, size, 1000):
            store.append(records[start : start + 1000])
    finally:
        store.close()
    return sum(len(record.steps) for record in records), len(lines)


def _trajectory(
    number: int, size: int, engines: Sequence[EngineId], chance: random.Random
) -> tuple[TrajectoryRecord, list[_Line]]:
    """A record and the controller's lines of it, by one clock."""
    name = TrajectoryId(f"task-{number // 8}/{number % 8}")
    count = max(1, min(200, round(chance.lognormvariate(math.log(_MEAN_STEPS) - 0.3, 0.8))))
    admitted_s = 1.0 + chance.random() * 600 * (number % size) / size
    lines: list[_Line] = [
        (ev.TrajectorySubmitted(1.0, TrajectorySpec(name, GroupId(f"task-{number // 8}"))),),
        (
            ev.PredictionMade(
                admitted_s, name, 0, Prediction(60.0 * count * chance.lognormvariate(0, 0.6), 1.0, "xgboost")
            ),
            cm.AdmitTrajectory(name),
        ),
    ]
    tokens, steps, actions = TokenRecord(), [], []
    tokens.append([1] * 50, Attribution.PROMPT)
    engine, at = chance.choice(engines), admitted_s
    for index in range(count):
        if chance.random() < 0.03:
            target = chance.choice(engines)
            lines.append((ev.HostLost(at - 0.01, HostId("none")), cm.MoveContext(name, engine, target, "transfer")))
            lines.append((ev.MoveEnded(at + 0.02, name, target, True, "transfer", 0.03, len(tokens)),))
            engine = target
        step = _step(index, tokens, engine, at, chance)
        steps.append(step)
        lines += _step_lines(name, step, count, index)
        at = step.finished_s + 0.002
        run_s = chance.expovariate(1 / 1.5)
        action = ActionRecord(
            index,
            index,
            "tool",
            chance.choice(("search", "python")),
            1,
            "ok",
            at,
            at + 0.05 + run_s,
            0.05,
            run_s,
        )
        actions.append(action)
        lines += _action_lines(name, action)
        tokens.append([2] * 20, Attribution.TOOL)
        at = action.finished_s + 0.002
    lines.append((ev.TrajectoryEnded(at, name, "completed"),))
    return _record(number, name, tokens, steps, actions, (admitted_s, at), failed=chance.random() < 0.02), lines


def _record(
    number: int,
    name: str,
    tokens: TokenRecord,
    steps: Sequence[StepRecord],
    actions: Sequence[ActionRecord],
    times_s: tuple[float, float],
    *,
    failed: bool,
) -> TrajectoryRecord:
    return TrajectoryRecord(
        trajectory_id=name,
        group_id=f"task-{number // 8}",
        task_id=f"task-{number // 8}",
        environment="bench",
        sample_index=number % 8,
        seed=number,
        status="failed" if failed else "completed",
        cause="agent" if failed else "",
        detail="ValueError: no answer" if failed else "",
        reward=None if failed else float(number % 2),
        branches=(tokens,),
        steps=tuple(steps),
        actions=tuple(actions),
        started_s=times_s[0],
        finished_s=times_s[1],
    )


def _step(index: int, tokens: TokenRecord, engine: str, at: float, chance: random.Random) -> StepRecord:
    start, generated = len(tokens), 1 + round(chance.expovariate(1 / 60))
    queue_s, prefill_s, decode_s = chance.expovariate(1 / 2.0), 0.05, 0.02 * generated
    tokens.append_sampled(range(generated), [-0.5] * generated, policy_version=0)
    return StepRecord(
        step_index=index,
        branch=0,
        token_start=start,
        token_stop=start + generated,
        engine_id=engine,
        finish_reason="stop",
        prompt_tokens=start,
        generated_tokens=generated,
        cached_tokens=round(0.9 * start),
        preemptions=int(chance.random() < 0.05),
        migrations=0,
        submitted_s=at,
        finished_s=at + queue_s + prefill_s + decode_s + 0.001,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
    )


def _step_lines(name: TrajectoryId, step: StepRecord, count: int, index: int) -> list[_Line]:
    step_id, engine = StepId(name, step.step_index, 0), EngineId(step.engine_id)
    order = cm.StartStep(step_id, engine, Priority(0, float(count - index)), index)
    prediction = Prediction(60.0 * (count - index), 80.0 * (count - index), "xgboost")
    return [
        (ev.StepRequested(step.submitted_s, StepRequest(step_id, step.prompt_tokens, 4096)), order),
        (ev.StepStarted(step.submitted_s + step.queue_s, step_id, engine),),
        (
            ev.StepFinished(step.finished_s, step_id, engine, step.generated_tokens, step.cached_tokens, "stop"),
            cm.PredictRemaining(name),
        ),
        (ev.PredictionMade(step.finished_s + 0.001, name, index + 1, prediction),),
    ]


def _action_lines(name: TrajectoryId, action: ActionRecord) -> list[_Line]:
    action_id, host = ActionId(f"{name}/a{action.action_index}"), HostId("tool-0/1")
    request = ActionRequest(action_id, name, "tool", action.label)
    return [
        (
            ev.ActionRequested(action.submitted_s, request),
            cm.RunAction(action_id, host, Resources.of(cpus=1)),
        ),
        (ev.ActionFinished(action.finished_s, action_id, host, action.run_s),),
    ]


COLUMNS: Sequence[Column] = (
    ("trajectories", lambda row: f"{row.trajectories:,d}"),
    ("steps", lambda row: f"{row.steps:,d}"),
    ("events", lambda row: f"{row.events:,d}"),
    ("show", lambda row: f"{row.show_s:.1f} s"),
    ("report", lambda row: f"{row.html_s:.1f} s ({row.html_cpu_s:.1f} s of CPU)"),
    ("its size", lambda row: f"{row.html_bytes / 1e6:.1f} MB"),
    ("its memory", lambda row: f"{row.html_peak_bytes / 2**20:,.0f} MiB"),
    ("trace", lambda row: f"{row.perfetto_s:.1f} s, {row.perfetto_bytes / 1e6:.1f} MB"),
)


@click.command("report")
@click.option("--trajectories", default="1000,10000", show_default=True, help="Sizes, comma-separated.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="Where the runs are written, and removed again [default: that for temporary files].",
)
@shared_options
def report(trajectories: str, folder: Path | None, as_json: bool, seed: int) -> None:
    """Seconds, memory and bytes of `heddle show --html` and `--perfetto`, without engines."""
    sizes = whole_numbers("--trajectories", trajectories, "1000,10000")
    print_measured_rows(measure_reports(sizes, seed=seed, folder=folder), COLUMNS, as_json=as_json)
