"""The sample buffer on disk: a crash at any point of its log loses nothing, and changes nothing that was given out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from worlds.training_builders import assert_same_batch, finished_group

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.run_description import StalenessBound
from heddle_dask.records.store import RunStore
from heddle_dask.training.batch_files import BATCHES, batch_path, load_batch
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.sample_buffer import BatchRule, BatchWaits
from heddle_dask.training.stored_samples import BUFFER_LOG, StoredSamples

RULE = BatchRule(1, StalenessBound(2, "cancel", 2))


class Story(NamedTuple):
    """A run of five groups, three batches and two optimiser steps, and where its files are."""

    folder: Path
    run: Path
    batches: list[TrainingBatch]
    marks: list[tuple[int, int, int, int]]  # size of the log, accepted groups, formed and trained steps


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("run")
    run = folder / "rollout.zarr"
    groups = [finished_group(f"g{n}", (0.0, 1.0 if n != 2 else 0.0), version=n // 2) for n in range(5)]
    with RunStore.create(run, {}) as store, StoredSamples.create(folder, RULE, "a") as samples:
        store.append([record for group in groups for record in group.records])
        batches: list[TrainingBatch] = []
        marks = []
        accepted = trained = 0

        def mark() -> None:
            marks.append(((folder / BUFFER_LOG).stat().st_size, accepted, len(batches), trained))

        mark()
        for number, group in enumerate(groups):
            accepted += number != 2
            samples.offer(group, "a")
            mark()
            if number in (1, 3, 4):
                path = samples.draw()
                assert isinstance(path, Path)
                batches.append(load_batch(path))
                mark()
            if number in (3, 4):
                trained += 1
                samples.trained(trained)
                mark()
    return Story(folder, run, batches, marks)


def test_a_batch_file_has_the_groups_of_the_buffer(story):
    assert [[group.group_id for group in batch.groups] for batch in story.batches] == [["g0"], ["g1"], ["g3"]]
    assert [batch.step for batch in story.batches] == [1, 2, 3]


@pytest.mark.parametrize("torn_bytes", [0, 20])
@pytest.mark.parametrize("with_files", [True, False])
def test_a_crash_at_any_point_of_the_log(story, tmp_path, torn_bytes, with_files):
    """Cut the log after each entry, with or without a part of the next; keep or lose the batch files."""
    for number, (size, accepted, formed, trained) in enumerate(story.marks):
        folder = tmp_path / str(number)
        if with_files:
            shutil.copytree(story.folder / "batches", folder / "batches")
        folder.mkdir(exist_ok=True)
        whole = (story.folder / BUFFER_LOG).read_bytes()
        (folder / BUFFER_LOG).write_bytes(whole[: size + torn_bytes] if size < len(whole) else whole)
        with StoredSamples.reopen(folder, RULE, story.run) as samples:
            assert len(samples.buffer.waiting) == accepted - formed
            given = [load_batch(path) for path in samples.open_batches]
            for batch, expected in zip(given, story.batches[trained:formed], strict=True):
                assert_same_batch(batch, expected)  # given out again, unchanged
            for group in (finished_group(f"g{n}", (0.0, 1.0), version=n // 2) for n in range(4)):
                samples.offer(group, "a")  # a resumed driver may deliver again
            drawn = []
            while not isinstance(path := samples.draw(), BatchWaits):
                drawn.append(load_batch(path))
            taken = [g.group_id for batch in story.batches[:formed] + drawn for g in batch.groups]
            assert len(set(taken)) == len(taken)


def test_the_store_must_have_what_the_log_names(story, tmp_path):
    size = story.marks[1][0]
    (tmp_path / BUFFER_LOG).write_bytes((story.folder / BUFFER_LOG).read_bytes()[:size])
    RunStore.create(tmp_path / "empty.zarr", {}).close()
    with pytest.raises(BadInput, match="lacks the trajectory g0/0 that the log of the samples names"):
        StoredSamples.reopen(tmp_path, RULE, tmp_path / "empty.zarr")


def test_a_resume_from_an_older_checkpoint_gives_the_same_files(story, tmp_path):
    shutil.copytree(story.folder, tmp_path / "run")
    with StoredSamples.reopen(tmp_path / "run", RULE, story.run) as samples:
        samples.resume(PolicyVersion("b", 1))
        assert [path.name for path in samples.open_batches] == ["step-000002.npz", "step-000003.npz"]
        for path, expected in zip(samples.open_batches, story.batches[1:], strict=True):
            assert_same_batch(load_batch(path), expected)
        samples.trained(3)
    batch_path(tmp_path / "run" / BATCHES, 2).unlink()
    # A file of them is gone: they are given up, and step 2 takes what waits.
    with StoredSamples.reopen(tmp_path / "run", RULE, story.run) as samples:
        samples.resume(PolicyVersion("c", 1))
        assert samples.open_batches == () and samples.buffer.next_step == 2
    with StoredSamples.reopen(tmp_path / "run", RULE, story.run) as samples:
        assert samples.open_batches == () and samples.buffer.next_step == 2


def test_batches_that_nothing_needs_are_removed(story, tmp_path):
    shutil.copytree(story.folder, tmp_path / "run")
    with StoredSamples.reopen(tmp_path / "run", RULE, story.run) as samples:
        samples.trained(3)
        samples.forget_batches(2)
        assert [path.name for path in (tmp_path / "run" / BATCHES).iterdir()] == ["step-000003.npz"]
    with StoredSamples.reopen(tmp_path / "run", RULE, story.run) as samples:
        samples.resume(PolicyVersion("a", 3))
        assert samples.open_batches == ()


def test_a_run_has_one_buffer_and_one_writer(tmp_path):
    with StoredSamples.create(tmp_path, RULE, "a"):
        with pytest.raises(BadInput, match="exists"):
            StoredSamples.create(tmp_path, RULE, "a")
        with pytest.raises(BadInput, match="another process"):
            StoredSamples.reopen(tmp_path, RULE, tmp_path / "x.zarr")


def test_late_members_and_drops_are_counted(tmp_path):
    with StoredSamples.create(tmp_path, RULE, "a") as samples:
        samples.offer(finished_group("g", (0.0, None, 0.0)), "a")
        samples.offer(finished_group("g+1", (1.0,), late_for="g"), "a")
        samples.offer(finished_group("h", (None, 1.0)), "a")
        samples.drop("i", "code", "stale", (7, 9))
        assert samples.draw() == BatchWaits(0, 1)
        samples.offer(finished_group("j"), "a")
        batch = load_batch(samples.draw())
    assert [(g.group_id, g.late_for, g.earlier_rewards) for g in batch.groups] == [
        ("j", "", ()),
        ("g+1", "g", (0.0, 0.0)),
    ]
    counts = samples.counts
    assert counts.dropped_groups == {"no-variance": 1, "too-few-members": 1, "stale": 1}
    assert counts.dropped_tokens == {"no-variance": 8, "too-few-members": 8, "stale": 16}
    assert counts.sampled_groups == {"math": 4, "code": 1}
    assert counts.trained_groups == {"math": 2}
    assert (counts.sampled_lengths.trajectories, counts.trained_lengths.trajectories) == (9, 3)
    assert counts.trained_lengths.p50_tokens == 4.0
