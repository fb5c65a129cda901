"""The writer of a run: what its journal keeps, what survives its death, and what it says when the disk is full."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds.image_files import ImageFiles, layer, member
from worlds.journal_records import read_journal
from worlds.record_builders import exact, plain_trajectory

from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.core.errors import BadInput, WriteFailed
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.engines.contract import GenerateResult
from heddle_dask.environments.base import Context, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.input_identity import root_digest
from heddle_dask.live.driver.files import run_writer
from heddle_dask.live.driver.files.resume import unfinished
from heddle_dask.live.driver.files.run_files import RunFiles
from heddle_dask.live.driver.files.run_writer import RunWriter, journal_path
from heddle_dask.live.driver.inputs.rollout_inputs import Output, WriteMode
from heddle_dask.live.driver.programs.action_results import value_body
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.live.driver.programs.sandbox_roots import SandboxRoots
from heddle_dask.live.wire.messages import StepResult
from heddle_dask.live.wire.result_codec import step_body
from heddle_dask.records.journal import Journal, JournalReader
from heddle_dask.records.journal_lines import RESULTS
from heddle_dask.records.reader import RunReader
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED, trajectory_to_body
from heddle_dask.sandbox.images.cache import image_digest
from heddle_dask.sandbox.stateful.contract import SandboxSpec


async def solve(task: Task, ctx: Context) -> float:
    return 0.0


def step_line(name: str, index: int) -> dict[str, Any]:
    made = GenerateResult((1,) * 70, (0.0,) * 70, "stop", 0, 0, 0.0, 0.0, 0.0)
    body = step_body(index, np.arange(4, dtype=np.int32), StepResult("ok", "e", made))
    return {"trajectory_id": name, **body}


def attempts(*names: str) -> list[Attempt]:
    specs = [TrajectorySpec(TrajectoryId(name), GroupId("g")) for name in names]
    environment = FunctionEnvironment(solve, name="env")
    return [Attempt(Task(spec.trajectory_id, "prompt"), spec, 0, environment, spec.trajectory_id) for spec in specs]


async def roll_out(writer: RunWriter, numbers: range, stored_at_once: int = 4) -> None:
    """Steps and the end of each trajectory, and lines of the controller in between."""
    for number in numbers:
        record = plain_trajectory(number)
        for index in range(3):
            writer.journal("step", step_line(record.trajectory_id, index))
        writer.journal("control", {"lines": [[["Event", number], []]]})
        writer.finish(record)
        if number % stored_at_once == 0:
            await writer.store()


def test_the_journal_drops_what_the_store_has_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_writer, "COMPACTED_BYTES", 20_000)
    out = tmp_path / "run.zarr"

    async def body() -> None:
        writer = RunWriter(out, "create", {})
        writer.journal("session", {"strategy": "slime"})
        writer.journal("step", step_line("open", 0))
        await roll_out(writer, range(60))
        assert len(writer._bytes_of) < 10
        await writer.close()

    asyncio.run(body())
    records = read_journal(journal_path(out))
    assert [number for kind, body in records if kind == "control" for ((_, number), _) in body["lines"]] == list(
        range(60)
    )
    assert records[0] == ("session", {"strategy": "slime"}) and ("step", step_line("open", 0)) in records
    steps = sum(kind == "step" for kind, _ in records)
    assert 1 <= steps < 60, "of 181"
    assert [exact(record) for record in StoredRun(out)] == [exact(plain_trajectory(n)) for n in range(60)]
    assert StoredRun(out).unfinished == 1
    writer = RunWriter(out, "resume", {})
    (left,) = unfinished(attempts("t3", "open"), writer, print)
    assert left.recorded is not None and list(left.recorded.steps) == [step_line("open", 0)]
    asyncio.run(writer.close())


def test_opening_an_older_journal_drops_what_the_store_has(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        writer = RunWriter(out, "create", {})
        await roll_out(writer, range(20))
        writer.journal("step", step_line("open", 0))
        await writer.close()
        before = journal_path(out).stat().st_size
        monkeypatch.setattr(run_writer, "COMPACTED_BYTES", 20_000)
        await RunWriter(out, "append", {}).close()
        assert journal_path(out).stat().st_size < before / 10
        await RunWriter(out, "append", {}).close()

    asyncio.run(body())
    assert [kind for kind, _ in read_journal(journal_path(out)) if kind in RESULTS] == ["step"]
    assert len(StoredRun(out)) == 20


WRITER = """
import asyncio, os, sys
from worlds.record_builders import plain_trajectory
from heddle_dask.live.driver.files import run_writer
from heddle_dask.live.driver.files.run_writer import RunWriter
from heddle_dask.records import synced_store

