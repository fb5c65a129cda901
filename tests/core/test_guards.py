"""Guards refuse what would break the cluster, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from worlds.core_builders import Stage, action_of, engine_of, host_of, step_of

from heddle_dask.core import events as ev
from heddle_dask.core import guards
from heddle_dask.core.entities import Action, Engine, Host, Trajectory
from heddle_dask.core.errors import GuardViolation
from heddle_dask.core.ids import ActionId, EngineId, HostId, TrajectoryId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.resources import Resources
from heddle_dask.core.state import State
from heddle_dask.core.transitions import ActionState, EngineState, KvState
from heddle_dask.core.view import Admit, ClusterView, Grant, Move, MoveRequest
from heddle_dask.strategies.presets import build_strategies


def test_can_take_needs_room_for_one_new_token() -> None:
    engine = Engine(engine_of("E1", max_context_tokens=100), 1)
    assert guards.can_take(engine, step_of("a", context=99))
    assert not guards.can_take(engine, step_of("a", context=100))
    assert not guards.can_take(engine, step_of("a", context=101))


def test_can_dispatch_waits_only_for_a_moving_kv() -> None:
    stage = Stage()
    stage.submit("a")
    trajectory = stage.trajectory("a")
    for kv in KvState:
        trajectory.kv = kv
        assert guards.can_dispatch(trajectory) == (kv is not KvState.MOVING)


def test_check_choice_refuses_an_engine_that_was_not_offered() -> None:
    stage = Stage()
    stage.submit("a")
    one, two = Engine(engine_of("E1"), 1), Engine(engine_of("E2"), 2, state=EngineState.DRAINING)
    guards.check_choice(stage.trajectory("a"), step_of("a"), one, [one])
    with pytest.raises(GuardViolation, match=r"E2 \(draining\) for step 0 of a; it may choose among: E1"):
        guards.check_choice(stage.trajectory("a"), step_of("a"), two, [one])


def test_check_admission_refuses_a_second_time() -> None:
    stage = Stage()
    stage.submit("a")
    with pytest.raises(GuardViolation, match="a is thinking and cannot be admitted"):
        guards.check_admission(stage.state, Admit(stage.trajectory("a")))


def cluster() -> Stage:
    """A trajectory at home on E1; E2 is ready and E3 drains."""
    stage = Stage("sticky", overrides=["placement=round-robin"])
    stage.join("E1", "E2", "E3")
    stage.submit("a")
    stage.finish(stage.placed("a"))
    stage.feed(ev.EngineDraining, EngineId("E3"))
    return stage


def test_check_move_accepts_another_ready_engine() -> None:
    stage = cluster()
    guards.check_move(stage.state, stage.trajectory("a"), Move(EngineId("E2"), "transfer"))


@pytest.mark.parametrize("target", ["E1", "E3", "E9"])
def test_check_move_refuses_the_home_and_engines_that_take_no_steps(target: str) -> None:
    stage = cluster()
    reason = f"migration chose {target} for a at E1: the target must be another ready engine"
    with pytest.raises(GuardViolation, match=reason):
        guards.check_move(stage.state, stage.trajectory("a"), Move(EngineId(target), "transfer"))


def transfer(name: str, source: str, target: str) -> MoveRequest:
    return MoveRequest(TrajectoryId(name), EngineId(source), EngineId(target), "transfer", 1.0, 1)


def test_check_transfer_refuses_a_shared_engine_in_either_role() -> None:
    running = [transfer("a", "E1", "E2")]
    guards.check_transfer(transfer("b", "E3", "E4"), running)
    for source, target in (("E1", "E3"), ("E3", "E1"), ("E2", "E3"), ("E3", "E2")):
        with pytest.raises(GuardViolation, match="shares an engine with that of a from E1 to E2"):
            guards.check_transfer(transfer("b", source, target), running)


def test_can_stop_takes_only_what_generates_is_not_stopping_and_was_not_stopped_too_often() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    record = stage.trajectory("a")
    assert not guards.can_stop(record, 2)
    step = stage.placed("a")
    assert not guards.can_stop(record, 2), "it waits for a slot itself"
    stage.start(step)
    assert guards.can_stop(record, 2)
    assert not guards.can_stop(record, 0)
    record.preemptions = 2
    assert not guards.can_stop(record, 2)
    record.preemptions, record.stopping = 0, True
    assert not guards.can_stop(record, 2)


def test_check_victim_refuses_what_was_not_offered_and_what_cannot_be_stopped() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a", "b", "c")
    a, b, c = (stage.trajectory(name) for name in "abc")
    stage.start(stage.placed("b"))
    guards.check_victim(a, b, [b, c], 2)
    with pytest.raises(GuardViolation, match=r"preemption chose a \(thinking\) for a; it may choose among: b, c"):
        guards.check_victim(a, a, [b, c], 2)
    with pytest.raises(GuardViolation, match=r"preemption chose c \(thinking\) for a; its step does not generate"):
        guards.check_victim(a, c, [b, c], 2)
    with pytest.raises(GuardViolation, match="or was stopped 0 times"):
        guards.check_victim(a, b, [b, c], 0)


def state_with_one_waiting_action() -> State:
    state = State()
    spec = action_of("x", "a", cpus=(2, 4))
    state.actions[spec.action_id] = Action(spec, 1)
    for number, host in enumerate((host_of("H1", 4), host_of("G1", 4, pool="gpu")), start=2):
        state.hosts[host.host_id] = Host(host, number)
    return state


def grant(host: str, cpus: int, action: str = "x") -> Grant:
    return Grant(ActionId(action), HostId(host), Resources.of(cpus=cpus))


def test_check_grant_accepts_what_fits() -> None:
    for cpus in (2, 3, 4):
        guards.check_grant(state_with_one_waiting_action(), grant("H1", cpus))


@pytest.mark.parametrize(
    ("proposal", "reason"),
    [
        (grant("H1", 2, action="y"), "action y does not wait"),
        (grant("G1", 2), "not its pool"),
        (grant("H9", 2), "cannot run on H9"),
        (grant("H1", 1), "x cannot run with"),
        (grant("H1", 5), "x cannot run with"),
    ],
)
def test_check_grant_refuses(proposal: Grant, reason: str) -> None:
    with pytest.raises(GuardViolation, match=reason):
        guards.check_grant(state_with_one_waiting_action(), proposal)


def test_check_grant_refuses_a_full_host_and_a_running_action() -> None:
    state = state_with_one_waiting_action()
    state.hosts[HostId("H1")].free["cpus"] = 1
    with pytest.raises(GuardViolation, match=r"H1 has {'cpus': 1} free"):
        guards.check_grant(state, grant("H1", 2))
    state.actions[ActionId("x")].state = ActionState.RUNNING
    with pytest.raises(GuardViolation, match="does not wait"):
        guards.check_grant(state, grant("H1", 2))


class Stubborn:
    """Places everything on the first engine it ever saw."""

    def __init__(self) -> None:
        self.first: Engine | None = None

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        self.first = self.first or candidates[0]
        return self.first


class Greedy:
    """Grants every action twice its host."""

    def allocate(self, view: ClusterView) -> Sequence[Grant]:
        host = next(iter(view.hosts))
        return [Grant(a.spec.action_id, host.spec.host_id, host.spec.resources) for a in view.waiting_actions]


class Twice:
    """Admits the oldest twice."""

    def admit(self, view: ClusterView) -> Sequence[Admit]:
        return [Admit(t) for t in view.unadmitted for _ in range(2)]


def test_the_controller_refuses_a_placement_on_a_lost_engine() -> None:
    stage = Stage(strategies=replace(build_strategies("sticky"), placement=Stubborn()))
    stage.join("E1", "E2")
    stage.submit("a", "b")
    stage.placed("a")
    stage.lose("E2")
    with pytest.raises(GuardViolation, match=r"E1 \(lost\)"):
        stage.join("E3")
        stage.lose("E1")


def test_the_controller_refuses_oversubscribed_cpus() -> None:
    stage = Stage(strategies=replace(build_strategies("sticky"), actions=Greedy()))
    stage.submit("a")
    stage.add_host("H1", 4)
    stage.act("a1", "a", cpus=(1, 4))
    with pytest.raises(GuardViolation, match=r"H1 has {'cpus': 0} free"):
        stage.act("a2", "a", cpus=(1, 4))


def test_the_controller_refuses_a_double_admission() -> None:
    stage = Stage(strategies=replace(build_strategies("sticky"), admission=Twice()))
    with pytest.raises(GuardViolation, match="cannot be admitted"):
        stage.submit("a")
