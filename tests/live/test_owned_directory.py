"""What a killed owner of a cluster leaves is removed when the next cluster is made; what a living one has is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributed.core import Status

from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.credentials import Credentials
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.clusters.owned_directory import OwnedDirectory

MAKE = """
import asyncio, time
from heddle_dask.live.clusters.local import LocalRolloutCluster

async def main():
    cluster = LocalRolloutCluster(asynchronous=True)
    print(cluster.directory, flush=True)
    time.sleep(600)

asyncio.run(main())
"""


def test_the_key_of_a_killed_driver_goes_when_the_next_cluster_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command, environment = [sys.executable, "-c", MAKE], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as driver:
        try:
            assert driver.stdout is not None
            left = Path(driver.stdout.readline().strip())
            assert len(list(left.rglob("key.pem"))) == 1
            with OwnedDirectory("heddle-cluster-"):
                assert left.exists(), "its owner lives"
        finally:
            driver.kill()

    async def next_driver() -> None:
        cluster = LocalRolloutCluster(asynchronous=True)  # made, and not started
        assert list(tmp_path.glob("heddle-cluster-*")) == [cluster.directory]
        OwnedDirectory("heddle-cluster-").remove()
        assert cluster.directory.exists(), "its owner is this process"
        cluster.status = Status.closed  # Dask warns of what was not closed

    asyncio.run(next_driver())


def test_keys_in_a_shared_directory_are_removed_by_the_machine_of_their_owner_only(tmp_path: Path) -> None:
    here, elsewhere = Credentials.temporary(tmp_path), Credentials.temporary(tmp_path)
    (elsewhere.key.parent / ".lock").write_text("another boot")
    for owned in (here.owned, elsewhere.owned):
        assert owned is not None
        os.close(owned._lock)  # as if it was killed
    with OwnedDirectory("tls-", tmp_path, is_shared=True) as mine:
        assert {path.name for path in tmp_path.iterdir()} == {elsewhere.key.parent.name, mine.name}


def test_what_is_written_while_it_is_removed_is_found_the_next_time(tmp_path: Path) -> None:
    owned = OwnedDirectory("x-", tmp_path)
    (owned.path / "logs").mkdir()
    os.close(owned._lock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # it is never empty in time
        OwnedDirectory("x-", tmp_path)
    assert (owned.path / ".lock").exists()
    OwnedDirectory("x-", tmp_path)
    assert not owned.path.exists()


def test_a_local_cluster_is_not_scaled_since_that_would_end_workers_of_any_kind(tmp_path: Path) -> None:
    async def body() -> None:
        made = LocalRolloutCluster(asynchronous=True, security=False, dashboard=False, directory=tmp_path)
        for ask in (lambda: made.scale(1), made.adapt):
            with pytest.raises(BadInput, match="keeps the workers that it was made with"):
                ask()
        assert list(made.worker_spec) == ["rollout-0", "tool-0"]
        made.status = Status.closed  # it was not started

    asyncio.run(body())
