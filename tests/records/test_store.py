from __future__ import annotations

import json
import math
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.record_builders import assert_same, exact, few, many_trajectories, plain_trajectory

from heddle_dask.core.errors import BadInput
from heddle_dask.records.journal import Journal
from heddle_dask.records.reader import column_names
from heddle_dask.records.schema import ATTRIBUTES_CRC, COLUMNS_ADDED, LATER_COLUMNS, TABLES
from heddle_dask.records.store import RunReader, RunStore, recover
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED, TrajectoryRecord, trajectory_to_body

METADATA = {"environment": "math", "seed": 3, "versions": {"zarr": "3"}, "slots": [1, 2]}


def contents(path: Path) -> dict[str, object]:
    """Everything that a run holds, comparable with ==."""
    reader = RunReader(path)
    columns: dict[str, object] = {
        name: [repr(value) for value in reader.column(name).tolist()] for name in column_names()
    }
    return {**columns, "rows": reader.rows, "metadata": reader.metadata}


@few
@given(many_trajectories())
def test_random_trajectories_come_back_exactly(drawn):
    records = [record for record, _ in drawn]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.zarr"
        with RunStore.create(path, METADATA) as store:
            store.append(records)
        reader = RunReader(path)
        assert len(reader) == len(records)
        for stored, (given_record, contexts) in zip(reader, drawn, strict=True):
            assert_same(stored, given_record)
            # Segments up to a step are the context that the engine saw.
            for step, context in zip(stored.steps, contexts, strict=True):
                segments = stored.branches[step.branch].segments()
                ids = [token for segment in segments for token in segment.token_ids.tolist()]
                assert ids[: step.token_start] == context


@pytest.mark.slow
@settings(few, max_examples=3)
@given(many_trajectories(min_size=2, max_size=6), st.sets(st.integers(1, 5), min_size=1))
def test_any_partition_into_batches_gives_the_same_store(drawn, cuts):
    records = [record for record, _ in drawn]
    edges = [0, *sorted(cut for cut in cuts if cut < len(records)), len(records)]
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole.zarr", Path(folder) / "parts.zarr"
        with RunStore.create(whole, METADATA) as store:
            shutil.copytree(whole, parts)
            store.append(records)
        for start, stop in pairwise(edges):
            with RunStore.append_to(parts) as store:
                store.append(records[start:stop])
        assert contents(parts) == contents(whole)


def test_append_across_chunk_borders(tmp_path):
    records = [plain_trajectory(index, steps=2, tokens=9_000) for index in range(12)]
    with RunStore.create(tmp_path / "x.zarr", {}) as store:
        for start in range(0, 12, 5):
            store.append(records[start : start + 5])
    reader = RunReader(tmp_path / "x.zarr")
    assert reader.rows["tokens"] > 3 * 131_072
    for index in (11, 0, 3, 2, 10):
        assert_same(reader.trajectory(index), records[index])


def test_what_a_writer_says_of_itself(tmp_path):
    with RunStore.create(tmp_path / "x.zarr", METADATA) as store:
        store.append([])
        assert len(store) == 0
        store.append([plain_trajectory(0), plain_trajectory(1)])
        assert len(store) == 2
        assert "t1" in store
        assert "t2" not in store
        store.update_metadata({"ended": "completed"})
    reader = RunReader(tmp_path / "x.zarr")
    assert reader.metadata == {**METADATA, "ended": "completed"}
    assert len(reader) == 2


def test_a_trajectory_is_stored_once(tmp_path):
    with RunStore.create(tmp_path / "x.zarr", {}) as store:
        store.append([plain_trajectory(0)])
        with pytest.raises(ValueError, match="'t0' is stored already"):
            store.append([plain_trajectory(1), plain_trajectory(0)])
        with pytest.raises(ValueError, match="'t1' is stored already"):
            store.append([plain_trajectory(1), plain_trajectory(1)])
    assert len(RunReader(tmp_path / "x.zarr")) == 1


