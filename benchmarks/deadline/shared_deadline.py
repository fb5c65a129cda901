"""A common deadline of all engines (`makespan_estimate`) and the backlog of each engine (`engine_backlog`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.deadline.engine_backlog import BacklogItem, EngineBacklog
from benchmarks.deadline.length_sums import LengthClass
from benchmarks.deadline.makespan_estimate import BusyEngine, makespan_estimate_s
from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId
from heddle_dask.cost.engine_cost import EngineCost

# The estimate is repeated when the remaining tokens have fallen by the first share or risen by the second, or when the
# number of waiting trajectories has changed by the second (counted from at least `_FEW`).
_LESS_LEFT = 0.02
_OTHERS_WAIT = 0.05
_FEW = 20
# An engine is late if its backlog exceeds the time left by this factor and by these seconds.
_LATE, _LATE_S = 1.05, 1.0


class SharedDeadline:
    """A deadline for all engines, and the backlog of each engine as of its last check.

    Attributes
    ----------
    deadline
        Time by which all trajectories should have ended.
    """

    def __init__(self) -> None:
        self.deadline = 0.0
        self._engines: Sequence[Engine] = ()
        self._left_tokens = 0.0
        self._waiting = -1
        self._backlogs: dict[EngineId, EngineBacklog] = {}

    def outdated(self, engines: Sequence[Engine], left_tokens: float, waiting: int) -> bool:
        """Whether to repeat the estimate; `left_tokens`: of all trajectories, `waiting`: number not admitted."""
        return (
            engines is not self._engines
            or left_tokens < (1 - _LESS_LEFT) * self._left_tokens
            or left_tokens > (1 + _OTHERS_WAIT) * self._left_tokens
            or abs(waiting - self._waiting) >= _OTHERS_WAIT * max(waiting, self._waiting, _FEW)
        )

    def estimate(
        self,
        at: float,
        engines: Sequence[Engine],
        costs: Sequence[tuple[EngineCost, float]],
        line: Sequence[LengthClass],
        left_tokens: float,
    ) -> None:
        """Estimate the deadline from the backlogs and the waiting trajectories.

        Parameters
        ----------
        costs
            Cost of each engine, and KV tokens that may be reserved there.
        line
            Waiting trajectories, longest first.
        """
        ahead = [
            BusyEngine(cost, engine.spec.slots, capacity, self.look(engine, cost, capacity, at).left(at))
            for engine, (cost, capacity) in zip(engines, costs, strict=True)
        ]
        self.deadline = at + makespan_estimate_s(line, ahead, max(self.deadline - at, 1.0))
        # Drop lost engines: a session may last for days.
        self._backlogs = {engine.engine_id: self._backlogs[engine.engine_id] for engine in engines}
        self._engines, self._left_tokens = engines, left_tokens
        self._waiting = sum(one.members for one in line)

    def look(
        self,
        engine: Engine,
        cost: EngineCost,
        capacity_tokens: float,
        at: float,
        items: Iterable[BacklogItem] | None = None,
    ) -> EngineBacklog:
        """The engine's backlog; computed again from the `items` of its residents if given."""
        backlog = self._backlogs.get(engine.engine_id)
        if backlog is None or items is not None:
            backlog = EngineBacklog(
                cost, engine.spec.slots, capacity_tokens, max(0.0, self.deadline - at), at, items or ()
            )
            self._backlogs[engine.engine_id] = backlog
        return backlog

    def knows(self, engine: Engine) -> bool:
        """Whether the engine was ever checked."""
        return engine.engine_id in self._backlogs

    def end_s(self, engine: Engine, at: float) -> float:
        """Seconds until the engine has finished the backlog of its last check; 0 if it was never checked."""
        backlog = self._backlogs.get(engine.engine_id)
        return 0.0 if backlog is None else backlog.end_s - (at - backlog.at)

    def late_s(self, at: float) -> float:
        """Seconds of backlog above which an engine is late."""
        return _LATE * (self.deadline - at) + _LATE_S

    def longest(self, engine: Engine) -> float:
        """Iterations of the longest trajectory at the last check or added since."""
        backlog = self._backlogs.get(engine.engine_id)
        return 0.0 if backlog is None else backlog.longest

    def postpone(self, deadline: float) -> bool:
        """Set a later deadline; False if `deadline` is not later."""
        later = deadline > self.deadline
        self.deadline = max(self.deadline, deadline)
        return later
