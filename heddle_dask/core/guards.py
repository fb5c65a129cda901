"""Guards check the proposals of strategies. A `check_` function raises `GuardViolation` with the reason.

A bad strategy may make a rollout slow, but it cannot corrupt the state of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heddle_dask.core.engine_list import engine_among
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import GuardViolation
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import DegreeRequest, StepRequest, TpDegreePlan
from heddle_dask.core.quotas import calls_of
from heddle_dask.core.resources import CPUS, IDLE_NICE, use_text
from heddle_dask.core.state import State
from heddle_dask.core.transitions import ActionState, EngineState, KvState, TrajectoryState
from heddle_dask.core.view import Admit, Grant, Move, MoveRequest, Route


def can_take(engine: Engine, step: StepRequest) -> bool:
    """Whether the step's context and at least one new token fit into the engine."""
    return step.context_tokens < engine.spec.max_context_tokens


def can_dispatch(trajectory: Trajectory) -> bool:
    """Whether a waiting step may be placed now; False while its KV cache is moving."""
    return trajectory.kv is not KvState.MOVING


def check_choice(trajectory: Trajectory, step: StepRequest, choice: Engine, candidates: Sequence[Engine]) -> None:
    """Refuse an engine that is not among the candidates."""
    if engine_among(candidates, choice.engine_id) is not choice:
        offered = ", ".join(engine.engine_id for engine in candidates)
        raise GuardViolation(
            f"placement chose {choice.engine_id} ({choice.state.value}) for step {step.step_id.step_index} of "
            f"{trajectory.trajectory_id}; it may choose among: {offered}"
        )


def check_taken(taken: Sequence[Trajectory], queue: Sequence[Trajectory], most: int) -> None:
    """Refuse steps that do not wait in the queue, that are taken twice, or for which there are no slots."""
    names, offered = [t.trajectory_id for t in taken], {t.trajectory_id for t in queue}
    if len(names) > most or len(set(names)) < len(names) or not offered.issuperset(names):
        raise GuardViolation(f"stealing took {', '.join(names)}: it may take {most} of {', '.join(offered)}")


def check_route(trajectory: Trajectory, route: Route, candidates: Sequence[Engine]) -> None:
    """Refuse a route without an engine, or with one that is not among the candidates."""
    if route.engines is candidates:
        return
    if not route.engines:
        raise GuardViolation(f"affinity leaves no engine for {trajectory.trajectory_id}")
    offered = {engine.engine_id for engine in candidates}
    for engine in route.engines:
        if engine.engine_id not in offered:
            raise GuardViolation(
                f"affinity chose {engine.engine_id} ({engine.state.value}) for {trajectory.trajectory_id}; it may "
                f"choose among: {', '.join(offered)}"
            )


def check_move(state: State, trajectory: Trajectory, move: Move) -> None:
    """Refuse a move to an engine that takes no steps, or to the trajectory's home."""
    target = state.engines.get(move.target_engine_id)
    if target is None or target.state is not EngineState.READY or target.engine_id == trajectory.home:
        raise GuardViolation(
            f"migration chose {move.target_engine_id} for {trajectory.trajectory_id} at {trajectory.home}: "
            "the target must be another ready engine"
        )


def check_transfer(move: MoveRequest, running: Iterable[MoveRequest]) -> None:
    """Refuse a move that shares an engine with a running move."""
    ends = (move.source, move.target)
    for other in running:
        if other.source in ends or other.target in ends:
            raise GuardViolation(
                f"the move of {move.trajectory_id} from {move.source} to {move.target} shares an engine with that of "
                f"{other.trajectory_id} from {other.source} to {other.target}"
            )


def has_kv_of(state: State, trajectory: Trajectory, engine_id: EngineId) -> bool:
    """Whether the trajectory's KV cache may be used under the weights of that engine.

    It may where it was written under the same version, or where KV outlives an update of weights.
    """
    if state.weights.policy.keep_kv:
        return True
    engine, home = state.engines.get(engine_id), state.engines.get(trajectory.home or EngineId(""))
    written = trajectory.kv_version
    return engine is not None and home is not None and written == home.version == engine.version


def check_kv_version(state: State, trajectory: Trajectory, move: MoveRequest) -> None:
    """Refuse to copy a KV cache to an engine with other weights than those under which it was written."""
    if move.kind == "transfer" and not has_kv_of(state, trajectory, move.target):
        target = state.engines.get(move.target)
        raise GuardViolation(
            f"the KV cache of {trajectory.trajectory_id} was written under version {trajectory.kv_version}; "
            f"{move.target} has version {None if target is None else target.version}"
        )


