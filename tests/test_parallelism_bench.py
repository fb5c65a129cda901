"""``heddle bench degrees``: its rows, and that it refuses bad input in one line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from heddle_dask.benchmarks.degrees import capped_works, measure_degrees
from heddle_dask.cli.bench_degrees import degrees
from heddle_dask.core.errors import BadInput


def test_a_row_for_each_profile() -> None:
    arguments = ["--profiles", "qwen3-8b-h100,qwen3-32b-h100", "--trajectories", "200", "--gpus", "16"]
    result = CliRunner().invoke(degrees, [*arguments, "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["profile"] for row in rows] == ["qwen3-8b-h100", "qwen3-32b-h100"]
    for row in rows:
        assert row["gain"] >= 1 and row["walk_over_best"] >= 1
        assert sum(int(degree) * count for degree, count in row["degrees"].items()) <= 16
        assert row["makespan_s"] <= min(s for s in row["uniform_s"].values() if s is not None)


def test_bad_input_is_refused() -> None:
    with pytest.raises(BadInput, match="'no-such'"):
        list(measure_degrees(["no-such"], 40, 8, seed=0, repeats=1))
    with pytest.raises(BadInput, match="0 GPUs"):
        list(measure_degrees(["qwen3-8b-h100"], 40, 0, seed=0, repeats=1))


def test_no_trajectory_is_longer_than_the_paper_allows() -> None:
    assert max(work.decode_tokens for work in capped_works(1600, 0)) <= 40_000
