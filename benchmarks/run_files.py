"""What the files of a run cost: memory of the driver, bytes of journal and store, and reading them again.

A run without engines: trajectories of equal length are journalled step by step, some at the same time, and stored as
a driver does it. Each size runs in its own process, and so does each way to read the run.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.tables import Column, print_measured_rows
from heddle_dask.cli.shared_options import COUNT, shared_options, whole_numbers
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.contract import GenerateResult
from heddle_dask.live.driver.files.run_writer import RunWriter, journal_path
from heddle_dask.live.wire.messages import StepResult
from heddle_dask.live.wire.result_codec import step_body
from heddle_dask.records.journal import JournalReader
from heddle_dask.records.journal_lines import RESULTS
from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord

STEPS = 20
# Trajectories under way at the same time.
UNDER_WAY = 64
# Lines of the controller per step, in bytes; the journals in `tests/journals` have 550 to 850.
CONTROL_BYTES_PER_STEP = 700


@dataclass(frozen=True, slots=True)
class RunFilesRow:
    """One run; memory is what a process took at most beyond that for a run of one trajectory.

    Attributes
    ----------
    journal_peak_bytes, journal_bytes
        Length of the journal at its longest, and at the end.
    results_bytes, control_bytes
        What was written to it over the run: results of trajectories, and lines of the controller.
    write_s, write_peak_bytes
        Of the whole run.
    show_s, append_s, resume_s
        Seconds to read the figures of the run, and to open it for more.
    """

    trajectories: int
    tokens: int
    results_bytes: int
    control_bytes: int
    journal_peak_bytes: int
    journal_bytes: int
    store_bytes: int
    write_s: float
    write_peak_bytes: int
    show_s: float
    show_peak_bytes: int
    append_s: float
    append_peak_bytes: int
    resume_s: float
    resume_peak_bytes: int


def measure_run_files(sizes: Sequence[int], tokens: int, folder: Path | None = None) -> Iterator[RunFilesRow]:
    """A row per number of trajectories.

    Parameters
    ----------
    tokens
        Of each trajectory; half of them are sampled.
    folder
        Where the runs are written, and removed again. None: the directory for temporary files.

    Raises
    ------
    BadInput
        A trajectory has less than two tokens per step.
    """
    if tokens < 2 * STEPS:
        raise BadInput(f"--tokens {tokens}: use at least {2 * STEPS}")
    # A new interpreter: memory inherited by a fork would count.
    context = multiprocessing.get_context("spawn")
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            facts: dict[str, Any] = {}
            for function in (_write, _show, _append, _resume):
                with context.Pool(1) as pool:
                    facts |= pool.apply(function, (Path(place), size, tokens))
        yield RunFilesRow(trajectories=size, tokens=tokens, **facts)


def _write(place: Path, size: int, tokens: int) -> dict[str, Any]:
    asyncio.run(_write_run(place / "short.zarr", 1, tokens))
    results_bytes = sum(record.size_bytes for record in JournalReader(place / "short.journal", RESULTS))
    base_bytes = _peak_bytes()
    began_s = time.perf_counter()
    journal_peak_bytes = asyncio.run(_write_run(place / "run.zarr", size, tokens))
    return {
        "write_s": round(time.perf_counter() - began_s, 3),
        "write_peak_bytes": _peak_bytes() - base_bytes,
        "results_bytes": results_bytes * size,
        "control_bytes": CONTROL_BYTES_PER_STEP * STEPS * size,
        "journal_peak_bytes": journal_peak_bytes,
        "journal_bytes": journal_path(place / "run.zarr").stat().st_size,
        "store_bytes": sum(path.stat().st_size for path in (place / "run.zarr").rglob("*") if path.is_file()),
    }


async def _write_run(out: Path, size: int, tokens: int) -> int:
    """Write a run; returns the length of its journal at its longest."""
    writer = RunWriter(out, "create", {})
    peak_bytes = 0
    for first in range(0, size, UNDER_WAY):
        numbers = range(first, min(first + UNDER_WAY, size))
        for index in range(STEPS):
            for number in numbers:
                writer.journal("step", _step_line(number, index, tokens))
                writer.journal("control", {"lines": ["x" * CONTROL_BYTES_PER_STEP]})
            await asyncio.sleep(0)
        for number in numbers:
            writer.finish(_trajectory(number, tokens))
            await asyncio.sleep(0)
        peak_bytes = max(peak_bytes, journal_path(out).stat().st_size)
        await writer.store()
    await writer.close()
    return peak_bytes


def _show(place: Path, size: int, tokens: int) -> dict[str, Any]:
    return _measured("show", place, _read_figures)


def _append(place: Path, size: int, tokens: int) -> dict[str, Any]:
    return _measured("append", place, lambda out: asyncio.run(RunWriter(out, "append", {}).close()))


def _resume(place: Path, size: int, tokens: int) -> dict[str, Any]:
    def resume(out: Path) -> None:
        writer = RunWriter(out, "resume", {})
        for record in writer.recorded():
            assert record.body["trajectory_id"] not in ("", None)
        asyncio.run(writer.close())

    return _measured("resume", place, resume)


def _read_figures(out: Path) -> None:
    from heddle_dask.records.reader import RunReader

    for _ in JournalReader(journal_path(out), RESULTS):
        pass
    reader = RunReader(out)
    for index in range(len(reader)):
        reader.outline(index)


def _measured(name: str, place: Path, read: Callable[[Path], None]) -> dict[str, Any]:
    read(place / "short.zarr")
    base_bytes = _peak_bytes()
    began_s = time.perf_counter()
    read(place / "run.zarr")
    seconds = round(time.perf_counter() - began_s, 3)
    return {f"{name}_s": seconds, f"{name}_peak_bytes": _peak_bytes() - base_bytes}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _part(number: int, index: int, tokens: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Ids and logprobs of one step: noise, which no compression makes smaller than it is for text of a model."""
    chance = np.random.default_rng((number, index))
    count = tokens // (2 * STEPS)
    return chance.integers(0, 150_000, count, np.int32), -chance.random(count, np.float32)


