"""Directories for sockets and records: no other user can have a hand in them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.address import engines_directory, private_directory

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_it_is_made_for_its_user_alone_and_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert private_directory(path) == path
    assert _mode(path) == 0o700
    assert private_directory(path) == path


def test_an_open_mode_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    path.chmod(0o755)
    private_directory(path)
    assert _mode(path) == 0o700


def test_a_link_a_file_and_what_others_may_write_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(BadInput, match="must be a real directory of this user"):
            private_directory(tmp_path / name)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    with pytest.raises(BadInput, match="may be written by other users: remove it"):
        private_directory(tmp_path / "open")


@as_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(BadInput, match=r"belongs to user 12345: set TMPDIR") as caught:
        private_directory(path)
    assert "\n" not in str(caught.value)


def test_the_directory_of_engines_has_a_short_path_whatever_tmpdir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = tmp_path.parent.parent, tmp_path / ("t" * 80)
    long.mkdir()
    for directory, expected in ((short, short), (long, Path("/tmp"))):
        monkeypatch.setattr("tempfile.tempdir", str(directory))
        assert engines_directory() == expected / f"heddle-engines-{os.getuid()}"


@as_root
def test_a_socket_in_it_cannot_be_reached_by_another_user(tmp_path: Path) -> None:
    outside = Path(f"/tmp/heddle-test-{os.getpid()}")
    path = private_directory(outside) / "s"
    code = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen()
os.setuid(12345)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    print("refused")
"""
    try:
        said = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        assert said.stdout == "refused\n"
    finally:
        path.unlink(missing_ok=True)
        outside.rmdir()
