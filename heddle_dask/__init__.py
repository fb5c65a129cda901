"""Agentic-RL rollouts on Dask clusters with vLLM, and a short tail of long trajectories.

The public names are loaded when they are first used: engines, watchdogs and the command line import this package at
every start and need none of them.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from heddle_dask.apis.http_calls import HttpAnswer, http_call
    from heddle_dask.apis.remote_model import RemoteModel
    from heddle_dask.apis.rewarded import FunctionReward, HttpReward, JudgeReward, ServiceReward, rewarded
    from heddle_dask.core.errors import BadInput
    from heddle_dask.core.needs import Needs
    from heddle_dask.core.nouns import DurationProfile
    from heddle_dask.core.resources import ApiQuota, QuotaWindow
    from heddle_dask.core.run_description import RetryPolicy
    from heddle_dask.core.sampling import StructuredOutput
    from heddle_dask.engines.model_services.spec import ServiceSpec
    from heddle_dask.engines.spec import EngineSpec
    from heddle_dask.engines.vllm_command import VllmOptions
    from heddle_dask.environments.api_errors import RateLimited, Retry
    from heddle_dask.environments.base import ActionFailed, Context, Environment, Reply, Reward, Task
    from heddle_dask.environments.function_tools import ToolAgent
    from heddle_dask.environments.rewards import RewardContext, Transcript
    from heddle_dask.isolation.granted import report_use
    from heddle_dask.live.clusters.local import LocalRolloutCluster
    from heddle_dask.live.clusters.slurm.cluster import SlurmCluster
    from heddle_dask.live.driver.batch import Batch
    from heddle_dask.live.driver.connection.control_channel import ClusterLost
    from heddle_dask.live.driver.inputs.pools import Pools
    from heddle_dask.live.driver.inputs.rollout_inputs import ChatModel, Output
    from heddle_dask.live.driver.inputs.telemetry import Telemetry
    from heddle_dask.live.driver.options import Budget, Engines, Patience, Sampling
    from heddle_dask.live.driver.rollout import Rollout
    from heddle_dask.records.store import RunReader
    from heddle_dask.records.trajectory_prefix import TrajectoryPrefix
    from heddle_dask.strategies.presets import Strategy

_PLACES = {
    "ActionFailed": "heddle_dask.environments.base",
    "ApiQuota": "heddle_dask.core.resources",
    "BadInput": "heddle_dask.core.errors",
    "Batch": "heddle_dask.live.driver.batch",
    "Budget": "heddle_dask.live.driver.options",
    "ChatModel": "heddle_dask.live.driver.inputs.rollout_inputs",
    "ClusterLost": "heddle_dask.live.driver.connection.control_channel",
    "Context": "heddle_dask.environments.base",
    "DurationProfile": "heddle_dask.core.nouns",
    "EngineSpec": "heddle_dask.engines.spec",
    "Engines": "heddle_dask.live.driver.options",
    "Environment": "heddle_dask.environments.base",
    "FunctionReward": "heddle_dask.apis.rewarded",
    "HttpAnswer": "heddle_dask.apis.http_calls",
    "HttpReward": "heddle_dask.apis.rewarded",
    "JudgeReward": "heddle_dask.apis.rewarded",
    "RemoteModel": "heddle_dask.apis.remote_model",
    "LocalRolloutCluster": "heddle_dask.live.clusters.local",
    "Needs": "heddle_dask.core.needs",
    "Output": "heddle_dask.live.driver.inputs.rollout_inputs",
    "Patience": "heddle_dask.live.driver.options",
    "Pools": "heddle_dask.live.driver.inputs.pools",
    "QuotaWindow": "heddle_dask.core.resources",
    "RateLimited": "heddle_dask.environments.api_errors",
    "Reply": "heddle_dask.environments.base",
    "Retry": "heddle_dask.environments.api_errors",
    "RetryPolicy": "heddle_dask.core.run_description",
    "Reward": "heddle_dask.environments.base",
    "RewardContext": "heddle_dask.environments.rewards",
    "Rollout": "heddle_dask.live.driver.rollout",
    "RunReader": "heddle_dask.records.store",
    "Sampling": "heddle_dask.live.driver.options",
    "ServiceSpec": "heddle_dask.engines.model_services.spec",
    "ServiceReward": "heddle_dask.apis.rewarded",
    "SlurmCluster": "heddle_dask.live.clusters.slurm.cluster",
    "Strategy": "heddle_dask.strategies.presets",
    "StructuredOutput": "heddle_dask.core.sampling",
    "Task": "heddle_dask.environments.base",
    "Telemetry": "heddle_dask.live.driver.inputs.telemetry",
    "ToolAgent": "heddle_dask.environments.function_tools",
    "TrajectoryPrefix": "heddle_dask.records.trajectory_prefix",
    "Transcript": "heddle_dask.environments.rewards",
    "VllmOptions": "heddle_dask.engines.vllm_command",
    "http_call": "heddle_dask.apis.http_calls",
    "report_use": "heddle_dask.isolation.granted",
    "rewarded": "heddle_dask.apis.rewarded",
}

__all__ = [
    "ActionFailed",
    "ApiQuota",
    "BadInput",
    "Batch",
    "Budget",
    "ChatModel",
    "ClusterLost",
    "Context",
    "DurationProfile",
    "EngineSpec",
    "Engines",
    "Environment",
    "FunctionReward",
    "HttpAnswer",
    "HttpReward",
    "JudgeReward",
    "LocalRolloutCluster",
    "Needs",
    "Output",
    "Patience",
    "Pools",
    "QuotaWindow",
    "RateLimited",
    "RemoteModel",
    "Reply",
    "Retry",
    "RetryPolicy",
    "Reward",
    "RewardContext",
    "Rollout",
    "RunReader",
    "Sampling",
    "ServiceReward",
    "ServiceSpec",
    "SlurmCluster",
    "Strategy",
    "StructuredOutput",
    "Task",
    "Telemetry",
    "ToolAgent",
    "TrajectoryPrefix",
    "Transcript",
    "VllmOptions",
    "http_call",
    "report_use",
    "rewarded",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("heddle-dask")
    if name not in _PLACES:
        raise AttributeError(f"module 'heddle_dask' has no attribute '{name}'")
    collects = gc.isenabled()
    gc.disable()  # of what is loaded nothing is garbage, and to look for it takes a tenth of the time
    try:
        return getattr(import_module(_PLACES[name]), name)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
