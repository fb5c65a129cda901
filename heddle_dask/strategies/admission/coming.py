"""Those that were admitted to an engine and do not live there yet: between an admission and its first step."""

from __future__ import annotations

from collections.abc import Collection, Set

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.transitions import TrajectoryState


class Coming:
    """Who is to come to which engine."""

    def __init__(self) -> None:
        self._to: dict[EngineId, dict[TrajectoryId, Trajectory]] = {}
        self._engine_of: dict[TrajectoryId, EngineId] = {}
        # What is promised to each of them, and to all that come to an engine.
        self._promised: dict[TrajectoryId, float] = {}
        self._promised_at: dict[EngineId, float] = {}
        # Engines from which somebody who was to come was placed since, there or elsewhere.
        self._asked: dict[EngineId, None] = {}

    def __bool__(self) -> bool:
        return any(self._to.values())

    def add(self, name: EngineId, trajectory: Trajectory, promised_tokens: float) -> None:
        """It was admitted to that engine, which keeps so much KV memory for it."""
        trajectory_id = trajectory.trajectory_id
        self._to.setdefault(name, {})[trajectory_id] = trajectory
        self._engine_of[trajectory_id] = name
        self._promised[trajectory_id] = promised_tokens
        self._promised_at[name] = self._promised_at.get(name, 0.0) + promised_tokens

    def to(self, name: EngineId) -> Collection[Trajectory]:
        """Who is to come there, in the order in which they were admitted."""
        return self._to.get(name, {}).values()

    def promised_tokens(self, name: EngineId) -> float:
        """KV tokens that are kept there for those who are to come."""
        return self._promised_at.get(name, 0.0)

    def placed(self, trajectory_id: TrajectoryId) -> EngineId | None:
        """Where it was to go; it is placed now, there or elsewhere."""
        name = self._engine_of.pop(trajectory_id, None)
        if name is not None:
            self._forget(name, trajectory_id)
            self._asked[name] = None
        return name

    def take_asked(self) -> list[EngineId]:
        """Engines from which somebody was placed since this was asked last."""
        asked, self._asked = self._asked, {}
        return list(asked)

    def drop_arrived(self, name: EngineId) -> None:
        """Who has a home counts there, and who has ended nowhere."""
        coming = self._to.get(name)
        if not coming:
            return
        for trajectory_id in [
            n for n, t in coming.items() if t.home is not None or t.state is TrajectoryState.ENDED
        ]:
            self._engine_of.pop(trajectory_id, None)
            self._forget(name, trajectory_id)

    def keep(self, names: Set[EngineId]) -> None:
        """No other engines are ready: nobody comes to them."""
        for name in [name for name in self._to if name not in names]:
            for trajectory_id in self._to.pop(name):
                self._promised.pop(trajectory_id, None)
            self._promised_at.pop(name, None)

    def _forget(self, name: EngineId, trajectory_id: TrajectoryId) -> None:
        coming = self._to.get(name)
        if coming is None or coming.pop(trajectory_id, None) is None:
            return
        promised = self._promised.pop(trajectory_id)
        # Of sums and differences nothing is left over where nobody comes.
        self._promised_at[name] = self._promised_at[name] - promised if coming else 0.0