def can_stop(trajectory: Trajectory, max_preemptions: int) -> bool:
    """Whether the step may be preempted: it generates, is not being preempted, and was not preempted too often."""
    generating = trajectory.state is TrajectoryState.GENERATING
    return generating and not trajectory.stopping and trajectory.preemptions < max_preemptions


def check_victim(waiting: Trajectory, victim: Trajectory, running: Sequence[Trajectory], max_preemptions: int) -> None:
    """Refuse to preempt a step that is not among the candidates, or that may not be preempted."""
    if victim not in running:  # trajectories compare by identity
        offered = ", ".join(candidate.trajectory_id for candidate in running)
        raise GuardViolation(
            f"preemption chose {victim.trajectory_id} ({victim.state.value}) for {waiting.trajectory_id}; it may "
            f"choose among: {offered}"
        )
    if not can_stop(victim, max_preemptions):
        raise GuardViolation(
            f"preemption chose {victim.trajectory_id} ({victim.state.value}) for {waiting.trajectory_id}; its step "
            f"does not generate, is being stopped, or was stopped {max_preemptions} times"
        )


def check_grant(state: State, grant: Grant) -> None:
    """Refuse a grant for an action that does not wait, or for a host that drains or has too little free."""
    action = state.actions.get(grant.action_id)
    host = state.hosts.get(grant.host_id)
    if action is None or action.state is not ActionState.WAITING:
        raise GuardViolation(f"action {grant.action_id} does not wait and cannot be started")
    if host is None or host.spec.pool != action.spec.pool:
        raise GuardViolation(f"action {grant.action_id} cannot run on {grant.host_id}: not its pool")
    if host.draining:
        raise GuardViolation(f"{grant.host_id} drains and takes no action {grant.action_id}")
    if action.host_fixed not in (None, grant.host_id):
        raise GuardViolation(f"action {grant.action_id} needs its sandbox on {action.host_fixed}")
    if not action.spec.demand.allows(grant.resources):
        raise GuardViolation(f"action {grant.action_id} cannot run with {grant.resources.amounts}")
    if not host.fits(grant.resources):
        raise GuardViolation(f"{grant.host_id} has {host.free} free, not {grant.resources.amounts}")
    if grant.reach_cpus and not grant.resources[CPUS] <= grant.reach_cpus <= host.spec.cpus:
        raise GuardViolation(f"action {grant.action_id} cannot reach {grant.reach_cpus} of {host.spec.cpus} CPUs")
    if bool(grant.reach_cpus) != (1 <= grant.nice <= IDLE_NICE):
        raise GuardViolation(f"action {grant.action_id} cannot reach {grant.reach_cpus} CPUs with nice {grant.nice}")
    for name, calls in calls_of(grant.resources):
        free = state.apis.free(name, state.at)
        if free is not None and free < calls:
            raise GuardViolation(f"{use_text(name, free)} are free, not {calls} for action {grant.action_id}")


def check_tp_degrees(request: DegreeRequest, plan: TpDegreePlan) -> None:
    """Refuse a plan without engines, with a TP degree that is not allowed, or with more GPUs or engines than exist.

    A plan may use fewer GPUs: larger TP degrees leave a remainder, and the user may ask for less. Whether the engines
    fit on single nodes is checked when they are assigned to workers.
    """
    listed = ",".join(map(str, plan.tp_degrees))
    gpus = sum(node.gpus for node in request.nodes)
    workers = sum(node.workers for node in request.nodes)
    if not plan.tp_degrees:
        raise GuardViolation(f"the plan of request {request.request_id} leaves no engine")
    if not request.allowed.issuperset(plan.tp_degrees):
        allowed = ", ".join(map(str, sorted(request.allowed)))
        raise GuardViolation(f"TP degrees {listed} were planned; allowed are {allowed}")
    if sum(plan.tp_degrees) > gpus or len(plan.tp_degrees) > workers:
        raise GuardViolation(
            f"TP degrees {listed} need {sum(plan.tp_degrees)} GPUs and {len(plan.tp_degrees)} workers; there are "
            f"{gpus} and {workers}"
        )


def check_admission(state: State, proposal: Admit) -> None:
    """Refuse to admit a trajectory twice, or to an engine that takes no steps.

    Raises
    ------
    GuardViolation
    """
    trajectory = proposal.trajectory
    if trajectory.state is not TrajectoryState.SUBMITTED:
        raise GuardViolation(f"{trajectory.trajectory_id} is {trajectory.state.value} and cannot be admitted")
    if proposal.engine_id is not None:
        engine = state.engines.get(proposal.engine_id)
        if engine is None or engine.state is not EngineState.READY:
            raise GuardViolation(
                f"admission reserved room for {trajectory.trajectory_id} on {proposal.engine_id}: not a ready engine"
            )
