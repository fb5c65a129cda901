"""What the README promises, run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import heddle_dask
from heddle_dask import RunReader

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_public_names_can_be_imported() -> None:
    for name in heddle_dask.__all__:
        assert getattr(heddle_dask, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        heddle_dask.Nonsense  # noqa: B018
    assert set(heddle_dask.__all__) <= set(dir(heddle_dask))


@pytest.mark.cluster
def test_the_python_example_runs_as_it_stands(tmp_path: Path) -> None:
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "solve" in block]
    (tmp_path / "mine.py").write_text(example, encoding="utf-8")
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")  # it is run in a checkout, and must not write there
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "'completed': 8" in done.stdout
    assert len(RunReader(tmp_path / "runs" / "mine.zarr")) == 8


def test_the_page_is_short() -> None:
    assert len(README.split()) <= 1300
    section = README.partition("## What it gains\n")[2].partition("\n## ")[0]
    assert 3 <= len(re.findall(r"^\|", section, re.MULTILINE)) <= 2 + 6
