"""Agentic-RL rollouts on Dask clusters with vLLM, and a short tail of long trajectories.

The public names are loaded when they are first used: engines, watchdogs and the command line import this package at
every start and need none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heddle_dask.core.errors import BadInput
    from heddle_dask.core.retries import RetryPolicy
    from heddle_dask.core.sampling import StructuredOutput
    from heddle_dask.engines.spec import EngineSpec
    from heddle_dask.engines.vllm_command import VllmOptions
    from heddle_dask.environments.base import ActionFailed, Context, Environment, Reply, Reward, Task
    from heddle_dask.live.clusters.local import LocalRolloutCluster
    from heddle_dask.live.clusters.slurm.cluster import SlurmCluster
    from heddle_dask.live.driver.batch import Batch
    from heddle_dask.live.driver.capacity import Patience
    from heddle_dask.live.driver.control_channel import ClusterLost
    from heddle_dask.live.driver.rollout import Rollout
    from heddle_dask.live.driver.rollout_inputs import ChatModel, Engines, Output
    from heddle_dask.live.driver.services import Budget, Sampling
    from heddle_dask.live.driver.telemetry import Telemetry
    from heddle_dask.records.store import RunReader
    from heddle_dask.strategies.presets import Strategy

_PLACES = {
    "ActionFailed": "heddle_dask.environments.base",
    "BadInput": "heddle_dask.core.errors",
    "Batch": "heddle_dask.live.driver.batch",
    "Budget": "heddle_dask.live.driver.services",
    "ChatModel": "heddle_dask.live.driver.rollout_inputs",
    "ClusterLost": "heddle_dask.live.driver.control_channel",
    "Context": "heddle_dask.environments.base",
    "EngineSpec": "heddle_dask.engines.spec",
    "Engines": "heddle_dask.live.driver.rollout_inputs",
    "Environment": "heddle_dask.environments.base",
    "LocalRolloutCluster": "heddle_dask.live.clusters.local",
    "Output": "heddle_dask.live.driver.rollout_inputs",
    "Patience": "heddle_dask.live.driver.capacity",
    "Reply": "heddle_dask.environments.base",
    "RetryPolicy": "heddle_dask.core.retries",
    "Reward": "heddle_dask.environments.base",
    "Rollout": "heddle_dask.live.driver.rollout",
    "RunReader": "heddle_dask.records.store",
    "Sampling": "heddle_dask.live.driver.services",
    "SlurmCluster": "heddle_dask.live.clusters.slurm.cluster",
    "Strategy": "heddle_dask.strategies.presets",
    "StructuredOutput": "heddle_dask.core.sampling",
    "Task": "heddle_dask.environments.base",
    "Telemetry": "heddle_dask.live.driver.telemetry",
    "VllmOptions": "heddle_dask.engines.vllm_command",
}

__all__ = [
    "ActionFailed",
    "BadInput",
    "Batch",
    "Budget",
    "ChatModel",
    "ClusterLost",
    "Context",
    "EngineSpec",
    "Engines",
    "Environment",
    "LocalRolloutCluster",
    "Output",
    "Patience",
    "Reply",
    "RetryPolicy",
    "Reward",
    "Rollout",
    "RunReader",
    "Sampling",
    "SlurmCluster",
    "Strategy",
    "StructuredOutput",
    "Task",
    "Telemetry",
    "VllmOptions",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'heddle_dask' has no attribute '{name}'")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
