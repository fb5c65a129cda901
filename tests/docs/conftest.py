"""Where the blocks of the documentation run: a directory like a user's, and one cluster with emulated engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import dask
import pytest
from distributed import Client
from worlds.markdown_blocks import ROOT
from worlds.model_files import SHIPPED_REWARD_MODEL
from worlds.training_batches import stored_batch

import heddle_dask
from heddle_dask import LocalRolloutCluster, Rollout


@pytest.fixture(scope="module")
def modules_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where modules of the pages lie: on the import path of this process and of the cluster's processes."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def shared_cluster(modules_dir: Path) -> Iterator[LocalRolloutCluster]:
    """Two rollout workers, a tool worker and a worker for model services, for all blocks."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(modules_dir), *([before] if before else [])])
    try:
        with LocalRolloutCluster(
            engines=2, tool_cpus=2, model_gpus=1, model_slot_bytes=4 << 20, dashboard=False, security=False
        ) as cluster:
            yield cluster
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def stored_run(shared_cluster: LocalRolloutCluster, model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run for pages that read one."""
    out = tmp_path_factory.mktemp("stored") / "x.zarr"
    with Client(shared_cluster) as client:
        Rollout(client, env="math", model=model_dir, engines="emulated", samples=2, out=out).run(3)
    return out


@pytest.fixture
def place(
    shared_cluster: LocalRolloutCluster,
    stored_run: Path,
    modules_dir: Path,
    model_dir: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """The working directory of a page's blocks: models at `path/to/model` and `path/to/reward-model`, runs in `runs/`.

    Engines are emulated by a setting, as a user would set it, and every cluster that a block makes is the shared one.
    """

    class Shared:
        def __init__(self, *args: Any, **options: Any) -> None:
            pass

        def __enter__(self) -> LocalRolloutCluster:
            return shared_cluster

        def __exit__(
            self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
        ) -> None:
            pass

    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(model_dir)
    (tmp_path / "path" / "to" / "reward-model").symlink_to(SHIPPED_REWARD_MODEL)
    for folder in ("pipelines", "benchmarks"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "runs").mkdir()
    for file in stored_run.parent.iterdir():
        for name in (file.name, file.name.replace("x.", "math.")):
            (tmp_path / "runs" / name).symlink_to(file)
    stored_batch(tmp_path / "runs" / "my-training" / "batches", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(modules_dir))
    monkeypatch.setattr(heddle_dask, "LocalRolloutCluster", Shared, raising=False)
    with dask.config.set({"heddle.engines.kind": "emulated"}):
        yield tmp_path