def test_threads_may_share_a_writer(tmp_path):
    path = tmp_path / "x.zarr"
    with RunStore.create(path, {}) as store, ThreadPoolExecutor(4) as threads:
        appends = [threads.submit(store.append, [plain_trajectory(index)]) for index in range(6)]
        notes = [threads.submit(store.update_metadata, {f"n{index}": 1}) for index in range(6)]
        while not all(future.done() for future in appends):
            assert "t9" not in store
            assert len(store) <= 6
            sleep(0.001)
        for future in appends + notes:
            future.result()
    assert sorted(record.trajectory_id for record in RunReader(path)) == [f"t{i}" for i in range(6)]
    for record in RunReader(path):
        assert_same(record, plain_trajectory(int(record.trajectory_id[1:])))
    assert sorted(RunReader(path).metadata) == [f"n{index}" for index in range(6)]


def test_text_that_utf8_cannot_hold_is_escaped(tmp_path):
    odd = replace(plain_trajectory(0), status="failed", cause="agent", detail="bad \udcff, nul \0")
    with RunStore.create(tmp_path / "x.zarr", {}) as store:
        store.append([odd])
    assert RunReader(tmp_path / "x.zarr").trajectory(0).detail == "bad \\udcff, nul \0"


def test_summary_ignores_unknown_rewards(tmp_path):
    records = [
        replace(plain_trajectory(0), reward=0.5),
        replace(plain_trajectory(1), reward=None, status="failed", cause="agent"),
        replace(plain_trajectory(2), reward=1.0, status="truncated"),
    ]
    with RunStore.create(tmp_path / "x.zarr", {}) as store:
        empty = RunReader(tmp_path / "x.zarr").summary()
        store.append(records)
    assert (empty.trajectories, empty.reward_mean, empty.makespan_s) == (0, None, 0.0)
    summary = RunReader(tmp_path / "x.zarr").summary()
    assert summary.by_status == {"completed": 1, "failed": 1, "truncated": 1}
    assert summary.by_cause == {"": 2, "agent": 1}
    assert (summary.rewards_known, summary.reward_mean) == (2, 0.75)
    assert (summary.trajectories, summary.steps, summary.actions) == (3, 9, 9)
    assert (summary.stored_tokens, summary.sampled_tokens) == (3 * 35, 3 * 15)
    assert (summary.generated_tokens, summary.preemptions) == (45, 3)
    assert summary.makespan_s == 12.0


def test_columns(tmp_path):
    with RunStore.create(tmp_path / "x.zarr", {}) as store:
        store.append([replace(plain_trajectory(0), reward=None), plain_trajectory(1)])
    reader = RunReader(tmp_path / "x.zarr")
    assert reader.column("steps/trajectory").tolist() == [0, 0, 0, 1, 1, 1]
    assert reader.column("branches/token_offset").tolist() == [0, 35]
    assert reader.column("trajectories/id").tolist() == ["t0", "t1"]
    assert math.isnan(reader.column("trajectories/reward")[0])
    assert np.isnan(reader.column("steps/queue_s")).all()
    with pytest.raises(ValueError, match="read-only"):
        reader.column("steps/decode_s")[0] = 1
    with pytest.raises(BadInput, match="no column 'steps/speed'"):
        reader.column("steps/speed")
    with pytest.raises(IndexError):
        reader.trajectory(2)


def test_create_refuses_paths_that_cannot_be(tmp_path):
    run = tmp_path / "deep" / "x.zarr"
    with RunStore.create(run, METADATA) as store:
        store.append([plain_trajectory(0)])
    with pytest.raises(BadInput, match="exists"):
        RunStore.create(run, {})
    for unwritable in (run / "zarr.json" / "x.zarr", Path("/proc/x.zarr")):
        with pytest.raises(BadInput, match="cannot write"):
            RunStore.create(unwritable, {})
    assert len(RunReader(run)) == 1


def test_overwrite_replaces_runs_and_nothing_else(tmp_path):
    run, empty, home = tmp_path / "x.zarr", tmp_path / "empty", tmp_path / "home"
    with RunStore.create(run, METADATA) as store:
        store.append([plain_trajectory(0)])
    RunStore.create(run, {"again": True}, overwrite=True).close()
    assert (len(RunReader(run)), RunReader(run).metadata) == (0, {"again": True})

    empty.mkdir()
    RunStore.create(empty, {}, overwrite=True).close()
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    zarr.create_group(tmp_path / "other.zarr")
    for precious in (home, home / "thesis.txt", tmp_path / "other.zarr"):
        with pytest.raises(BadInput, match="not overwritten"):
            RunStore.create(precious, {}, overwrite=True)
    assert (home / "thesis.txt").read_text() == "years of work"