def _step_line(number: int, index: int, tokens: int) -> dict[str, Any]:
    ids, logprobs = _part(number, index, tokens)
    made = GenerateResult(ids.tolist(), logprobs.tolist(), "stop", 0, 0, math.nan, math.nan, math.nan)
    result = StepResult("ok", "engine-0", made)
    return {"trajectory_id": f"t{number}", **step_body(index, ids, result)}


def _trajectory(number: int, tokens: int) -> TrajectoryRecord:
    record, steps = TokenRecord(), []
    for index in range(STEPS):
        ids, logprobs = _part(number, index, tokens)
        record.append(_part(number, STEPS + index, tokens)[0], Attribution.TOOL)
        start = len(record)
        record.append_sampled(ids, logprobs, policy_version=0)
        steps.append(_step(index, start, len(record)))
    return TrajectoryRecord(
        trajectory_id=f"t{number}",
        group_id=f"g{number // 8}",
        task_id=f"task-{number // 8}",
        environment="none",
        sample_index=number % 8,
        seed=number,
        status="completed",
        cause="",
        detail="",
        reward=float(number % 2),
        branches=(record,),
        steps=tuple(steps),
        actions=(),
        started_s=0.0,
        finished_s=1.0,
    )


def _step(index: int, start: int, stop: int) -> StepRecord:
    return StepRecord(
        step_index=index,
        branch=0,
        token_start=start,
        token_stop=stop,
        engine_id="engine-0",
        finish_reason="stop",
        prompt_tokens=start,
        generated_tokens=stop - start,
        cached_tokens=0,
        preemptions=0,
        migrations=0,
        submitted_s=0.0,
        finished_s=1.0,
        queue_s=0.0,
        prefill_s=0.1,
        decode_s=0.9,
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


COLUMNS: Sequence[Column] = (
    ("trajectories", lambda row: str(row.trajectories)),
    ("tokens of each", lambda row: str(row.tokens)),
    ("results written", lambda row: _mb(row.results_bytes)),
    ("of the controller", lambda row: _mb(row.control_bytes)),
    ("journal at its longest", lambda row: _mb(row.journal_peak_bytes)),
    ("at the end", lambda row: _mb(row.journal_bytes)),
    ("store", lambda row: _mb(row.store_bytes)),
    ("write", lambda row: f"{row.write_s:.1f} s, {_mb(row.write_peak_bytes)} of memory"),
    ("show", lambda row: f"{row.show_s:.1f} s, {_mb(row.show_peak_bytes)}"),
    ("append", lambda row: f"{row.append_s:.1f} s, {_mb(row.append_peak_bytes)}"),
    ("resume", lambda row: f"{row.resume_s:.1f} s, {_mb(row.resume_peak_bytes)}"),
)


@click.command("records")
@click.option("--trajectories", default="250,1000", show_default=True, help="Sizes, comma-separated.")
@click.option("--tokens", type=COUNT, default=20_000, show_default=True, help="Tokens of each trajectory.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="Where the runs are written, and removed again [default: that for temporary files].",
)
@shared_options
def records(trajectories: str, tokens: int, folder: Path | None, as_json: bool, seed: int) -> None:
    """Bytes of journal and store, and memory and seconds to write and read a run, without engines."""
    sizes = whole_numbers("--trajectories", trajectories, "250,1000")
    print_measured_rows(measure_run_files(sizes, tokens, folder), COLUMNS, as_json=as_json)
