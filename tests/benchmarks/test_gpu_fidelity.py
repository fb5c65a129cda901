"""Live rows of a GPU beside simulated ones: the kept comparison, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.gpu_fidelity import BesideRow, arm_then, live_makespans, same_ranking, simulated_beside, simulated_seeds
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.measured import MeasuredTable

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def lines(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


@pytest.mark.parametrize("name", ["2026-11-26-first/pair", "2026-11-26/single"])
def test_kept_rows_are_of_the_live_runs_and_within_a_tenth(name: str) -> None:
    live = live_makespans(lines(f"{name}-rows.jsonl"))
    for row in lines(f"{name}-simulated.jsonl"):
        assert live.pop(str(row["arm"])) == tuple(row["live_s"])  # type: ignore[arg-type]
        assert row["ratio"] == pytest.approx(row["simulated_s"] / fmean(row["live_s"]), abs=1e-3)  # type: ignore[arg-type,operator]
        assert 0.9 <= float(str(row["ratio"])) <= 1.1
    assert not live


def test_the_default_is_simulated_as_it_was() -> None:
    assert arm_then("sticky-forecast").overrides == ("admission=kv-forecast,fill=0.95,prior=1.0,doubt=0.5",)
    assert arm_then("heddle").overrides == ()
    limited = arm_then("sticky-forecast:admission=at-most,alive=128")
    assert limited.overrides == ("admission=at-most,alive=128",)


def test_a_ranking_is_the_same_if_no_pair_is_swapped() -> None:
    rows = [BesideRow("a", (1.0, 3.0), 4.0, 2.0), BesideRow("b", (2.5,), 5.0, 2.0)]
    assert same_ranking(rows)
    assert not same_ranking([*rows, BesideRow("c", (9.0,), 4.5, 0.5)])


def test_it_refuses_rows_of_another_fleet_than_the_table() -> None:
    rows = lines("2026-11-26/single-rows.jsonl")
    table = MeasuredTable.load(FOLDER / "2026-11-26-first" / "call3-pair-table.json")
    with pytest.raises(BadInput, match="2 engines at once"):
        simulated_beside(rows, table)
    with pytest.raises(BadInput, match="of 2 workloads"):
        simulated_beside([rows[0], {**rows[1], "seed": 9}], replace(table, engines=1))


def test_other_arms_and_draws_are_simulated_on_the_same_engines() -> None:
    rows = [{**row, "tasks": 16} for row in lines("2026-11-26-first/pair-rows.jsonl")]
    table = MeasuredTable.load(FOLDER / "2026-11-26-first" / "call3-pair-table.json")
    found = simulated_seeds(rows, table, ["sticky-forecast", "cache-aware"], range(40, 42))
    assert [(row.arm, row.seed) for row in found] == [
        (a, s) for s in (40, 41) for a in ("sticky-forecast", "cache-aware")
    ]
    assert all(row.simulated_s > 0 for row in found)
