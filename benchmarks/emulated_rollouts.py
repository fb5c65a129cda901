"""Rollouts on emulated engines, for what measures the control plane: an engine takes exactly the time of its cost."""

from __future__ import annotations

from typing import Any

from distributed import Client

from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.batch import Batch
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout


def emulated(
    model: str, seconds_per_token: float, *, slots: int = 1024, max_model_len: int = 65_536, seed: int = 0
) -> EngineSpec:
    """An engine; of the model's directory it uses tokenizer and template alone."""
    options = EmulatedOptions({"seconds_per_token": seconds_per_token})
    return EngineSpec("emulated", model, slots=slots, max_model_len=max_model_len, seed=seed, options=options)


async def rolled_out(
    env: Any, spec: EngineSpec, count: int, *, tool_cpus: int, seed: int, budget: Budget | None = None
) -> Batch:
    """So many trajectories on a cluster of their own: scheduler, one rollout worker, one tool worker."""
    async with (
        LocalRolloutCluster(engines=1, tool_cpus=tool_cpus, dashboard=False, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        rollout = Rollout(client, env=env, model=spec.model, engines=spec, budget=budget, seed=seed)
        return completed(await rollout.run(count))


def completed(batch: Batch) -> Batch:
    """The batch.

    Raises
    ------
    RuntimeError
        A trajectory did not complete: its figures say nothing.
    """
    bad = [record for record in batch if record.status != "completed"]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(batch)} did not complete: {bad[0].cause}: {bad[0].detail}")
    return batch
