"""A kept row says which code was measured: the digest follows the package's files and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import heddle_dask
from heddle_dask.cli.code_digest import DECIDING, code_digest

PACKAGE = Path(heddle_dask.__file__).parent


def digests_of(package: Path, hash_seed: str) -> list[str]:
    """As a checkout elsewhere prints them."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONHASHSEED": hash_seed}
    script = [sys.executable, str(package / "cli" / "code_digest.py")]
    said = subprocess.run(script, env=environment, capture_output=True, check=True, text=True).stdout
    return said.replace("decides:", "").split()


def test_it_follows_the_files_and_nothing_else(tmp_path: Path) -> None:
    here = [code_digest(), code_digest(DECIDING)]
    copy = tmp_path / "heddle_dask"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "core" / "notes.txt").write_text("no code")
    assert digests_of(copy, "1") == digests_of(copy, "2") == here
    with (copy / "live" / "driver.py").open("a") as file:
        file.write("\n# another line\n")
    whole, deciding = digests_of(copy, "1")
    assert (whole != here[0], deciding) == (True, here[1])
    with (copy / "sim" / "loop.py").open("a") as file:
        file.write("\n# another line\n")
    assert digests_of(copy, "1")[1] != here[1]
