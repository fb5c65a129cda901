"""``heddle bench placement``: its rows, and that it refuses bad counts in one line."""

from __future__ import annotations

import json

from click.testing import CliRunner

from heddle_dask.benchmarks.code_digest import code_digest
from heddle_dask.benchmarks.placement import synthetic_works
from heddle_dask.cli.main import heddle


def test_rows_for_every_pair_that_makes_sense() -> None:
    arguments = ["bench", "placement", "--trajectories", "8,40", "--engines", "3,16", "--dp-most", "8"]
    result = CliRunner().invoke(heddle, [*arguments, "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    rows = told["rows"]
    assert told["code"] == code_digest()
    assert [(row["trajectories"], row["engines"]) for row in rows] == [(8, 3), (40, 3), (40, 16)]
    assert [row["dp_ms"] is None for row in rows] == [False, True, True]
    for row in rows:
        assert row["fixed_order_over_best"] >= 1
        assert 0 < row["work_bound_share"] <= 1
        assert row["makespan_ms"] > 0


def test_bad_counts_are_refused_in_one_line() -> None:
    for arguments in (
        ("--trajectories", "many"),
        ("--engines", "0"),
        ("--trajectories", "4", "--engines", "5"),
    ):
        result = CliRunner().invoke(heddle, ["bench", "placement", *arguments])
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1


def test_the_synthetic_batch_depends_on_the_seed_only() -> None:
    works = synthetic_works(40, 3)
    assert works == synthetic_works(40, 3) != synthetic_works(40, 4)
    lengths = [work.decode_tokens for work in works]
    assert lengths == sorted(lengths, reverse=True)
    assert len(dict.fromkeys(work.group for work in works)) == 3
