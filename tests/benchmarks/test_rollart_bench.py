"""``python -m benchmarks rollart``: its choice of experiments and its rows; the simulation has tests of its own."""

from dataclasses import replace

import pytest

from benchmarks.rollart.arms import TUNING_SEED, TrainingBench, base_job, ladder, with_rules
from benchmarks.rollart.experiments import EXPERIMENTS, about, chosen
from benchmarks.rollart.rows import RollartRow, rollart_tables
from benchmarks.rollart.workload import TaskMix
from heddle_dask.core.errors import BadInput


def test_experiments_are_chosen_by_name() -> None:
    assert chosen("sigma, alpha") == ["alpha", "sigma"]
    assert chosen("all") == list(EXPERIMENTS)
    for text in ("", "sigma,nonsense"):
        with pytest.raises(BadInput):
            chosen(text)
    assert all(about(name) for name in EXPERIMENTS)


def test_rows_compare_seed_by_seed_and_leave_out_the_tuning_seed() -> None:
    bench = TrainingBench((TUNING_SEED, 1, 2), lambda line: None)
    mix = TaskMix(0, ("game",), context_tokens=4_096)
    small = with_rules(
        replace(base_job(gpus=8), trainer_gpus=4, mix=mix, warm=0, steps=1), groups=1, members=2
    )
    arms = {name: of(small) for name, of in ladder().items() if name in ("Sync+", "One-off")}
    first, second = bench.rows("step", arms, "Sync+", paper={"One-off": "1.31"})
    assert (first.arm, first.ratio, first.seeds) == ("Sync+", 0.0, 2)
    assert second.ratio_least <= second.ratio <= second.ratio_most
    assert second.paper_ratio == "1.31"
    expected = sum(
        a.step_s / b.step_s
        for a, b in zip(bench.figures(arms["Sync+"]), bench.figures(arms["One-off"]), strict=True)
    )
    assert second.ratio == pytest.approx(expected / 2)


def test_a_table_has_the_columns_that_are_used() -> None:
    lines = rollart_tables(
        [RollartRow("step", "Sync", "8B", 100.0), RollartRow("step", "ours", "8B", 50.0, 2.0)]
    )
    assert lines[1:] == [
        "### step",
        "",
        "| arm | parameter | step | ratio |",
        "| --- | --- | --- | --- |",
        "| Sync | 8B | 100.0 s |  |",
        "| ours | 8B | 50.0 s | 2.00 |",
    ]
