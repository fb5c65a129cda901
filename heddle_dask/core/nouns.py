"""Frozen descriptions of trajectories, engines, actions and hosts, as announced to the controller.

They contain facts only. Thresholds and decisions belong to strategies, mutable records to `state`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from heddle_dask.core.ids import FIRST_RUN, ActionId, EngineId, GroupId, HostId, RunId, StepId, TrajectoryId
from heddle_dask.core.resources import CPUS, ONE_CPU, ResourceDemand, Resources

# Factor that combines level and tokens into one number for engines; larger than any context.
LEVEL_TOKENS = 2**24


class Priority(NamedTuple):
    """Larger runs first; compared by `level`, then by `tokens`.

    Attributes
    ----------
    level
        The level of the step. Strategies without levels leave it at 0.
    tokens
        Tokens of work, from 0 on. They order the steps of one level.
    """

    level: int = 0
    tokens: float = 0.0

    @property
    def number(self) -> float:
        """The same order as one number, larger first. Exact for `tokens` below `LEVEL_TOKENS`."""
        return self.level * LEVEL_TOKENS + self.tokens


NORMAL = Priority()


Quantile = Literal["median", "q90"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Remaining work of a trajectory, counted from its last finished step to its end.

    Attributes
    ----------
    tokens, tokens_q90
        Median and 0.9 quantile of the tokens still to be generated.
    source
        The model of the prediction: ``xgboost``, ``group history``, ``prompt only``, ``constant``, ``oracle``,
        ``noisy oracle``.
    tools_s
        Seconds of tool calls still to come; 0 when unknown.
    observation_tokens
        Tokens that these tools will add to the context; None when unknown.
    observation_per_token
        Observation tokens per generated token, over all finished trajectories that the predictor has observed; None
        before the first.
    learnt_from
        Finished trajectories that the predictor had observed at the fit of its model, those of earlier runs included;
        None: it does not learn.
    """

    tokens: float
    tokens_q90: float
    source: str = ""
    tools_s: float = 0.0
    observation_tokens: float | None = None
    observation_per_token: float | None = None
    learnt_from: int | None = None

    def quantile_tokens(self, quantile: Quantile) -> float:
        """`tokens` or `tokens_q90`."""
        return self.tokens_q90 if quantile == "q90" else self.tokens

    @property
    def is_exact(self) -> bool:
        """Whether both quantiles are equal, as for an oracle."""
        return self.tokens == self.tokens_q90


@dataclass(frozen=True, slots=True)
class DurationProfile:
    """Seconds of an action by its units: Amdahl's law (ARL-Tangram, section 4.1: T_ori and E).

    Attributes
    ----------
    serial_share
        Share of these seconds that more units do not shorten: 0 scales perfectly, 1 not at all.
    """

    one_unit_s: float
    serial_share: float = 0.0

    def seconds(self, units: int) -> float:
        """Seconds with `units` units (at least one)."""
        return self.one_unit_s * (self.serial_share + (1.0 - self.serial_share) / max(1, units))


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
    run_id
        The run that it belongs to.
    prompt_key
        Identity of the prompt, the same in every run and epoch; empty: the group stands for it.
    """

    trajectory_id: TrajectoryId
    group_id: GroupId
    sample_index: int = 0
    domain: str = ""
    prompt_tokens: int = 0
    message_tokens: int = 0
    max_steps: int = 0
    resumed_tokens: int = 0
    run_id: RunId = FIRST_RUN
    prompt_key: str = ""


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
    lineage
        The line of training that `policy_version` counts in; empty: the weights that it was started with.
    hardware
        Class of its GPUs, as the user names it (``"H20"``); empty: all engines are alike.
    cost
        What its kind believes it to cost by the GPU that it runs on: the terms of a cost, as JSON; empty:
        nothing is known.
    """

    engine_id: EngineId
    slots: int
    max_context_tokens: int
    tp_degree: int = 1
    kv_capacity_tokens: int = 0
    policy_version: int = 0
    kv_transfer: bool = False
    kv_bytes_per_token: float = 0.0
    lineage: str = ""
    hardware: str = ""
    cost: str = ""


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """One tool or reward call that waits for resources.

    Attributes
    ----------
    demand
        What it needs of each resource; nothing when it only waits for a remote service.
    pool
        Kind of host that may run it.
    service
        Model service that must be resident on its GPUs; empty: none.
    sandbox
        Sandbox whose state it needs. The first action of a sandbox chooses the host, and the later ones run there;
        empty: none.
    profile
        How long it runs with how many units, where its program declares it; None: learned by `label`.
    timeout_s
        Seconds after which its worker ends it; None: never.
    attempt
        0 at first; incremented for each repetition after a refused or failed call of an API.
    sandbox_memory_bytes
        Memory of its host that its sandbox reserves until the sandbox is closed.
    sandbox_parent
        Sandbox of which its sandbox is a copy: the host of that one is taken if it has the memory; empty: none.
    """

    action_id: ActionId
    trajectory_id: TrajectoryId
    kind: str
    label: str
    demand: ResourceDemand = ONE_CPU
    pool: str = "cpu"
    service: str = ""
    sandbox: str = ""
    profile: DurationProfile | None = None
    timeout_s: float | None = None
    attempt: int = 0
    sandbox_memory_bytes: int = 0
    sandbox_parent: str = ""