def test_append_to_refuses_what_is_no_run(tmp_path):
    zarr.create_group(tmp_path / "other.zarr")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for name in ("other.zarr", "file", "folder"):
        for opening in (RunStore.append_to, RunReader):
            with pytest.raises(BadInput, match="is no run of heddle"):
                opening(tmp_path / name)
    with pytest.raises(BadInput, match="no run at"):
        RunStore.append_to(tmp_path / "missing")


def test_refuses_another_format_version_and_an_unfinished_or_damaged_run(tmp_path):
    run = tmp_path / "x.zarr"
    with RunStore.create(run, {}) as store:
        store.append([plain_trajectory(0)])
    document = (run / "zarr.json").read_text()

    def refused(attributes: dict[str, object] | None, message: str) -> None:
        root = json.loads(document)
        root["attributes"] = attributes
        (run / "zarr.json").write_text(json.dumps(root))
        for opening in (RunStore.append_to, RunReader):
            with pytest.raises(BadInput, match=message):
                opening(run)

    ours = json.loads(document)["attributes"]
    refused({**ours, "heddle_format_version": 99}, "format 99, this version of heddle reads 1")
    refused({k: v for k, v in ours.items() if k != "committed"}, "never completely made")
    more = {**ours, "committed": {**ours["committed"], "tokens": 10**6}}
    refused(more, r"damaged at .*zarr\.json: its checksum is wrong")
    refused({**ours, "metadata": {"seed": 1}}, "its checksum is wrong")
    del more[ATTRIBUTES_CRC]
    (run / "zarr.json").write_text(json.dumps({**json.loads(document), "attributes": more}))
    with pytest.raises(BadInput, match=r"damaged at .*tokens/ids: it is shorter than 1000000 rows"):
        RunReader(run).trajectory(0)
    (run / "zarr.json").write_text(document)
    (run / "steps" / "branch" / "zarr.json").unlink()
    with pytest.raises(BadInput, match=r"damaged at .*steps/branch"):
        RunStore.append_to(run)


def of_earlier_version(run: Path, records: list[TrajectoryRecord]) -> None:
    """A run without checksums, as zarr itself makes it: chunks of zeros are left out."""
    with RunStore.create(run, METADATA) as store:
        store.append(records)
    reader = RunReader(run)
    columns = {name: reader.column(name) for name in column_names()}
    group = zarr.open_group(run, mode="r+")
    for name, values in columns.items():
        if name not in LATER_COLUMNS:
            table = TABLES[name.partition("/")[0]]
            group.create_array(
                name,
                data=values,
                chunks=(table.chunk_rows,),
                dimension_names=(table.dimension,),
                overwrite=True,
            )
    for name in LATER_COLUMNS:
        shutil.rmtree(run / name)
    document = json.loads((run / "zarr.json").read_text())
    for added in (ATTRIBUTES_CRC, COLUMNS_ADDED):
        del document["attributes"][added]
    (run / "zarr.json").write_text(json.dumps(document))
    assert not (run / "steps" / "migrations" / "c" / "0").exists()


def test_a_store_has_checksums_for_every_chunk_and_none_is_left_out(tmp_path):
    run = tmp_path / "x.zarr"
    with RunStore.create(run, METADATA) as store:
        store.append([plain_trajectory(0)])
    group = zarr.open_group(run, mode="r")
    for name in column_names():
        assert group[name].metadata.codecs[-1].to_dict() == {"name": "crc32c"}, name
        assert (run / name / "c" / "0").exists(), name


