"""The small world of actions: the same for every strategy, the same twice, and what the defaults rest on."""

from __future__ import annotations

from benchmarks.actions.ablation import ARMS, ablation_rows
from benchmarks.actions.action_world import AblationBatch, WorldJob, run_world
from benchmarks.experiments import Study
from benchmarks.opponents import FIXED
from benchmarks.row_file import RowFile
from benchmarks.runner import Runner

SMALL = AblationBatch(12, steps=3)
STUDY = Study(Runner(RowFile(), "code", lambda line: None), [1])


def test_every_arm_runs_the_same_batch_to_its_end() -> None:
    rows = ablation_rows(STUDY, [WorldJob(SMALL, arm, cpus=32) for arm in ARMS])
    assert [row.arm for row in rows] == list(ARMS)
    assert all(row.act_mean_s > 0 and row.step_s > row.act_mean_s for row in rows)


def test_the_same_seed_gives_the_same_figures() -> None:
    first, again, other = (
        run_world(WorldJob(SMALL, "elastic,order=tail", hosts=2, cpus=16, known=False, seed=seed)) for seed in (3, 3, 4)
    )
    assert first == again != other


def test_elastic_units_complete_actions_sooner_than_the_best_fixed_number() -> None:
    arms = ("elastic", *(f"{FIXED},units={n}" for n in (2, 4, 6, 8)))
    elastic, *fixed = ablation_rows(STUDY, [WorldJob(AblationBatch(64), arm, cpus=64) for arm in arms])
    assert elastic.act_mean_s < min(row.act_mean_s for row in fixed)
