"""The files of one session: when they are opened, and what they keep."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pytest
from worlds.journal_records import read_journal

from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.files.resume import batch_of, batch_prefix
from heddle_dask.live.driver.files.run_files import RunFiles
from heddle_dask.live.driver.files.run_writer import RunWriter, journal_path
from heddle_dask.live.driver.inputs.loaded_model import tokenizer_digest
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.options import Sampling
from heddle_dask.records.journal import Journal
from heddle_dask.records.store import RunReader, RunStore


def facts() -> dict[str, Any]:
    return {"environment": "mine", "seed": 3}


def test_lines_that_come_before_the_journal_follow_the_session_line(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        files = RunFiles(Output(out, metadata={"tasks": 4, "seed": 5}), facts)
        files.keep_lines(["first"])
        files.keep_lines(["second"])
        files.open()
        files.keep_lines(["third"])
        assert files.begin_batch() == 0
        await files.close()

    asyncio.run(body())
    lines = [(kind, body) for kind, body in read_journal(journal_path(out))]
    described = {"environment": "mine", "seed": 5, "tasks": 4}
    assert lines == [
        ("session", described),
        ("control", {"lines": ["first", "second"]}),
        ("control", {"lines": ["third"]}),
    ]
    assert described.items() <= RunReader(out).metadata.items()


def test_only_new_files_are_discarded(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        refused = RunFiles(Output(out), facts)
        refused.open()
        refused.discard_if_new()
        assert list(tmp_path.iterdir()) == []
        for mode in ("create", "append", "overwrite"):
            files = RunFiles(Output(out, mode), facts)
            assert files.replaces_a_run == (mode == "overwrite")
            files.open()
            if mode != "create":
                files.discard_if_new()
                assert out.exists()
            await files.close()

    asyncio.run(body())


def test_without_output_nothing_is_kept() -> None:
    async def body() -> None:
        files = RunFiles(None, facts)
        files.keep_lines(["early"])
        files.open()
        files.journal("step", {})
        files.discard_if_new()
        await files.store()
        await files.close()
        assert (files.writer, files.begin_batch(), files.replaces_a_run) == (None, None, False)
        assert files.unfinished(["attempt"]) == ["attempt"]  # type: ignore[list-item]

    asyncio.run(body())


def test_a_resumed_run_continues_its_last_batch(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def begun(mode: Literal["create", "append", "resume"]) -> list[int | None]:
        files = RunFiles(Output(out, mode), facts)
        files.open()
        numbers = [files.begin_batch()]
        if mode == "resume":
            numbers.append(files.begin_batch())
        await files.close()
        return numbers

    assert [asyncio.run(begun(mode)) for mode in ("create", "append", "resume")] == [[0], [1], [1, 2]]


def test_a_batch_has_the_facts_of_the_session_that_made_it(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def begun(mode: Literal["create", "append"], most: int) -> None:
        described = {
            "model": "m",
            "sampling": {"temperature": 0.5},
            "limits": {"max_steps": most},
            "sandbox": {1: "bubblewrap", 2: "namespace"}[most],
        }
        files = RunFiles(Output(out, mode), lambda: described)
        files.open()
        files.begin_batch()
        await files.close()

    asyncio.run(begun("create", 1))
    asyncio.run(begun("append", 2))
    batches = RunReader(out).batches
    assert [(batch["limits"]["max_steps"], batch["sandbox"]) for batch in batches] == [
        (1, "bubblewrap"),
        (2, "namespace"),
    ]
    assert [(batch["model"], batch["sampling"]) for batch in batches] == [("m", {"temperature": 0.5})] * 2


def test_batches_of_a_run_that_stored_no_facts_have_none(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    with RunStore.create(out, {"model": "m", "batches": 2}) as store:
        assert RunReader(out).batches == [{}, {}]
        store.close()
    Journal.create(journal_path(out)).close()

    async def body() -> None:
        writer = RunWriter(out, "append", {"model": "m"})
        assert writer.begin_batch({"model": "m"}) == 2
        await writer.close()

    asyncio.run(body())
    assert RunReader(out).batches == [{}, {}, {"model": "m"}]


def test_a_run_of_fewer_sampling_parameters_is_continued_with_their_defaults(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    before = {"sampling": {"temperature": 1.0, "top_p": 0.9}}

    async def body() -> None:
        await RunWriter(out, "create", before).close()
        await RunWriter(out, "append", {"sampling": asdict(Sampling(1.0, 0.9))}).close()
        with pytest.raises(BadInput, match="made with sampling"):
            RunWriter(out, "append", {"sampling": asdict(Sampling(1.0, 0.9, 5))})

    asyncio.run(body())


def test_the_batch_of_an_id_is_that_of_its_prefix() -> None:
    ids = {f"{batch_prefix(batch)}task-1/0": batch for batch in (0, 1, 12)}
    assert {name: batch_of(name) for name in ids} == ids


@pytest.mark.parametrize("mode", ["append", "resume"])
@pytest.mark.parametrize("name", ["environment", "model", "tokenizer", "sampling"])
def test_a_run_is_not_continued_with_another_model_or_sampling(
    name: str, mode: Literal["append", "resume"], tmp_path: Path
) -> None:
    out = tmp_path / "run.zarr"
    made = {"environment": "e", "model": "m", "tokenizer": "t", "sampling": {"temperature": 1.0}}

    async def body() -> None:
        first = RunWriter(out, "create", made)
        first.begin_batch({})
        await first.close()
        with pytest.raises(BadInput, match=f"made with {name} .*, not other"):
            RunWriter(out, mode, {**made, name: "other"})
        await RunWriter(out, mode, made).close()

    asyncio.run(body())


def test_the_tokenizer_digest_follows_the_files(tmp_path: Path) -> None:
    empty = tokenizer_digest(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("a")
    first = tokenizer_digest(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("b")
    assert len({empty, first, tokenizer_digest(tmp_path)}) == 3