@pytest.mark.parametrize("name", ["steps/migrations", "tokens/ids", "trajectories/domain"])
def test_a_chunk_of_committed_rows_that_is_gone_is_noticed(tmp_path, name):
    """Zarr reads a missing chunk as zeros; those of `steps/migrations` are zeros indeed."""
    run = tmp_path / "x.zarr"
    with RunStore.create(run, METADATA) as store:
        store.append([plain_trajectory(0)])
    (run / name / "c" / "0").unlink()
    for read in (lambda reader: reader.column(name), lambda reader: reader.trajectory(0)):
        with pytest.raises(BadInput, match=f"damaged at .*{name}/c/0: it is missing"):
            read(RunReader(run))
    shutil.rmtree(run / name)
    with pytest.raises(BadInput, match=f"damaged at .*{name}"):
        RunReader(run).trajectory(0)


def test_run_of_an_earlier_version_has_no_checksums_lacks_columns_and_goes_on(tmp_path):
    run = tmp_path / "x.zarr"
    sampling = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1}
    told = [
        replace(
            plain,
            domain="math/sum",
            message_tokens=7,
            max_steps=9,
            reward_parts={"format": 1.0},
            metadata={"turns": [1, None]},
            steps=tuple(replace(step, **sampling) for step in plain.steps),
        )
        for plain in map(plain_trajectory, range(3))
    ]
    of_earlier_version(run, told[:2])
    untold = [replace(plain, domain="", message_tokens=0, max_steps=0) for plain in map(plain_trajectory, range(3))]
    assert [exact(one) for one in RunReader(run)] == [exact(one) for one in untold[:2]]
    with RunStore.append_to(run) as store:
        store.append(told[2:])
    assert [exact(one) for one in RunReader(run)] == [exact(one) for one in [*untold[:2], told[2]]]
    (run / "trajectories" / "domain" / "c" / "0").unlink()
    with pytest.raises(BadInput, match="trajectories/domain/c/0: it is missing"):
        RunReader(run).trajectory(0)


def test_second_writer_is_refused_until_the_first_closes(tmp_path):
    run = tmp_path / "x.zarr"
    first = RunStore.create(run, {})
    with pytest.raises(BadInput, match="another process"):
        RunStore.append_to(run)
    with pytest.raises(BadInput, match="another process"):
        RunStore.create(run, {}, overwrite=True)
    first.append([plain_trajectory(0)])
    assert len(RunReader(run)) == 1
    first.close()
    first.close()
    RunStore.append_to(run).close()


@settings(few, max_examples=6)
@given(many_trajectories(max_size=5), st.integers(0, 5))
def test_recover_brings_what_the_store_lacks_once(drawn, stored):
    records = [record for record, _ in drawn]
    with tempfile.TemporaryDirectory() as folder:
        run, journal_path = Path(folder) / "x.zarr", Path(folder) / "x.journal"
        with Journal.create(journal_path) as journal:
            for record in records:
                journal.append("step", {"trajectory_id": record.trajectory_id})
                journal.append(TRAJECTORY_FINISHED, trajectory_to_body(record))
        with open(journal_path, "ab") as file:
            file.write(b"torn")
        with RunStore.create(run, {}) as store:
            store.append(records[:stored])
        for missing in (max(len(records) - stored, 0), 0):
            with RunStore.append_to(run) as store:
                assert recover(journal_path, store) == missing
        assert [exact(record) for record in RunReader(run)] == [exact(r) for r in records]


def test_a_reader_is_a_sequence_that_says_what_it_is(tmp_path):
    records = [replace(plain_trajectory(number), reward=1.0) for number in range(3)]
    with RunStore.create(tmp_path / "run.zarr", {"environment": "math"}) as store:
        store.append(records)
    run = RunReader(tmp_path / "run.zarr")
    for found, record in zip([*run[:], run[0], run[-1]], [*records, records[0], records[2]], strict=True):
        assert_same(found, record)
    assert [record.trajectory_id for record in run[1:]] == [record.trajectory_id for record in records[1:]]
    for index in (3, -4):
        with pytest.raises(IndexError):
            run[index]
    assert repr(run) == f"<Run {tmp_path / 'run.zarr'}: trajectories=3, environment=math>"
    name = records[1].trajectory_id
    assert repr(run[1]).startswith(f"<TrajectoryRecord {name}: status=completed, reward=1, steps=3, ")
    with pytest.raises(FileNotFoundError, match="no run at"):
        RunReader(tmp_path / "other.zarr")
