"""``python -m benchmarks rollart``: its choice of experiments and its rows; the simulation has tests of its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.experiments import Study
from benchmarks.rollart.arms import OURS, TUNING_SEED, TrainingBench, base_job, ladder, shipped, with_rules
from benchmarks.rollart.experiments import EXPERIMENTS
from benchmarks.rollart.rows import RollartRow
from benchmarks.rollart.training_job import StepFigures, step_figures
from benchmarks.rollart.workload import TaskMix
from benchmarks.row_file import RowFile
from benchmarks.runner import KeptRows, Runner
from benchmarks.tables import experiment_tables
from heddle_dask.core.errors import BadInput
from heddle_dask.core.run_description import WeightUpdatePolicy
from heddle_dask.training.plan import plan_of_mode


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


def test_the_arm_as_shipped_does_what_the_command_does_without_options() -> None:
    rules = shipped(base_job()).rules
    assert rules.plan(5) == plan_of_mode("async", 5)
    assert (rules.more_groups, rules.more_members, rules.staleness) == (0, 0, "cancel")
    assert rules.run.weights == WeightUpdatePolicy()
    assert rules == OURS["alpha 2, cancel"](base_job()).rules, "its rows are those of this choice"


def test_kept_rows_of_any_code_make_tables_and_nothing_runs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    mix = TaskMix(0, ("game",), context_tokens=4_096)
    job = with_rules(replace(base_job(gpus=8), trainer_gpus=4, mix=mix, warm=0, steps=1), groups=1, members=2)
    made = TrainingBench(Study(Runner(RowFile(path), "old code", lambda _: None), (1,)))
    rows = made.rows("step", {"One-off": with_rules(job, mode="one-off")}, [1.0])
    kept = TrainingBench(Study(KeptRows(path), (1,)))
    assert kept.rows("step", {"One-off": with_rules(job, mode="one-off")}, [1.0]) == rows
    with pytest.raises(BadInput, match="lacks 1 rows"):
        kept.figures(job)


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


ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "rollart_steps.jsonl"
TABLES = {"step-8b": 3, "step-14b": 3, "step-32b": 3}
TABLES |= {"bound-1": 2, "bound-2": 2, "spread": 2, "sigma": 2, "redundancy": 2}
"""Experiments whose tables ``benchmarks/training_simulated.md`` has, and their seeds, from 1."""


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_page_are_those_of_its_rows(name: str) -> None:
    rows = EXPERIMENTS.measured([name], Study(KeptRows(ROWS), range(1, 1 + TABLES[name])))
    page = (ROOT / "benchmarks" / "training_simulated.md").read_text()
    assert "\n".join(experiment_tables(rows)).strip() in page, "print it by --kept, and put it into the page"


def test_a_row_is_what_its_job_gives_today() -> None:
    job = shipped(base_job()).seeded(1)
    (kept,) = KeptRows(ROWS).figures(StepFigures, step_figures, [job], lambda job, figures: "")
    today, why = step_figures(job), "the code decides otherwise: measure the rows of the page again"
    assert (today.ages, today.wasted_tokens, today.sampled_tokens) == (
        kept.ages,
        kept.wasted_tokens,
        kept.sampled_tokens,
    ), why
    assert (today.step_s, today.tokens) == pytest.approx((kept.step_s, kept.tokens)), why
