"""Regroups: engines that become fewer and faster ones inside a rollout; proposed by a strategy, carried out in order.

A regroup has three parts. Its engines *retire*: they take no new step, and the steps on them are stopped, to go on
elsewhere from what they have. When no step is left on the engines of a merge, and no KV cache is on its way from or to
them, the body is told to end them and to start the merged one. When that one has joined, the strategy says who goes on
there: their steps are stopped too, and placed on it.

While engines retire, one that is lost or drained calls its merge off, and so does the loss of the last engine beside
them: those that are left take steps again. Once they are
ended there is no way back: if the merged engine does not start, its GPUs are idle, and the rollout goes on with the
engines that are left. No trajectory is lost by that, since none was on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core import events as ev
from heddle_dask.core import guards
from heddle_dask.core.commands import Command, RegroupEngines
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.migrations import MoveDesk
from heddle_dask.core.state import State
from heddle_dask.core.transitions import EngineEvent, EngineState, TrajectoryState
from heddle_dask.core.view import ClusterView, Merge, Regrouping


@dataclass(slots=True)
class RegroupTotals:
    """What merges came to.

    Attributes
    ----------
    merges, engines
        That were ordered of the body, and the engines that were ended for them.
    failed, called_off
        Merged engines that did not start, and merges that were given up before anything was ended.
    seconds
        From the orders to their ends, together.
    evacuated, attracted
        Steps that were stopped because their engine retired, and because the merged one had joined.
    """

    merges: int = 0
    engines: int = 0
    failed: int = 0
    called_off: int = 0
    seconds: float = 0.0
    evacuated: int = 0
    attracted: int = 0


class RegroupDesk:
    """Merges that are being prepared or carried out; the controller tells of every event and asks for places."""

    def __init__(
        self, state: State, view: ClusterView, moves: MoveDesk, regrouping: Regrouping | None
    ) -> None:
        self.state = state
        self.view = view
        self.moves = moves
        self.regrouping = regrouping
        self.totals = RegroupTotals()
        self._retiring: list[Merge] = []
        self._ordered: dict[int, Merge] = {}
        self._destined: dict[TrajectoryId, EngineId] = {}
        self._took_back = False

    def after(self, event: ev.Event) -> list[Command]:
        """What is to be done once the controller has taken the event."""
        match event:
            case ev.TrajectoryEnded():
                self._destined.pop(event.trajectory_id, None)
                return [*self._settle(), *self._consider(event.at)]
            case ev.EngineLost() | ev.EngineDraining():
                self._call_off(event.engine_id)
            case _:
                pass
        return self._settle()

    def _consider(self, at: float) -> list[Command]:
        """Ask the strategy once nobody waits for admission; one regroup at a time."""
        if self.regrouping is None or self._retiring or self._ordered or self.state.unadmitted:
            return []
        regroup = self.regrouping.propose(self.view, at)
        if regroup is None:
            return []
        guards.check_merges(self.state, regroup.merges)
        names = [name for merge in regroup.merges for name in merge.engine_ids]
        engines = [self.state.engines[name] for name in names]
        for engine in engines:
            engine.advance(EngineEvent.RETIRED)
            self.moves.forget_engine(engine.engine_id)
        self.state.refresh_ready()
        self._retiring = list(regroup.merges)
        there = [self.state.trajectories[name] for engine in engines for name in engine.inflight]
        stops = self._stop(there, "its engine retires")
        self.totals.evacuated += len(stops)
        return [*stops, *self._settle()]

    def _stop(self, trajectories: Sequence[Trajectory], reason: str) -> list[Command]:
        """Stop the steps of these that queue or generate and are not being stopped already."""
        commands: list[Command] = []
        for trajectory in trajectories:
            engine_id = trajectory.counted_on
            if engine_id is None or trajectory.stopping:
                continue
            if trajectory.state is TrajectoryState.GENERATING:
                self.state.mark_stopping(trajectory, self.state.engines[engine_id])
            commands += trajectory.abort_step(reason)
        return commands

    def _settle(self) -> list[Command]:
        """Order the merges whose engines are empty."""
        commands: list[Command] = []
        for merge in list(self._retiring):
            engines = [self.state.engines[name] for name in merge.engine_ids]
            if any(engine.inflight or self.moves.is_busy(engine.engine_id) for engine in engines):
                continue
            for engine in engines:
                guards.check_empty(engine)
            self._retiring.remove(merge)
            regroup_id = self.state.next_number()
            self._ordered[regroup_id] = merge
            self.totals.merges += 1
            self.totals.engines += len(engines)
            commands.append(RegroupEngines(regroup_id, merge.engine_ids, merge.tp_degree))
        return commands

    def _call_off(self, engine_id: EngineId) -> None:
        """That engine is gone or drains: what was to merge it is off, and everything where nobody else is left."""
        for merge in list(self._retiring):
            if engine_id not in merge.engine_ids and self.state.ready_engines:
                continue
            self._retiring.remove(merge)
            self.totals.called_off += 1
            for name in merge.engine_ids:
                engine = self.state.engines[name]
                if engine.state is EngineState.RETIRING:
                    engine.advance(EngineEvent.RECALLED)
            self.state.refresh_ready()
            self._took_back = True

    def took_back(self) -> bool:
        """Whether engines were called back since this was asked last."""
        took_back, self._took_back = self._took_back, False
        return took_back

    def ended(self, event: ev.RegroupEnded) -> list[Command]:
        """The merged engine has joined, and those that gain by it go there; or it will never be."""
        if self._ordered.pop(event.regroup_id, None) is None:
            return self.state.late()
        self.totals.seconds += event.seconds
        self.totals.failed += not event.ok
        engine = None if event.engine_id is None else self.state.engines.get(event.engine_id)
        if self.regrouping is None or engine is None or engine.state is not EngineState.READY:
            return []
        chosen = [
            t for t in self.regrouping.attract(self.view, engine, event.at) if t.home != event.engine_id
        ]
        self._destined.update((t.trajectory_id, engine.engine_id) for t in chosen)
        stops = self._stop(chosen, f"{engine.engine_id} is faster")
        self.totals.attracted += len(stops)
        return stops

    def destination(self, trajectory: Trajectory, candidates: Sequence[Engine]) -> Engine | None:
        """The merged engine to which its next step goes, once; None when the placement is to say."""
        if not self._destined:
            return None
        name = self._destined.pop(trajectory.trajectory_id, None)
        return next((engine for engine in candidates if engine.engine_id == name), None)
