"""The small world of actions: the same for every strategy, the same twice, and what the defaults rest on."""

from __future__ import annotations

from benchmarks.actions.ablation import ARMS, ablation_rows
from benchmarks.actions.action_world import AblationBatch, ActionWorld
from benchmarks.opponents import FIXED

SMALL = AblationBatch(12, steps=3)


def test_every_arm_runs_the_same_batch_to_its_end() -> None:
    rows = list(ablation_rows(SMALL, [(arm, True) for arm in ARMS], hosts=1, cpus=32, seeds=[1]))
    assert [row.arm for row in rows] == list(ARMS)
    assert all(row.mean_s > 0 and row.makespan_s > row.mean_s for row in rows)


def test_the_same_seed_gives_the_same_figures() -> None:
    def played(seed: int) -> tuple[float, float]:
        world = ActionWorld(SMALL.lives(seed), "elastic,order=tail", hosts=2, cpus=16, known=False, seed=seed)
        figures = world.run()
        return figures.mean_s, figures.makespan_s

    assert played(3) == played(3) != played(4)


def test_elastic_units_complete_actions_sooner_than_the_best_fixed_number() -> None:
    arms = [(f"{FIXED},units={n}", True) for n in (2, 4, 6, 8)]
    workload = AblationBatch(64)
    fixed = [row.mean_s for row in ablation_rows(workload, arms, hosts=1, cpus=64, seeds=[1])]
    (elastic,) = ablation_rows(workload, [("elastic", True)], hosts=1, cpus=64, seeds=[1])
    assert elastic.mean_s < min(fixed)
