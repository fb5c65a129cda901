"""Training in virtual time: the bound holds, no sample is lost or used twice, and times add up."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rollart.training.environments import ResetTimes
from benchmarks.rollart.training.rules import TrainingRules
from benchmarks.rollart.training_job import TrainingJob, run_training_job
from benchmarks.rollart.workload import TaskMix
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.batching import ContinuousBatch
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.sim.kv_cache import CountedKvCache, SimulatedJob

MIX = TaskMix(0, ("webshop", "game", "math"), context_tokens=8_192)


def small(rules: TrainingRules, seed: int = 1, **changes: object) -> TrainingJob:
    job = TrainingJob(rules, seed, gpus=8, trainer_gpus=4, mix=MIX, warm=1, steps=2)
    return replace(job, **changes)  # type: ignore[arg-type]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1_000),
    alpha=st.integers(1, 3),
    staleness=st.sampled_from(["cancel", "pace"]),
    switch=st.sampled_from(["before-batch", "after-batch"]),
    more_members=st.integers(0, 1),
    more_groups=st.integers(0, 1),
    same_reward_share=st.sampled_from([0.0, 0.4]),
    order=st.sampled_from(["one-by-one", "all-at-once"]),
    gpu=st.sampled_from(["h20", "h800"]),
    failing=st.booleans(),
)
def test_no_batch_has_a_sample_beyond_alpha_and_none_is_used_twice(
    seed: int,
    alpha: int,
    staleness: str,
    switch: str,
    more_members: int,
    more_groups: int,
    same_reward_share: float,
    order: str,
    gpu: str,
    failing: bool,
) -> None:
    """Whatever the speed of engines and environments, and where resets hang or fail."""
    resets = {"reset_tail_share": 0.05, "reset_limit_s": 300.0, "reset_failure_share": 0.1} if failing else {}
    rules = TrainingRules(
        groups=2,
        members=3,
        alpha=alpha,
        staleness=staleness,  # type: ignore[arg-type]
        switch=switch,  # type: ignore[arg-type]
        more_members=more_members,
        more_groups=more_groups,
        order=order,  # type: ignore[arg-type]
    )
    mix = replace(MIX, seed=seed, same_reward_share=same_reward_share, **resets)  # type: ignore[arg-type]
    figures = run_training_job(small(rules, seed, mix=mix, gpu=gpu))
    assert set(figures.ages) <= set(range(alpha + 1))
    names = [name for batch in figures.batches for name in batch.names]
    assert max(Counter(names).values()) == 1
    assert all(len(batch.names) == rules.batch_trajectories for batch in figures.batches)
    assert all(mix.has_spread(name.rpartition("-")[0]) for name in names)


def test_pace_cancels_nothing() -> None:
    assert not run_training_job(small(TrainingRules(groups=2, members=3, staleness="pace"))).wasted_tokens


def test_a_group_without_a_spread_is_replaced_and_its_tokens_are_counted() -> None:
    rules = TrainingRules(groups=4, members=3, staleness="pace")
    plain = run_training_job(small(rules, steps=6))
    half = run_training_job(small(rules, steps=6, mix=replace(MIX, same_reward_share=0.5)))
    assert set(half.wasted_tokens) == {"no-variance"}
    assert half.wasted_share == pytest.approx(0.5, abs=0.25)
    assert half.step_s > plain.step_s


def test_without_a_check_at_turns_samples_may_exceed_the_bound() -> None:
    rules = TrainingRules(groups=2, members=3, checks="start")
    figures = run_training_job(small(rules, steps=12))
    assert not figures.wasted_tokens
    assert max(figures.ages) > rules.alpha


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    job = small(TrainingRules("sync", groups=2, members=3), reward_places=2)
    figures = run_training_job(job)
    assert set(figures.ages) == {0}
    times = job.times
    for before, batch in zip(figures.batches, figures.batches[1:], strict=False):
        train_s = times.train_s(batch.tokens)
        update_s = times.publish_s + times.fetch_s + times.install_s
        reward_s = batch.trained_s - train_s - batch.taken_s
        rollout_s = batch.taken_s - before.trained_s - update_s
        assert rollout_s > 0 and reward_s > 0
        whole_s = batch.trained_s - before.trained_s
        assert whole_s == pytest.approx(rollout_s + reward_s + train_s + update_s)
        # No trajectory can take less than the decoding of its tokens, one after the other.
        assert rollout_s > max(batch.lengths) * 1e-3


def test_lockstep_is_never_faster() -> None:
    each = small(TrainingRules("sync", groups=2, members=3), trainer_gpus=0, transfer="colocated")
    together = replace(each, lockstep=6)
    assert run_training_job(together).rollout_s >= run_training_job(each).rollout_s


def test_redundant_members_shorten_a_rollout_and_are_counted() -> None:
    plain = small(TrainingRules("sync", groups=4, members=4))
    more = replace(plain, rules=replace(plain.rules, more_members=2, more_groups=1))
    assert run_training_job(more).rollout_s < run_training_job(plain).rollout_s
    assert set(run_training_job(more).wasted_tokens) == {"redundant"}


def test_a_reset_that_hangs_is_repeated_at_its_limit() -> None:
    hanging = ResetTimes(5.0, 0.1, tail_share=0.5, tail_s=300.0)
    limited = replace(hanging, limit_s=20.0)
    names = [f"trajectory-{number}" for number in range(200)]
    assert max(hanging.seconds(name) for name in names) > 300
    assert max(limited.seconds(name) for name in names) < 200
    assert ResetTimes().seconds("any") == 0
    failing = ResetTimes(5.0, 0.1, failure_share=0.3, failure_s=60.0)
    assert any(60 < failing.seconds(name) < 70 for name in names)


def test_a_pause_moves_the_rest_of_a_job_and_recomputes_its_cache() -> None:
    def ended_s(seconds: float, recompute: bool) -> float:
        cache = CountedKvCache(10_000)
        batch: ContinuousBatch[SimulatedJob] = ContinuousBatch(
            EngineCost(0.01, prefill_token_s=1e-3), slots=4, kv_cache=cache
        )
        job = SimulatedJob(prompt_tokens=100, length=50, trajectory_id="t", group_id="g", shared_tokens=0)
        batch.submit(job, 0.0)
        if seconds:
            batch.pause(0.3, seconds, recompute=recompute)
            if recompute:
                cache.forget_idle()
        while batch.next_s < float("inf"):
            batch.advance(batch.next_s)
        assert job.generated == 50
        return job.ended_s

    plain_s = ended_s(0.0, False)
    assert ended_s(2.0, False) == pytest.approx(plain_s + 2.0, abs=0.02)
    again_s = 0.1  # 100 tokens of prompt, and those sampled before
    assert plain_s + 2.0 + again_s < ended_s(2.0, True) < plain_s + 2.0 + 2 * again_s


def test_impossible_rules() -> None:
    with pytest.raises(BadInput):
        TrainingRules(alpha=-1)
    with pytest.raises(BadInput):
        TrainingRules(members=0)


SCRIPT = """
import json
from test_sim_training import TrainingRules, run_training_job, small
figures = run_training_job(small(TrainingRules(groups=2, members=3)))
print(json.dumps([[batch.names, batch.trained_s] for batch in figures.batches]))
"""


def test_the_same_under_two_hash_seeds() -> None:
    def printed(hash_seed: str) -> object:
        paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return json.loads(done.stdout)

    assert printed("1") == printed("2")
