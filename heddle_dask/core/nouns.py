"""Frozen descriptions of trajectories, engines, actions and hosts, as announced to the controller.

They contain facts only. Thresholds and decisions belong to strategies, mutable records to `state`.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, StepId, TrajectoryId


@dataclass(frozen=True, slots=True)
class TrajectorySpec:
    """One attempt of an agent at one prompt.

    Attributes
    ----------
    group_id
        Group of attempts at one prompt.
    sample_index
        Position in the group, from 0.
    domain
        Name of the environment and kind of task (`joined_domain`); a feature for predictors only.
    prompt_tokens
        Estimated length of the first prompt; 0 when unknown.
    message_tokens
        Length of the task itself, without the part of the prompt that all tasks share; 0 when unknown.
    max_steps
        Limit of its LLM steps; 0 when the task names none.
    resumed_tokens
        Tokens generated before this session, from a journal. Above 0, this session sees only part of the trajectory.
    """

    trajectory_id: TrajectoryId
    group_id: GroupId
    sample_index: int = 0
    domain: str = ""
    prompt_tokens: int = 0
    message_tokens: int = 0
    max_steps: int = 0
    resumed_tokens: int = 0


def joined_domain(*parts: str) -> str:
    """A domain name from its parts, from the widest to the narrowest; empty parts are left out."""
    return "/".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One LLM step that waits to be placed.

    Attributes
    ----------
    context_tokens
        Context tokens, including those already generated in this step.
    max_new_tokens
        Upper limit of the tokens that this request may still generate.
    """

    step_id: StepId
    context_tokens: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """One running model server. `engine_id` names this incarnation: a restart gets another id.

    Attributes
    ----------
    kv_bytes_per_token
        Bytes of KV cache of one token over all GPUs of the engine; 0 when unknown.
    """

    engine_id: EngineId
    slots: int
    max_context_tokens: int
    tp_degree: int = 1
    kv_capacity_tokens: int = 0
    policy_version: int = 0
    kv_transfer: bool = False
    kv_bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """One tool or reward call that waits for resources.

    Attributes
    ----------
    min_cpus, max_cpus
        The minimum it needs to start and the maximum it can use (ARL-Tangram: elastic actions); 0 and 0 when it only
        waits for a remote service.
    pool
        Kind of host that may run it.
    """

    action_id: ActionId
    trajectory_id: TrajectoryId
    kind: str
    label: str
    min_cpus: int = 1
    max_cpus: int = 1
    pool: str = "cpu"


@dataclass(frozen=True, slots=True)
class HostDescription:
    """A worker that runs actions. `host_id` names this incarnation."""

    host_id: HostId
    cpus: int
    pool: str = "cpu"
