"""All records of the controller and the indexes over them. `State` owns them; strategies only read.

Every sum and list that a decision needs is kept up to date by the methods here, so that no event costs
a walk over all trajectories. `check_integrity` recomputes them from scratch; tests call it after every
event.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from heddle_dask.core.commands import Command
from heddle_dask.core.engine_list import EngineList
from heddle_dask.core.entities import Action, Engine, Host, Trajectory
from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, TrajectoryId
from heddle_dask.core.prediction import Prediction
from heddle_dask.core.tool_seconds import ToolSeconds
from heddle_dask.core.tp_degrees import DegreeRequest, TpDegreePlan
from heddle_dask.core.transitions import (
    ActionState,
    EngineState,
    TrajectoryState,
)


class State:
    """All records, and the indexes over them.

    Attributes
    ----------
    at
        When the event was that is being handled.
    unadmitted
        Submitted trajectories that wait for admission, oldest first.
    freed
        Engines where a step has ended, or that a trajectory has left, since admission was asked last.
    touched
        Engines whose residents have changed, or their contexts or predictions, each with the running number of its
        latest change; the latest is last.
    waiting_steps
        Trajectories whose step no engine takes yet, oldest first; stranded steps are the oldest.
    waiting_actions
        Actions that wait for CPUs, oldest first; those of a lost host are the oldest.
    unfinished_by_group
        Members of each group that have not ended.
    alive, expected_tokens
        Admitted trajectories that have not ended, and what they were predicted to generate after their last steps.
    reservations
        Trajectories with a reservation on an engine.
    sampled_tokens, observed_tokens
        Tokens that all trajectories have generated, and that tools and templates have added between their steps.
    observed_per_token
        Tokens that tools add for each one generated, as the predictor knows from earlier trajectories; None: unknown.
    evictions
        Answers to contexts that their engines had had and have computed anew: the KV cache is short there.
    tool_seconds
        How long finished actions have taken, by label.
    policy_version
        The newest that an engine has joined or answered with: of those that have not answered yet, too.
    late_arrivals
        How many events were ignored because they came too late.
    degree_request
        The request for TP degrees whose plan is being searched; None where none is.
    tp_degree_plan
        The plan that was deployed last; None where engines were never planned.
    least_max_context
        Every ready engine takes contexts of fewer tokens than this; 0 without one.
    """

    def __init__(self) -> None:
        self.at = 0.0
        self.trajectories: dict[TrajectoryId, Trajectory] = {}
        self.engines: dict[EngineId, Engine] = {}
        self.actions: dict[ActionId, Action] = {}
        self.hosts: dict[HostId, Host] = {}
        self.unadmitted: dict[TrajectoryId, None] = {}
        self.freed: dict[EngineId, None] = {}
        self.touched: dict[EngineId, int] = {}
        self._touches = 0
        self.waiting_steps: dict[TrajectoryId, None] = {}
        self.waiting_actions: dict[ActionId, None] = {}
        self.unfinished_by_group: dict[GroupId, int] = {}
        self.alive = 0
        self.reservations = 0
        self.expected_tokens = 0
        self.sampled_tokens = 0
        self.observed_tokens = 0
        self.evictions = 0
        self.tool_seconds = ToolSeconds()
        self.observed_per_token: float | None = None
        self.policy_version = 0
        self.late_arrivals = 0
        self.degree_request: DegreeRequest | None = None
        self.tp_degree_plan: TpDegreePlan | None = None
        self._ready = EngineList()
        self.least_max_context = 0
        self._counter = 0

    def next_number(self) -> int:
        """The next running number: ids of records and the order of equal priorities."""
        self._counter += 1
        return self._counter

    def join_group(self, group_id: GroupId) -> None:
        """One more member has not ended."""
        self.unfinished_by_group[group_id] = self.unfinished_by_group.get(group_id, 0) + 1

    def leave_group(self, group_id: GroupId) -> None:
        """A member has ended."""
        self.unfinished_by_group[group_id] -= 1
        if self.unfinished_by_group[group_id] == 0:
            del self.unfinished_by_group[group_id]

    def take_version(self, policy_version: int) -> None:
        """An engine has said which policy it runs; one that does not know says less than 0."""
        self.policy_version = max(self.policy_version, policy_version)

    def late(self) -> list[Command]:
        """Count an event that came too late; nothing is to be done about it."""
        self.late_arrivals += 1
        return []

    def forget_if_over(self, trajectory: Trajectory) -> None:
        """A session may last for days: what has ended, actions included, is dropped."""
        if trajectory.state is TrajectoryState.ENDED and trajectory.actions_open == 0:
            self.trajectories.pop(trajectory.trajectory_id, None)

    @property
    def ready_engines(self) -> EngineList:
        """Engines that take steps, in the order in which they joined."""
        return self._ready

    def refresh_ready(self) -> None:
        """Recompute `ready_engines`; to be called when an engine changed its state.

        It is a new list each time: who keeps sums over it sees by identity that they are outdated.
        """
        self._ready = EngineList(e for e in self.engines.values() if e.state is EngineState.READY)
        self.least_max_context = min((e.spec.max_context_tokens for e in self._ready), default=0)

    def touch(self, engine: Engine) -> None:
        """Note that its residents have changed, or what is known of them."""
        self._touches += 1
        name = engine.spec.engine_id
        self.touched.pop(name, None)
        self.touched[name] = self._touches

    def touched_since(self, number: int) -> tuple[list[EngineId], int]:
        """Engines touched after that number, the latest first, and the number to ask with next time.

        O(what it returns): each who asks pays for the changes since it asked last, whoever else asks.
        """
        names: list[EngineId] = []
        for name, latest in reversed(self.touched.items()):
            if latest <= number:
                break
            names.append(name)
        return names, self._touches

    def set_home(self, trajectory: Trajectory, engine_id: EngineId | None) -> None:
        """Make `engine_id` the trajectory's home and move its resident tokens."""
        if trajectory.home == engine_id:
            return
        if trajectory.home is not None and trajectory.home in self.engines:
            old = self.engines[trajectory.home]
            self.freed[old.engine_id] = None
            old.residents.pop(trajectory.trajectory_id, None)
            old.resident_tokens -= trajectory.context_tokens
            old.expected_tokens -= trajectory.expected_tokens
            self.touch(old)
        trajectory.home = engine_id
        if engine_id is not None:
            new = self.engines[engine_id]
            new.residents[trajectory.trajectory_id] = None
            new.resident_tokens += trajectory.context_tokens
            new.expected_tokens += trajectory.expected_tokens
            self.touch(new)

    def reserve(self, trajectory: Trajectory, engine: Engine, tokens: float) -> None:
        """Keep room for an admitted trajectory on the engine until its first step is placed."""
        trajectory.reserved_on, trajectory.reserved_tokens = engine.engine_id, tokens
        engine.reserved[trajectory.trajectory_id] = None
        engine.reserved_tokens += tokens
        self.reservations += 1

    def release_reservation(self, trajectory: Trajectory) -> None:
        """End the reservation: the first step is placed, the trajectory has ended, or the engine is gone."""
        if trajectory.reserved_on is None:
            return
        engine = self.engines[trajectory.reserved_on]
        del engine.reserved[trajectory.trajectory_id]
        # Sums of floats leave a rest: without reservations there is none.
        engine.reserved_tokens = (
            engine.reserved_tokens - trajectory.reserved_tokens if engine.reserved else 0.0
        )
        trajectory.reserved_on, trajectory.reserved_tokens = None, 0.0
        self.reservations -= 1
        self.freed[engine.engine_id] = None
        self.touch(engine)

    def release_reservations_of(self, engine: Engine) -> None:
        """The engine takes no step any more: no trajectory has a reservation there."""
        for name in list(engine.reserved):
            self.release_reservation(self.trajectories[name])

    def take_prediction(self, trajectory: Trajectory, prediction: Prediction) -> None:
        """Keep a prediction, and the sums over its home and over all that are alive right."""
        before = trajectory.expected_tokens
        trajectory.take_prediction(prediction)
        self._recount_expected(trajectory, before)

    def take_tokens(self, trajectory: Trajectory, tokens: int, whole: bool) -> None:
        """Count what a step has generated (`Trajectory.take_tokens`): so much less is left."""
        before = trajectory.expected_tokens
        trajectory.take_tokens(tokens, whole)
        self._recount_expected(trajectory, before)

    def _recount_expected(self, trajectory: Trajectory, before: int) -> None:
        more = trajectory.expected_tokens - before
        if trajectory.home is not None:
            home = self.engines[trajectory.home]
            home.expected_tokens += more
            self.touch(home)
        if trajectory.state is not TrajectoryState.SUBMITTED:
            self.expected_tokens += more

    def count_alive(self, trajectory: Trajectory) -> None:
        """It was admitted."""
        self.alive += 1
        self.expected_tokens += trajectory.expected_tokens

    def uncount_alive(self, trajectory: Trajectory) -> None:
        """It was admitted once, and has ended."""
        self.alive -= 1
        self.expected_tokens -= trajectory.expected_tokens

    def count_observed(self, trajectory: Trajectory, tokens: int) -> None:
        """So many tokens were added to its context since its last step."""
        trajectory.observed_tokens.append(tokens)
        self.observed_tokens += tokens

    def set_context(self, trajectory: Trajectory, tokens: int) -> None:
        """Set the trajectory's context length and keep its home's sum right."""
        if trajectory.home is not None and tokens != trajectory.context_tokens:
            home = self.engines[trajectory.home]
            home.resident_tokens += tokens - trajectory.context_tokens
            self.touch(home)
        trajectory.context_tokens = tokens

    def count_inflight(self, trajectory: Trajectory, engine_id: EngineId) -> None:
        """Count the trajectory's current step on the engine until `uncount_inflight`."""
        engine = self.engines[engine_id]
        trajectory.counted_on = engine_id
        trajectory.counted_tokens = trajectory.context_tokens
        engine.inflight[trajectory.trajectory_id] = None
        engine.inflight_tokens += trajectory.counted_tokens

    def count_running(self, trajectory: Trajectory, engine: Engine) -> None:
        """Its step, counted on that engine, has started."""
        engine.generating += 1
        engine.seat(trajectory)

    def mark_stopping(self, trajectory: Trajectory, engine: Engine) -> None:
        """Its running step there is being stopped for another."""
        trajectory.stopping = True
        trajectory.preemptions += 1
        engine.stopping += 1
        engine.unseat(trajectory.trajectory_id)

    def uncount_inflight(self, trajectory: Trajectory, was_generating: bool) -> None:
        """Take the trajectory's step off the engine that counts it, if any."""
        if trajectory.counted_on is None:
            return
        engine = self.engines[trajectory.counted_on]
        self.freed[engine.engine_id] = None
        engine.inflight.pop(trajectory.trajectory_id, None)
        engine.inflight_tokens -= trajectory.counted_tokens
        engine.generating -= was_generating
        engine.unseat(trajectory.trajectory_id)
        engine.stopping -= trajectory.stopping
        engine.fill_seats()
        trajectory.stopping = False
        trajectory.counted_on = None
        trajectory.counted_tokens = 0

    def in_state(self, wanted: TrajectoryState) -> Iterator[Trajectory]:
        """Walk over the trajectories in one state; for reports, not for decisions."""
        return (t for t in self.trajectories.values() if t.state is wanted)

    def check_integrity(self) -> None:
        """Recompute every index and compare.

        Raises
        ------
        AssertionError
            With the index and both values, when one has drifted.
        """
        inflight = {TrajectoryState.QUEUED, TrajectoryState.GENERATING}
        for t in self.trajectories.values():
            assert (t.counted_on is not None) == (t.state in inflight), t.trajectory_id
            mine = [a for a in self.actions.values() if a.spec.trajectory_id == t.trajectory_id]
            assert sorted(t.open_labels) == sorted(a.spec.label for a in mine), t.trajectory_id
            assert t.home is None or t.home in self.engines, t.trajectory_id
            assert t.state is not TrajectoryState.ENDED or (t.home is None and t.actions_open > 0)
        reserving = [t for t in self.trajectories.values() if t.reserved_on is not None]
        assert self.reservations == len(reserving)
        assert all(t.home is None and t.state not in (*inflight, TrajectoryState.ENDED) for t in reserving)
        dormant = {TrajectoryState.SUBMITTED, TrajectoryState.ENDED}
        assert self.alive == sum(t.state not in dormant for t in self.trajectories.values())
        for engine in self.engines.values():
            living = [t for t in self.trajectories.values() if t.home == engine.engine_id]
            here = [t for t in living if t.state in inflight]
            name = engine.engine_id
            assert sorted(engine.residents) == sorted(t.trajectory_id for t in living), name
            assert engine.resident_tokens == sum(t.context_tokens for t in living), name
            assert engine.expected_tokens == sum(t.expected_tokens for t in living), name
            reserved = [t for t in self.trajectories.values() if t.reserved_on == name]
            assert sorted(engine.reserved) == sorted(t.trajectory_id for t in reserved), name
            assert math.isclose(
                engine.reserved_tokens, sum(t.reserved_tokens for t in reserved), abs_tol=1e-6
            ), name
            assert not reserved or engine.state is EngineState.READY, name
            assert sorted(engine.inflight) == sorted(t.trajectory_id for t in here), name
            assert engine.inflight_tokens == sum(t.counted_tokens for t in here), name
            generating = sum(t.state is TrajectoryState.GENERATING for t in here)
            assert engine.generating == generating, name
            assert engine.stopping == sum(t.stopping for t in here), name
            runs = [t for t in here if t.state is TrajectoryState.GENERATING and not t.stopping]
            started = [*engine.running, *engine.ahead]
            assert sorted(started) == sorted(t.trajectory_id for t in runs), name
            seats = len(engine.running) + engine.stopping
            assert not engine.ahead or seats >= engine.spec.slots, name
            if engine.state is EngineState.LOST:  # only steps that still report keep it as their home
                assert sorted(engine.residents) == sorted(engine.inflight), name
        ready = [e for e in self.engines.values() if e.state is EngineState.READY]
        assert list(self.ready_engines) == ready
        assert self.least_max_context == min((e.spec.max_context_tokens for e in ready), default=0)
        waiting = sorted(t.trajectory_id for t in self.in_state(TrajectoryState.WAITING))
        assert sorted(self.waiting_steps) == waiting
        outside = (TrajectoryState.SUBMITTED, TrajectoryState.ENDED)
        alive = [t for t in self.trajectories.values() if t.state not in outside]
        assert self.alive == len(alive)
        assert self.expected_tokens == sum(t.expected_tokens for t in alive)
        submitted = sorted(t.trajectory_id for t in self.in_state(TrajectoryState.SUBMITTED))
        assert sorted(self.unadmitted) == submitted
        for host in self.hosts.values():
            used = sum(self.actions[a].cpus for a in host.running)
            assert 0 <= host.free_cpus == host.spec.cpus - used, host.spec.host_id
        running = sorted(i for i, a in self.actions.items() if a.state is ActionState.RUNNING)
        assert running == sorted(i for host in self.hosts.values() for i in host.running)
        unstarted = [i for i, a in self.actions.items() if a.state is ActionState.WAITING]
        assert sorted(self.waiting_actions) == sorted(unstarted)
