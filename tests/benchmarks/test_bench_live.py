"""What ``heddle bench live`` makes of its rows."""

from __future__ import annotations

from heddle_dask.benchmarks.live import outlasted_moves, summary
from heddle_dask.benchmarks.live_setup import LiveRow


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