@dataclass(frozen=True, slots=True)
class ActionWaits:
    """Parts of an action's wait that were for something else than the resources of a host, in seconds.

    Attributes
    ----------
    quota_s
        It waited for the quota of an API.
    load_s
        It waited until its model service was resident.
    """

    quota_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostDescription:
    """A worker that runs actions. `host_id` names this incarnation."""

    host_id: HostId
    resources: Resources
    pool: str = "cpu"

    @property
    def cpus(self) -> int:
        """Its CPUs."""
        return self.resources[CPUS]


# Values of TP-degree planning: the request with its facts, and the plan.
#
# Engines change between batches only. The body announces a batch (`DegreesRequested`); the controller commands a search
# (`PlanDegrees`), checks the answer (`DegreesPlanned`) and commands the deployment (`DeployEngines`).


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """A node: its number of GPUs, and of workers, each of which hosts at most one engine."""

    gpus: int
    workers: int


@dataclass(frozen=True, slots=True)
class FinishedWork:
    """Work of an earlier trajectory: generated tokens, observation tokens, tool seconds."""

    decode_tokens: int
    observation_tokens: int = 0
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DegreeRequest:
    """The facts for a plan of the TP degrees.

    Attributes
    ----------
    request_id
        Larger than that of every earlier request of the session.
    asked
        TP degrees that the user asked for; empty: to be planned.
    running
        TP degree of every deployed engine.
    candidates
        TP degrees that may be planned.
    default
        TP degree of the engines if none is deployed and the work is unknown.
    start_s
        Pairs of a TP degree and the longest measured start of an engine of it, in seconds.
    trajectories
        The trajectories of the batch.
    known_tokens
        Tokens that each trajectory of the batch will generate; 0 when not known.
    finished
        Earlier trajectories, in any order.
    max_context_tokens
        Upper limit of the length of a context.
    """

    request_id: int
    nodes: tuple[NodeGpus, ...]
    asked: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()
    default: int = 1
    start_s: tuple[tuple[int, float], ...] = ()
    trajectories: tuple[TrajectorySpec, ...] = ()
    known_tokens: tuple[int, ...] = ()
    finished: tuple[FinishedWork, ...] = ()
    max_context_tokens: int = 0

    @property
    def allowed(self) -> frozenset[int]:
        """TP degrees that a plan may contain."""
        return frozenset(self.asked or (*self.candidates, *self.running, self.default))


@dataclass(frozen=True, slots=True)
class TpDegreePlan:
    """TP degrees for the next batch, with the expected makespan.

    Attributes
    ----------
    tp_degrees
        One for each engine, from the largest to the smallest.
    source
        Source of the work: ``"asked"``, ``"nothing"``, or the sources of the forecast.
    expected_makespan_s
        Expected seconds until the batch ends, including the start of engines; None without a forecast.
    restart_s
        The part of `expected_makespan_s` until the engines are ready.
    uniform_s
        Pairs of a TP degree and the `expected_makespan_s` of as many engines of it as fit; None if some trajectory fits
        no such engine.
    """

    tp_degrees: tuple[int, ...]
    source: str
    expected_makespan_s: float | None = None
    restart_s: float = 0.0
    uniform_s: tuple[tuple[int, float | None], ...] = ()
