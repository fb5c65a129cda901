"""What ``python -m benchmarks live`` makes of its rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from benchmarks.commands.live import live
from benchmarks.live import cpu_per_step_ms, outlasted_moves, summary
from benchmarks.live_setup import LiveRow
from benchmarks.process_usage import cpu_by_kind, cpu_since
from heddle_dask.cli.one_line import OneLineGroup


def row(arm: str, repeat: int, tokens_per_s: float, **moves: dict[str, int]) -> LiveRow:
    return LiveRow("w", arm, repeat, tokens_per_s, 10.0, tokens_per_s / 100, 0, moves)


def test_the_best_arm_comes_first_with_its_median_and_spread() -> None:
    rows = [row("slow", n, rate) for n, rate in enumerate((10.0, 30.0, 20.0))]
    rows += [row("fast", n, rate) for n, rate in enumerate((50.0, 40.0, 90.0))]
    assert summary(rows) == [("w", "fast", 50.0, 40.0, 90.0, 0.5), ("w", "slow", 20.0, 10.0, 30.0, 0.2)]


def test_moves_whose_tool_took_longer_are_told_from_those_that_nothing_could_hide() -> None:
    """Of 30 moves steps waited for 13; 3 of these were late beside a tool that took longer than the move."""
    transfer = {"started": 20, "exposed": 12, "late": 2}
    recompute = {"started": 10, "exposed": 1, "late": 1}
    rows = [row("a", 0, 1.0, transfer=transfer), row("a", 1, 1.0, recompute=recompute), row("b", 0, 1.0)]
    assert outlasted_moves(rows) == [("w", "a", 30, 20, 3)]


def test_cpu_is_told_by_kind_of_process_for_each_step() -> None:
    rows = [
        replace(row("a", 0, 1.0), steps=100, cpu_s={"scheduler": 1.0, "engine": 9.0}),
        replace(row("a", 1, 1.0), steps=100, cpu_s={"scheduler": 3.0, "engine": 9.0, "driver": 1.0}),
        row("simulated", 0, 1.0),
    ]
    assert cpu_per_step_ms(rows) == [("w", "a", {"driver": 5.0, "engine": 90.0, "scheduler": 20.0})]
    before_s = cpu_by_kind()
    sum(range(3_000_000))
    since_s = cpu_since(before_s)
    assert 0.0 < since_s["driver"] < 60.0


def test_limits_are_searched_in_simulated_time_and_rows_are_written_as_runs_end(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    fleet = "--engine emulated --engines 2 --slots 4 --profile qwen3-14b-h100 --kv-capacity 20000 --max-context 16384"
    asked = f"live --trace tau_dialogues --tasks 12 --token-scale 0.2 --seed 3 --simulated {fleet} --out {out}".split()
    tight = "verl:admission=at-most,alive=2"
    invoke = CliRunner().invoke
    group = OneLineGroup(commands={"live": live})
    result = invoke(group, [*asked, "--json", "--arm", tight, "--arm", "verl"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)["rows"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(row["steps"] > 12 and not row["cpu_s"] for row in rows)
    common = {name: rows[0][name] for name in ("kind", "seed", "simulated", "conditions", "code")}
    assert common["kind"] == "live" and common["simulated"] and "12 tasks, tokens x 0.2" in common["conditions"]
    assert rows == [{**common, **row} for row in told]
    before = out.read_text()
    again = invoke(group, [*asked, "--json", "--arm", tight, "--arm", "verl"])
    assert json.loads(again.stdout)["rows"] == told and out.read_text() == before
    seconds = {row["arm"]: row["makespan_s"] for row in rows}
    assert seconds[tight] > 1.5 * seconds["verl"]  # two of twelve at a time
    for wrong, message in (
        (["--arm", "vllm-router/cache_aware"], "no simulation of that router exists"),
        (["--out", tmp_path / "none" / "rows.jsonl"], "No such file or directory"),
    ):
        result = invoke(group, [*asked, *map(str, wrong)])
        assert result.exit_code != 0 and message in result.output
