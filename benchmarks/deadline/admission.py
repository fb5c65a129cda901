"""Admission by a deadline: like `kv_fit`, and an engine takes no more work than it can finish by a common deadline.

The deadline of all engines is an estimate of the makespan from predictions (`makespan_estimate`, `shared_deadline`).
The engine with the longest resident is asked first, so that long trajectories run together. No trajectory bypasses a
critical one that waits for memory: memory becomes free in small pieces, and if each piece went to a trajectory that
fits, one that needs a large piece would start last and end last (a list schedule with backfilling starves wide jobs;
EASY backfilling reserves for the first of the queue).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.deadline.demand_queue import DemandQueue
from benchmarks.deadline.engine_backlog import EngineBacklog, backlog_item
from benchmarks.deadline.running_step import unseen_tokens
from benchmarks.deadline.shared_deadline import SharedDeadline
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId
from heddle_dask.core.view import ClusterView
from heddle_dask.strategies.admission.candidate_engines import Rejection
from heddle_dask.strategies.admission.engine_snapshot import (
    EngineSnapshot,
    Longest,
    held_tokens,
    load_of,
    longest_of,
)
from heddle_dask.strategies.admission.kv_fit import KvFit
from heddle_dask.strategies.admission.next_in_queue import longest_or_sibling
from heddle_dask.strategies.remaining import RemainingDemand

# The first batch waits this long for the predictions of its other trajectories.
_FIRST_BATCH_S = 2.0
_ROUNDING_S = 1e-6


class TimedSnapshot(EngineSnapshot):
    """An engine during one call of the admission, with its work until the deadline.

    Parameters
    ----------
    facts
        The arguments of `EngineSnapshot`.

    Attributes
    ----------
    late
        A trajectory that fits by memory but would miss the deadline; None until one is found.
    """

    def __init__(self, backlog: EngineBacklog, *facts: Any) -> None:
        super().__init__(*facts)
        self.backlog = backlog
        self.late: Trajectory | None = None

    def in_time(self, demand: RemainingDemand) -> bool:
        """Whether the engine meets the deadline with this trajectory added."""
        return self.backlog.fits(backlog_item(demand))

    def takes(self, trajectory: Trajectory, demand: RemainingDemand) -> bool:
        """Whether the trajectory may start here: it meets the deadline and fits the memory."""
        return self.in_time(demand) and self.fits(trajectory, demand)

    def add(self, trajectory: Trajectory, demand: RemainingDemand) -> None:
        """Count a trajectory with a reservation here."""
        super().add(trajectory, demand)
        self.backlog.add(backlog_item(demand))


@dataclass(slots=True)
class Deadline(KvFit):
    """Admit like `KvFit`, but only work that an engine can finish by the deadline.

    Usable with every predictor; most of its gain needs predictions within about 10 % (experiments.md, admission by
    deadline).

    Parameters
    ----------
    fill, per_slot
        As in `KvFit`, with lower values: the memory forecast assumes one pace for all trajectories, while real contexts
        grow in steps, and among queued steps those of short trajectories, which would free memory, go last.
    """

    fill: float = 0.85
    per_slot: float = 1.2
    _queue: DemandQueue = field(init=False, default_factory=DemandQueue)
    _deadline: SharedDeadline = field(init=False, default_factory=SharedDeadline)
    # Time since which a batch waits for its predictions while no trajectory is alive; None if none does.
    _first_at: float | None = field(init=False, default=None)

    def may_leave(self, view: ClusterView, trajectory: Trajectory) -> bool:
        """Whether the trajectory may move at all: its engine is late according to its latest snapshot. O(1)."""
        if trajectory.home is None:
            return True
        return self._deadline.end_s(view.engine(trajectory.home), view.at) > self._deadline.late_s(view.at)

    def may_move(self, view: ClusterView, trajectory: Trajectory, target: EngineId) -> bool:
        """Whether a trajectory that `may_leave` may move to `target`: its engine is late, and the target will not be.

        The trajectory may not become the longest of the target: its additional iterations would cost their fixed part
        for it alone, and it would run slowly beside many short ones until they have ended. Once no trajectory waits, it
        is enough that an iteration of the target is no longer than one of the home, and that the target with this
        trajectory ends before the home would.
        """
        if trajectory.home is None:
            return True
        home, there = view.engine(trajectory.home), view.engine(target)
        end_s = self._backlog(view, home).end_s
        if end_s <= self._deadline.late_s(view.at):
            return False
        item, backlog = backlog_item(self._demand(trajectory, 1)), self._backlog(view, there)
        if backlog.has_longer(item) and backlog.fits(item):
            return True
        if len(self._queue) or self._iteration_s(view, there) > self._iteration_s(view, home):
            return False
        return backlog.end_with_s(item, end_s) < end_s

    # -- hooks of `KvFit` ------------------------------------------------------------------------------------

    def _enqueue(self, trajectory: Trajectory, tokens: float, path: float) -> None:
        self._queue.put_demand(trajectory, tokens, path, self._demand(trajectory, 1))

    def _bound_lengths(self, most_tokens: float) -> None:
        if most_tokens != self._most_tokens:
            self._most_tokens = most_tokens
            self._queue.refresh(lambda trajectory: self._demand(trajectory, 1))

    def _queued_demand(self, trajectory: Trajectory) -> RemainingDemand:
        """Demand of a waiting trajectory, as of its insertion into the queue."""
        return self._queue.demand_of(trajectory)

    def _prepare(self, view: ClusterView) -> bool:
        if self._others_come(view):
            return False
        self._estimate(view)
        return True

    def _others_come(self, view: ClusterView) -> bool:
        """Whether to wait for further predictions, so that the first batch is judged as a whole."""
        if view.alive or view.reservations or len(self._queue) >= view.waiting:
            self._first_at = None
            return False
        if self._first_at is None:
            self._first_at = view.at
        return view.at < self._first_at + _FIRST_BATCH_S

    def _estimate(self, view: ClusterView) -> None:
        """Estimate the deadline again after larger changes, and open the engines that lacked time."""
        left_tokens, waiting = self._all_left(view), len(self._queue)
        if not self._deadline.outdated(view.ready_engines, left_tokens, waiting):
            return
        costs = [(self._costs.of(e), self._reservable(e)) for e in view.ready_engines]
        for engine in view.ready_engines:
            if not self._deadline.knows(engine):
                self._backlog(view, engine)
        classes = self._queue.classes.longest_first()
        self._deadline.estimate(view.at, view.ready_engines, costs, classes, left_tokens)
        self._open_late(view)

    def _open_late(self, view: ClusterView) -> None:
        for name in list(self._candidates.late):
            self._open(view, view.engine(name))

    def _all_closed(self, view: ClusterView) -> bool:
        """If every engine lacks only time, postpone the deadline to the earliest that one of them meets."""
        late = self._candidates.late
        if len(late) < len(view.ready_engines) or not self._deadline.postpone(min(late.values())):
            return False
        self._open_late(view)
        return True

    def _next(self, engine: EngineSnapshot, critical: float) -> Trajectory | None:
        """The longest that meets the deadline; None if a critical one waits for memory that the engine may get."""
        if not isinstance(engine, TimedSnapshot) or not engine.held or engine.free < 1:
            # Not super(): a dataclass with slots is another class than the one in the closure of `super`.
            return KvFit._next(self, engine, critical)
        queue, demand_of = self._queue, self._queued_demand
        first = queue.longest_where(lambda trajectory: engine.in_time(demand_of(trajectory)))
        if first is not None:
            demand = demand_of(first)
            if engine.fits(first, demand):
                return first
            if queue.path_of(first) >= critical and engine.may_ever_fit(demand):
                return None
        chosen = longest_or_sibling(queue, engine, critical, demand_of)
        return chosen if chosen is not None else self._longest_by_memory(engine)

    def _longest_by_memory(self, engine: TimedSnapshot) -> Trajectory | None:
        """The longest that fits by memory, which the bisections may have missed; `engine.late` if it lacks time."""
        chosen = self._queue.longest_where(lambda one: engine.fits(one, self._queued_demand(one)))
        if chosen is None or engine.in_time(self._queued_demand(chosen)):
            return chosen
        engine.late = chosen
        return None

    def _turn_of(self, view: ClusterView, engine: Engine) -> float:
        """Ask the engine with the longest resident first."""
        return self._held_share(view, engine) - self._deadline.longest(engine)

    def _rejection(self, view: ClusterView, site: EngineSnapshot) -> Rejection:
        rejection = KvFit._rejection(self, view, site)
        if rejection.snapshot is None or not isinstance(site, TimedSnapshot) or site.late is None:
            return rejection
        item = backlog_item(self._queued_demand(site.late))
        deadline = site.backlog.at + site.backlog.rest_with_s(item) + _ROUNDING_S
        return Rejection(rejection.held, rejection.most_queued, rejection.share, site, deadline)

    def _in_turn(self, engines: Sequence[Engine]) -> Engine | None:
        """None: closed engines are opened when the deadline is estimated again."""
        return None

    def _share(self, engine: Engine, longest: Longest, rest_tokens: float) -> float:
        """The whole engine: its longest trajectory is part of its work."""
        return 1.0

    def _residents(self, view: ClusterView, engine: Engine) -> list[tuple[Trajectory, RemainingDemand]]:
        """Like `KvFit`, less the estimated tokens of running steps."""
        residents = view.residents(engine)
        unseen = unseen_tokens(engine, residents, self._costs.of(engine), view.at)
        return [
            (t, self._demand(t, self.lengths, unseen.get(t.trajectory_id, 0.0)))
            for t in (*residents, *view.reserved(engine))
        ]

    def _snapshot(self, view: ClusterView, engine: Engine, rest_tokens: float) -> EngineSnapshot:
        held, queued = load_of(view, engine)
        most = self.per_slot * engine.spec.slots
        if held and queued > most - 1:
            return EngineSnapshot(engine, most - queued, held)
        there = self._residents(view, engine)
        backlog = self._backlog(view, engine, there)
        facts = (
            engine,
            most - queued,
            held,
            self._capacity(engine, 1.0),
            there,
            longest_of(there),
            self.margin,
        )
        return TimedSnapshot(backlog, *facts)

    # -- sizes -----------------------------------------------------------------------------------------------

    def _backlog(
        self,
        view: ClusterView,
        engine: Engine,
        there: Sequence[tuple[Trajectory, RemainingDemand]] | None = None,
    ) -> EngineBacklog:
        """The work of the engine now; `there`: its residents, if already known."""
        items = [backlog_item(demand) for _, demand in (self._residents(view, engine) if there is None else there)]
        return self._deadline.look(engine, self._costs.of(engine), self._reservable(engine), view.at, items)

    def _reservable(self, engine: Engine) -> float:
        """KV tokens that may be reserved in total."""
        reported = engine.spec.kv_capacity_tokens
        return self.fill * (reported if reported > 0 else self._costs.of(engine).capacity_tokens)

    def _iteration_s(self, view: ClusterView, engine: Engine) -> float:
        """Seconds of an iteration with all residents of the engine, reservations included."""
        batch = min(load_of(view, engine)[0], engine.spec.slots)
        return self._costs.of(engine).iteration_s(batch, held_tokens(view, engine))
