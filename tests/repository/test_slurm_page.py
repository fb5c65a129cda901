"""The page about SLURM: its cluster files are plans, its job script is the generated one, its tables have all keys."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import heddle_dask
from heddle_dask.cli.doctor.cluster_file_checks import example_scripts
from heddle_dask.cli.group_cluster import check_plan
from heddle_dask.live.clusters.slurm.cluster_file import _GROUP_KEYS, _plan_keys, cluster_plan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
LAUNCHER = Path(heddle_dask.__file__).parents[1] / "workers" / "job.py"
SHOWN_PYTHON = "/project/envs/heddle/bin/python"
SHOWN_LAUNCHER = "/project/envs/heddle/lib/python3.12/site-packages/workers/job.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("text", blocks("toml"))
def test_every_cluster_file_is_a_plan_for_a_rollout(text):
    check_plan(cluster_plan(tomllib.loads(text)), Path("slurm.toml"), frozenset())


def test_the_job_script_is_the_generated_one():
    script = example_scripts(cluster_plan(tomllib.loads(blocks("toml")[0])))["gpu"]
    shown = script.replace(sys.executable, SHOWN_PYTHON).replace(str(LAUNCHER), SHOWN_LAUNCHER)
    assert shown in blocks("bash")


@pytest.mark.parametrize("text", blocks("bash"))
def test_shell_blocks_are_shell(text):
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("text", blocks("python"))
def test_python_blocks_name_what_exists(text):
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.module == "heddle_dask":
            assert all(hasattr(heddle_dask, alias.name) for alias in node.names)


def test_the_tables_have_every_key():
    rows = re.findall(r"^\| (`[^|]+) \|", PAGE, re.MULTILINE)
    named = {key for row in rows for key in re.findall(r"`([a-z-]+)`", row)}
    assert named == {*_plan_keys(Path()), *_GROUP_KEYS} - {"groups"}
