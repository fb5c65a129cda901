"""``python -m benchmarks rollart``: its choice of experiments and its rows; the simulation has tests of its own."""

from dataclasses import replace

import pytest

from benchmarks.experiments import Study
from benchmarks.rollart.arms import TUNING_SEED, TrainingBench, base_job, ladder, with_rules
from benchmarks.rollart.experiments import EXPERIMENTS
from benchmarks.rollart.rows import RollartRow
from benchmarks.rollart.workload import TaskMix
from benchmarks.row_file import RowFile
from benchmarks.runner import Runner
from benchmarks.tables import experiment_tables
from heddle_dask.core.errors import BadInput


def test_experiments_are_chosen_by_name() -> None:
    assert EXPERIMENTS.chosen("sigma, alpha") == ["alpha", "sigma"]
    assert EXPERIMENTS.chosen("all") == list(EXPERIMENTS.by_name)
    for text in ("", "sigma,nonsense"):
        with pytest.raises(BadInput):
            EXPERIMENTS.chosen(text)
    assert all(one.about for one in EXPERIMENTS.by_name.values())


def test_rows_compare_seed_by_seed_and_leave_out_the_tuning_seed() -> None:
    said: list[str] = []
    bench = TrainingBench(Study(Runner(RowFile(), "code", said.append), (TUNING_SEED, 1, 2)))
    mix = TaskMix(0, ("game",), context_tokens=4_096)
    small = with_rules(replace(base_job(gpus=8), trainer_gpus=4, mix=mix, warm=0, steps=1), groups=1, members=2)
    arms = {name: of(small) for name, of in ladder().items() if name in ("Sync+", "One-off")}
    first, second = bench.rows("step", arms, "Sync+", paper={"One-off": "1.31"})
    assert (first.arm, first.ratio, first.seeds) == ("Sync+", 0.0, 2)
    assert second.ratio_least <= second.ratio <= second.ratio_most
    assert second.paper_ratio == "1.31"
    expected = sum(
        a.step_s / b.step_s for a, b in zip(bench.figures(arms["Sync+"]), bench.figures(arms["One-off"]), strict=True)
    )
    assert second.ratio == pytest.approx(expected / 2)
    assert len(said) == 4, "each run once"


def test_a_table_has_the_columns_that_are_used() -> None:
    lines = experiment_tables(
        [RollartRow("step", "Sync", "8B", 100.0), RollartRow("step", "ours", "8B", 50.0, ratio=2.0)]
    )
    assert lines[1:] == [
        "### step",
        "",
        "| arm | parameter | step | ratio |",
        "|---|---|---|---|",
        "| Sync | 8B | 100.0 s |  |",
        "| ours | 8B | 50.0 s | 2.00 |",
    ]
