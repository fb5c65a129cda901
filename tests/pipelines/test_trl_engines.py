"""A rollout whose engines follow a trainer's weights, as TRL's rollout function drives it; emulated engines install."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds.live_world import emulated
from worlds.shared_cluster import shared_cluster_sync

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Task
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.weights.store import WeightStore

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.cluster

MODEL = Path(__file__).parents[2] / "pipelines/tiny_agent/checkpoint"


async def solve(task: Task, ctx: Any) -> float:
    ctx.append("user", task.prompt)
    step = await ctx.generate(max_tokens=8)
    return float(sum(step.token_ids) % 2)


def weights_of(step: int) -> dict[str, Any]:
    """The whole weights of a model in training."""
    from safetensors.torch import load_file

    weights = {name: one + step for name, one in load_file(MODEL / "model.safetensors").items()}
    # Tied weights have two names in the state of a model, and one in its files.
    return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}


def versions(records: Any) -> set[int]:
    return {int(v) for one in records for b in one.branches for v in np.unique(b.policy_version[b.loss_mask])}


def test_what_is_rolled_out_after_a_step_was_sampled_by_its_weights(tmp_path: Path) -> None:
    from heddle_dask.training.trl_rollouts import TrlRollouts
    from pipelines.any_trainer.following_engines import FollowingEngines

    tasks = [Task(name, f"Task {name}.") for name in "ab"]
    store = tmp_path / "weights"
    with (
        shared_cluster_sync() as client,
        Rollout(client, env=solve, model=MODEL, engines=emulated(str(MODEL))) as rollout,
    ):
        engines = FollowingEngines(rollout, tasks, str(store))
        attempts = TrlRollouts(engines)
        trainer = trainer_at(0)
        rows = attempts(["a", "a", "b", "b"], trainer)
        assert len(rows["completion_ids"]) == 4
        for step in (1, 2):
            trainer.state.global_step = step
            trainer.model_wrapped = weights_of(step)
            attempts(["a", "a", "b", "b"], trainer)  # it refuses tokens of another version than `step`
            assert versions(engines.roll_out(["a"], 3)) == {step}
        assert [version.number for version in WeightStore(str(store)).versions("trainer")] == [2]
        with pytest.raises(BadInput, match="the dataset names the task 'c'"):
            list(engines.roll_out(["c"], 1))
        # A trainer that goes on from a checkpoint: no engine has its weights.
        with Rollout(client, env=solve, model=MODEL, engines=emulated(str(MODEL))) as rollout:
            engines = FollowingEngines(rollout, tasks, str(store), lineage="again")
            trainer.state.global_step = 40
            TrlRollouts(engines)(["a", "a"], trainer)
            assert versions(engines.roll_out(["a"], 3)) == {40}


def trainer_at(step: int) -> Any:
    """The part of a GRPOTrainer that the rollout function reads."""
    from types import SimpleNamespace

    args = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    return SimpleNamespace(
        args=SimpleNamespace(**args),
        use_vllm=False,
        state=SimpleNamespace(global_step=step),
        model=None,
        model_wrapped=None,
        accelerator=SimpleNamespace(get_state_dict=lambda model: model, unwrap_model=lambda model: model),
    )
