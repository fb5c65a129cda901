"""When everything could be done (`foreseen_end`), and how much each engine may take until then (`engine_room`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.admission.engine_backlog import BacklogItem, EngineBacklog
from heddle_dask.strategies.admission.length_sums import LengthClass
from heddle_dask.strategies.admission.makespan_estimate import BusyEngine, makespan_estimate_s

# It is foreseen anew when so much less is left, or so many more or fewer wait.
_LESS_LEFT = 0.02
_OTHERS_WAIT = 0.05
_FEW = 20
# An engine is late that will take longer by this factor, and by so many seconds, than there is time.
_LATE, _LATE_S = 1.05, 1.0


class SharedDeadline:
    """A deadline for all engines, and what each has to do until then as of when it was looked at last.

    Attributes
    ----------
    deadline
        When everything is to be done.
    """

    def __init__(self) -> None:
        self.deadline = 0.0
        self._engines: Sequence[Engine] = ()
        self._left_tokens = 0.0
        self._waiting = -1
        self._backlogs: dict[EngineId, EngineBacklog] = {}

    def outdated(self, engines: Sequence[Engine], left_tokens: float, waiting: int) -> bool:
        """Whether it should be foreseen anew: `left_tokens` are of all, `waiting` counts who is not admitted."""
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
        """Take the deadline from all that is to be done.

        Parameters
        ----------
        costs
            Of each engine, and the KV tokens that may be promised there.
        line
            Who waits, the longest first.
        """
        ahead = [
            BusyEngine(cost, engine.spec.slots, capacity, self.look(engine, cost, capacity, at).left(at))
            for engine, (cost, capacity) in zip(engines, costs, strict=True)
        ]
        self.deadline = at + makespan_estimate_s(line, ahead, max(self.deadline - at, 1.0))
        # A session may last for days: engines that are gone are forgotten.
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
        """The engine's backlog; made anew from the `items` of who is there, where they are given."""
        backlog = self._backlogs.get(engine.engine_id)
        if backlog is None or items is not None:
            backlog = EngineBacklog(
                cost, engine.spec.slots, capacity_tokens, max(0.0, self.deadline - at), at, items or ()
            )
            self._backlogs[engine.engine_id] = backlog
        return backlog

    def knows(self, engine: Engine) -> bool:
        """Whether it was ever looked at."""
        return engine.engine_id in self._backlogs

    def end_s(self, engine: Engine, at: float) -> float:
        """Seconds until it has done what it had to do when it was looked at last; 0 where it never was."""
        backlog = self._backlogs.get(engine.engine_id)
        return 0.0 if backlog is None else backlog.end_s - (at - backlog.at)

    def late_s(self, at: float) -> float:
        """Who needs more seconds than these is late."""
        return _LATE * (self.deadline - at) + _LATE_S

    def longest(self, engine: Engine) -> float:
        """Iterations of the longest that was there, and came since."""
        backlog = self._backlogs.get(engine.engine_id)
        return 0.0 if backlog is None else backlog.longest

    def postpone(self, deadline: float) -> bool:
        """It will be later; False where that is no later than it was."""
        later = deadline > self.deadline
        self.deadline = max(self.deadline, deadline)
        return later
