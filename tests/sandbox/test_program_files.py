"""Directories of untrusted programs are measured and deleted, and those of dead owners are found."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from heddle_dask.sandbox.program_files import disk_usage, new_folder, reap_folders, remove
from heddle_dask.sandbox.stateful.work_directory import WorkDirectory, reap

DIGS = """
import os, sys
os.chdir(sys.argv[1])
for _ in range(2100):
    os.mkdir("d")
    os.chdir("d")
os.mkdir("closed", 0)
"""


def test_folders_deeper_than_a_path_are_measured_and_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", DIGS, str(folder)], check=True)
    (folder / "file").write_text("x" * 100_000)
    usage = disk_usage(str(folder))
    assert usage.files == 2102 and usage.used_bytes >= 100_000
    remove(str(folder))
    assert not folder.exists()


def test_what_is_unreadable_is_deleted_and_a_link_is_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x" * 5000)
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "link").symlink_to(kept)
    (folder / "inner" / "file").write_text("x" * 5000)
    usage = disk_usage(str(folder))
    assert usage.files == 3 and 5000 <= usage.used_bytes < 32768
    for path in (folder / "inner", folder):
        path.chmod(0)
    remove(str(folder))
    assert not folder.exists() and kept.exists()
    remove(str(folder))


def test_the_folders_of_dead_owners_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = Path(new_folder())
    program = "from heddle_dask.sandbox.program_files import new_folder; print(new_folder())"
    made = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    left = Path(made.stdout.strip())
    elsewhere = tmp_path / left.name.replace(os.uname().nodename, "elsewhere")
    elsewhere.mkdir()
    (left / "file").touch()
    reap_folders()
    assert sorted(tmp_path.iterdir()) == sorted((own, elsewhere))


def test_what_cannot_be_deleted_is_set_aside_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = tmp_path / "box-0-left"
    (box / "work").mkdir(parents=True)
    kept = box / "work" / "file"
    kept.touch()
    if os.geteuid() or subprocess.run(["chattr", "+i", str(kept)], capture_output=True).returncode:
        pytest.skip("no file can be made that root cannot delete")
    try:
        assert reap(tmp_path) == ["box-0-left"]
        assert not box.exists() and "remove it by hand" in caplog.text
        assert reap(tmp_path) == []
        WorkDirectory(tmp_path, "one", private_user=False).make()
    finally:
        subprocess.run(["chattr", "-R", "-i", str(tmp_path)], check=True)


@pytest.mark.parametrize("owner", ["", "[]", "{", "{}", '{"pid": "x"}', "[" * 100_000, "\xff"])
def test_a_box_whose_owner_cannot_be_read_is_deleted(owner: str, tmp_path: Path) -> None:
    (tmp_path / "box-1-x").mkdir()
    (tmp_path / "box-1-x" / "owner.json").write_text(owner, encoding="latin1")
    (tmp_path / "box-name").mkdir()
    assert reap(tmp_path) == ["box-1-x", "box-name"]
