"""What the world announces to the controller: frozen descriptions, facts only.

Nothing here is a verdict. Thresholds and decisions live in strategies, mutable records in `state`.
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
        What the attempts at one prompt share.
    sample_index
        Position in the group, from 0.
    domain
        Name of the environment and kind of task (`joined_domain`): a predictor's feature, never a rule's.
    prompt_tokens
        Estimated length of the first prompt; 0 when unknown.
    message_tokens
        Length of the task itself, without what stands before every task; 0 when unknown.
    max_steps
        Limit of its LLM steps; 0 when there is none that the task names.
    resumed_tokens
        Tokens that it generated before this session, which a journal holds: what is seen of it is not the whole.
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
    """One name for what predictors tell apart, from the widest to the narrowest; empty parts are left out."""
    return "/".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One LLM step that waits to be placed.

    Attributes
    ----------
    context_tokens
        Tokens in front of the model, those it has already generated in this step included.
    max_new_tokens
        Upper limit of what this request may still generate.
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
        Bytes of KV cache that one token takes over all its GPUs; 0 when unknown.
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
        The least it needs to start and the most it can use (ARL-Tangram: elastic actions); 0 and 0 when it only
        waits for somebody else.
    pool
        Which kind of host may run it.
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
