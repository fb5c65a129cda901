"""Weights are copied to a node once, whole or not at all, and go when their room is needed and nobody uses them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.weight_staging import StagingStopped, stage_weights
from heddle_dask.live.worker.engine_host import EngineHost

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model as a hub's cache has it: files that are links to others."""
    model = tmp_path / "shared" / "model"
    (model / "extra").mkdir(parents=True)
    (tmp_path / "shared" / "blob").write_bytes(b"w" * 300_000)
    (model / "model.safetensors").symlink_to("../blob")
    (model / "config.json").write_text("{}")
    (model / "extra" / "tokens.txt").write_text("a b")
    (model / ".git").mkdir()
    return model


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


def test_a_copy_is_the_model_and_is_used_again(tmp_path: Path, model: Path) -> None:
    first = stage_weights(str(model), tmp_path / "node")
    copy = Path(first.path)
    assert copy.parent == tmp_path / "node"
    assert content(copy) == content(model)
    assert not (copy / "model.safetensors").is_symlink()
    inode = (copy / "model.safetensors").stat().st_ino
    second = stage_weights(str(model), tmp_path / "node")
    assert second.path == first.path and (copy / "model.safetensors").stat().st_ino == inode
    first.release()
    second.release()


def test_a_changed_model_and_a_changed_copy_are_copied_again(tmp_path: Path, model: Path) -> None:
    first = stage_weights(str(model), tmp_path / "node")
    first.release()
    (Path(first.path) / "model.safetensors").write_bytes(b"cut")
    again = stage_weights(str(model), tmp_path / "node")
    again.release()
    assert again.path == first.path and content(Path(again.path)) == content(model)
    (model / "config.json").write_text("{ }")
    changed = stage_weights(str(model), tmp_path / "node")
    changed.release()
    assert changed.path != first.path and content(Path(changed.path)) == content(model)


STAGES = """
import sys, os
from pathlib import Path
from heddle_dask.engines import weight_staging
copied = []
original = weight_staging._copy
weight_staging._copy = lambda *arguments: copied.append(1) or original(*arguments)
staged = weight_staging.stage_weights(sys.argv[1], Path(sys.argv[2]))
print(len(copied), staged.path)
"""


def test_of_several_jobs_of_a_node_one_copies(tmp_path: Path, model: Path) -> None:
    command = [sys.executable, "-c", STAGES, str(model), str(tmp_path / "node")]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [job.communicate()[0].split() for job in jobs]
    assert sorted(copies for copies, _ in said) == ["0", "0", "0", "1"]
    assert len({path for _, path in said}) == 1


def test_a_copy_that_was_killed_leaves_nothing_that_is_taken_for_a_model(tmp_path: Path, model: Path) -> None:
    node = tmp_path / "node"
    whole = stage_weights(str(model), node)
    whole.release()
    copy = Path(whole.path)
    os.rename(copy, f"{copy}.partial")
    (Path(f"{copy}.partial") / "more").write_text("of the copy before")
    again = stage_weights(str(model), node)
    again.release()
    assert content(Path(again.path)) == content(model)
    assert not list(node.glob("*.partial"))


def test_a_copy_in_use_stays_and_an_unused_one_makes_room(tmp_path: Path, model: Path, monkeypatch) -> None:
    node = tmp_path / "node"
    used = stage_weights(str(model), node)
    (model / "config.json").write_text("{ }")
    unused = stage_weights(str(model), node)
    unused.release()
    (model / "config.json").write_text("{  }")
    # A disk with room for two copies.
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: Usage(0, 0, (3 - len(list(node.glob("model-*[0-9a-f]")))) << 30)
    )
    third = stage_weights(str(model), node)
    assert Path(third.path).parent == node
    assert Path(used.path).is_dir() and not Path(unused.path).exists()
    (model / "config.json").write_text("{   }")
    fourth = stage_weights(str(model), node)
    assert fourth.path == str(model) and "MiB free" in fourth.why_not, "both copies are in use"
    used.release()
    third.release()


def test_a_copy_is_given_up_when_its_engine_is_not_wanted(tmp_path: Path, model: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StagingStopped):
        stage_weights(str(model), tmp_path / "node", stop)


def test_a_name_to_download_is_left_alone(tmp_path: Path) -> None:
    staged = stage_weights("org/model", tmp_path / "node")
    assert staged.path == "org/model" and not (tmp_path / "node").exists()


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node").chmod(0o777)
    with pytest.raises(BadInput, match="may be written by other users"):
        stage_weights(str(model), tmp_path / "node")


def test_an_engine_loads_the_copy_and_lets_it_go_at_its_end(tmp_path: Path, model_dir: str) -> None:
    node = tmp_path / "node"
    records = Path(tempfile.mkdtemp())  # short: the paths of sockets are limited to 107 bytes
    loaded: list[str] = []

    async def body() -> None:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        host = EngineHost(
            EngineSpec("emulated", model_dir, slots=2, max_model_len=100),
            tmp_path / "logs",
            on_ready=lambda client, info: ready.set_result(host._process.spec.model),
            on_lost=loaded.append,
            on_start_failed=lambda reason: ready.set_exception(RuntimeError(reason)),
            records=records,
            weights=node,
        )
        host.start()
        loaded.append(await ready)
        await host.stop()
        assert host.spec.model == model_dir, "what it is asked for, and what it reports"

    asyncio.run(body())
    (path,) = loaded
    assert Path(path).parent == node
    assert content(Path(path)) == content(Path(model_dir))
