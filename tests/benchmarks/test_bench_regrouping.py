"""``heddle bench regrouping``: rows, table and bad input."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from heddle_dask.cli.bench_regrouping import regrouping
from heddle_dask.cli.main import heddle

SMALL = ["--model", "qwen3-8b", "--workloads", "search", "--predictors", "oracle", "--trajectories", "32"]


def bench(*words: str) -> Result:
    return CliRunner().invoke(regrouping, [*SMALL, *words])


def test_every_row_stands_beside_the_run_without() -> None:
    done = bench("--samples", "8", "--seeds", "2", "--engines", "1,chosen", "--restarts", "1,9999", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    rows = found["rows"]
    assert len(rows) == 2 * 2 * 2
    assert {row["degrees"] for row in rows if row["engines"] == "1"} == {"8x1"}
    for row in rows:
        assert row["gain"] == pytest.approx(row["stay_s"] / row["regroup_s"], rel=1e-3)
        if row["restart_s"] == 9999:
            assert (row["merges"], row["gain"]) == (0, 1.0), "the price is not right"
    assert found["conditions"]["cluster"]["gpus"] == 8
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("| search | oracle | 8x1 |")]
    assert line.endswith("1.000 (1.000-1.000), 0, 0 |")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--predictors", "magic"], "--predictors magic: use some of oracle, xgboost"),
        (["--engines", "all"], "--engines all: use degrees, chosen, or both"),
        (["--engines", "3"], "TP degree 3 does not divide a node of 8 GPUs"),
        (["--restarts", "soon"], "--restarts soon: use seconds from 0 up"),
        (["--restarts", "-1"], "--restarts -1: use seconds from 0 up"),
        (["--options", "relative=-1"], "use numbers of at least 0 for relative"),
    ],
)
def test_bad_input_gets_one_line(words: list[str], message: str) -> None:
    done = CliRunner().invoke(heddle, ["bench", "regrouping", *SMALL, *words])
    assert done.exit_code == 2
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1