run_writer.COMPACTED_BYTES = 15_000
run_writer.STORE_BATCH = 3
synced_store.sync_path = lambda path: None

async def main():
    writer = RunWriter(sys.argv[1], "resume", {})
    number = int(sys.argv[2])
    while True:
        name = f"t{number}"
        for index in range(3):
            writer.journal("step", {"trajectory_id": name, "step_index": index, "token_ids": "A" * 400})
            writer.journal("step", {"trajectory_id": f"open{number}", "step_index": index, "token_ids": "B" * 9})
        writer.journal("control", {"lines": [[["Event", number], []]]})
        writer.finish(plain_trajectory(number))
        os.write(1, b"%d\\n" % number)
        number += 1
        await asyncio.sleep(0.001)
        if len(writer._unstored) > 20:
            await writer.store()

asyncio.run(main())
"""


@pytest.mark.slow
def test_sigkill_of_a_writer_that_compacts_loses_nothing(tmp_path: Path) -> None:
    """Neither a finished trajectory nor a step of an open one nor a line of the controller, that was acknowledged."""
    out = tmp_path / "run.zarr"
    asyncio.run(RunWriter(out, "create", {}).close())
    chance = random.Random(5)
    number = 0
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(out), str(number)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert child.stdout is not None
        first = b"".join(child.stdout.readline() for _ in range(40))
        time.sleep(chance.uniform(0, 0.5))
        os.kill(child.pid, signal.SIGKILL)
        acknowledged = int((first + child.stdout.read()).split(b"\n")[-2])
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        found = {record.trajectory_id: exact(record) for record in StoredRun(out)}
        assert set(range(acknowledged + 1)) <= {int(name[1:]) for name in found}
        assert all(text == exact(plain_trajectory(int(name[1:]))) for name, text in found.items())
        number = max(int(name[1:]) for name in found) + 1
        open_steps: dict[str, int] = {}
        events = []
        for kind, body, _ in JournalReader(journal_path(out)):
            if kind == "control":
                events += [event[1] for event, _ in body["lines"]]
            elif body.get("trajectory_id", "").startswith("open"):
                open_steps[body["trajectory_id"]] = open_steps.get(body["trajectory_id"], 0) + 1
        assert set(range(acknowledged + 1)) <= set(events)
        assert all(open_steps[f"open{each}"] >= 3 for each in range(acknowledged + 1))
    assert journal_path(out).stat().st_size < number * 1500, "finished ones take 2,900 bytes each"


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture
def long_journal(tmp_path: Path) -> Path:
    """A run of 40 stored trajectories whose journal still has all their results: 24 MB."""
    out = tmp_path / "run.zarr"
    asyncio.run(RunWriter(out, "create", {}).close())
    with Journal.create(journal_path(out), overwrite=True) as journal:
        for number in range(40):
            body = trajectory_to_body(plain_trajectory(number))
            for index in range(10):
                journal.append("step", {**step_line(body["trajectory_id"], index), "token_ids": "AAAA" * 15_000})
            journal.append(TRAJECTORY_FINISHED, body)
        journal.append("step", step_line("open", 0))
    asyncio.run(RunWriter(out, "append", {}).close())
    return out


@pytest.mark.parametrize("command", ["show", "append", "resume"])
def test_reading_a_long_journal_takes_little_memory(long_journal: Path, command: str) -> None:
    size = journal_path(long_journal).stat().st_size
    assert size > 20e6
    tracemalloc.start()
    try:
        if command == "show":
            run = StoredRun(long_journal)
            assert sum(len(each.steps) for each in run.outlines()) == 120 and run.unfinished == 1
        else:
            writer = RunWriter(long_journal, command, {})  # type: ignore[arg-type]
            (left,) = unfinished(attempts("t1", "open"), writer, print)
            assert left.spec.trajectory_id == "open"
            asyncio.run(writer.close())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size / 3, f"{peak:,} bytes for a journal of {size:,}"


# -- results that cannot be replayed ---------------------------------------------------------------


def test_a_call_whose_value_nobody_signed_is_made_again_and_that_is_said(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    facts = {"status": "ok", "label": "tool", "run_s": 1.0}
    foreign = {"pickled": "gASVCgAAAAAAAAB9lC4=", "signature": "0" * 64, "idempotency_key": "old/t/a1"}
    notes: list[str] = []

    async def body() -> None:
        writer = RunWriter(out, "create", {})
        for index, fields in enumerate([value_body("t/a0", 7, b"", "old/t/a0"), foreign, {"value": "text"}]):
            writer.journal("action", {"trajectory_id": "t", "action_index": index, **facts, **fields})
        await writer.close()
        files = RunFiles(Output(out, "resume"), dict, notes.append)
        files.open()
        (left,) = files.unfinished(attempts("t"))
        assert left.recorded is not None
        assert sorted(left.recorded.actions) == [0, 2]
        assert left.recorded.idempotency_keys == {1: "old/t/a1"}
        await files.close()

    asyncio.run(body())
    assert len(notes) == 1 and notes[0].startswith("note: 1 tool calls are made again")


def test_a_run_on_a_file_system_without_locks_has_one_writer_too(tmp_path: Path, monkeypatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    out = tmp_path / "run.zarr"

    async def body() -> None:
        files = RunFiles(Output(out), dict)
        files.open()
        with pytest.raises(BadInput, match="is being written by process"):
            RunFiles(Output(out, "resume"), dict).open()
        await files.close()
        again = RunFiles(Output(out, "resume"), dict)
        again.open()
        await again.close()

    asyncio.run(body())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.journal", "run.zarr"]


def test_results_that_heddle_did_not_write_are_refused_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        writer = RunWriter(out, "create", {})
        writer.journal("step", {"trajectory_id": "t", "step_index": 0})
        await writer.close()
        writer = RunWriter(out, "resume", {})
        with pytest.raises(BadInput, match=r"run\.journal has results of t that heddle did not write"):
            unfinished(attempts("t"), writer, print)
        await writer.close()

    asyncio.run(body())


# -- a full disk -----------------------------------------------------------------------------------

FILLER = """
import asyncio, sys
from worlds.record_builders import plain_trajectory
from heddle_dask.core.errors import WriteFailed
from heddle_dask.live.driver.files.run_writer import RunWriter

async def main():
    writer = RunWriter(sys.argv[1], "create", {})
    number = 0
    try:
        while True:
            writer.finish(plain_trajectory(number, tokens=int(sys.argv[2])))
            number += 1
            await asyncio.sleep(0)
            if int(sys.argv[3]):
                await writer.store()
    except WriteFailed as error:
        print(error)
    try:
        await writer.close()
    except WriteFailed as error:
        print(error)
    print(number)

asyncio.run(main())
"""


@pytest.mark.parametrize("full", ["journal", "store"])
def test_a_full_disk_is_one_line_with_the_path_and_nothing_finished_is_lost(tmp_path: Path, full: str) -> None:
    """No file may grow beyond a limit; the journal reaches it first, or a chunk does."""
    out = tmp_path / "run.zarr"
    limit, tokens, stores = (60_000, 5, 0) if full == "journal" else (24_000_000, 40_000, 1)
    child = subprocess.run(
        [sys.executable, "-c", FILLER, str(out), str(tokens), str(stores)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stderr == ""
    *lines, count = child.stdout.splitlines()
    place = journal_path(out)
    assert lines and set(lines) == {
        f"cannot write {place}: File too large: make room there, then finish the run with the same command and --resume"
    }
    assert int(count) >= 1
    run = StoredRun(out)
    assert [exact(record) for record in run] == [
        exact(plain_trajectory(number, tokens=tokens)) for number in range(int(count))
    ]
    asyncio.run(RunWriter(out, "resume", {}).close())
    assert len(RunReader(out)) == int(count)


def test_a_store_that_cannot_be_written_ends_the_run_and_the_journal_has_everything(tmp_path, monkeypatch) -> None:
    out = tmp_path / "run.zarr"

    def full(path: Path, value: Any) -> None:
        raise OSError(28, "No space left on device")

    async def body() -> None:
        writer = RunWriter(out, "create", {})
        writer.finish(plain_trajectory(0))
        with monkeypatch.context() as patched:
            patched.setattr("heddle_dask.records.synced_store._write", full)
            with pytest.raises(WriteFailed, match=r"cannot write .*run\.zarr: No space left on device: make room"):
                await writer.store()
            with pytest.raises(WriteFailed):
                writer.journal("step", step_line("t1", 0))
            with pytest.raises(WriteFailed):
                writer.finish(plain_trajectory(1))
            with pytest.raises(WriteFailed):
                await writer.close()
            with pytest.raises(WriteFailed, match=r"run\.zarr: No space left"):
                RunWriter(out, "resume", {})
        await RunWriter(out, "resume", {}).close()

    asyncio.run(body())
    assert [exact(record) for record in RunReader(out)] == [exact(plain_trajectory(0))]


def test_a_disk_that_is_full_from_the_start_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "run.zarr"

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(WriteFailed, match=r"run\.journal: No space left"):
            RunWriter(out, "create", {})
    assert list(tmp_path.iterdir()) == []
    asyncio.run(RunWriter(out, "create", {}).close())


def test_json_of_a_journal_line_is_what_it_was() -> None:
    """Journals are read by other tools, too: a plain value is JSON that can be read by eye."""
    assert json.dumps(value_body("c", {"a": (1, "x")}, b"", "k")) == (
        '{"value": {"dict": [["a", {"tuple": [1, "x"]}]]}}'
    )


def test_each_session_that_reaches_its_engines_counts(tmp_path: Path) -> None:
    """Clocks of two sessions do not compare: a reader must know that there was more than one."""
    out, facts = tmp_path / "run.zarr", {"context_tokens": 64}

    async def session(mode: WriteMode, *, has_engines: bool) -> None:
        writer = RunWriter(out, mode, {})
        if has_engines:
            writer.learned(facts)
        await writer.close()

    counts = []
    for mode, has_engines in (("create", True), ("resume", False), ("resume", True), ("append", True)):
        asyncio.run(session(mode, has_engines=has_engines))
        counts.append(RunReader(out).metadata.get("sessions"))
    assert counts == [1, 1, 2, 3]


def test_a_run_whose_sandbox_root_has_changed_is_refused_or_the_change_accepted(tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "run.zarr"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tool").write_text("1")
    tar = ImageFiles([]).docker_tar(tmp_path / "image.tar")

    async def session(mode: str, *, accepts: bool = False) -> list[str]:
        writer = RunWriter(out, mode, {}, accepts=accepts)  # type: ignore[arg-type]
        roots = SandboxRoots(writer.journal)
        for place in (str(root), str(root), "", "/no/such/root"):
            await roots.identified(SandboxSpec(root=place))
        assert (await roots.identified(SandboxSpec(image=str(tar)))).image_digest == image_digest(str(tar))
        await writer.close()
        return writer.accepted

    asyncio.run(session("create"))
    assert asyncio.run(session("resume")) == []
    (root / "bin" / "tool").write_text("22")
    with pytest.raises(BadInput, match=f"other files in the sandbox root {root}.*--accept-changes"):
        asyncio.run(session("append"))
    assert asyncio.run(session("append", accepts=True)) == [f"other files in the sandbox root {root}"]
    assert asyncio.run(session("resume")) == []
    ImageFiles([layer([member("new")])]).docker_tar(tar)
    with pytest.raises(BadInput, match=f"other files in the sandbox root {tar}.*--accept-changes"):
        asyncio.run(session("resume"))
    image = tmp_path / "image.sif"
    image.write_bytes(bytes(3 << 20))
    before = root_digest(str(image))
    image.write_bytes(bytes(1 << 20) + b"1" + bytes((2 << 20) - 1))
    assert root_digest(str(image)) != before
    # The content counts, not the times of files.
    (root / "link").symlink_to("bin")
    before, times = root_digest(str(root)), (root / "bin" / "tool").stat()
    os.utime(root / "bin" / "tool", (1, 1))
    assert root_digest(str(root)) == before
    (root / "bin" / "tool").write_text("23")
    os.utime(root / "bin" / "tool", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert root_digest(str(root)) != before
    (root / "bin" / "tool").write_text("22")
    (root / "link").unlink()
    (root / "link").symlink_to("lib")
    assert root_digest(str(root)) != before
