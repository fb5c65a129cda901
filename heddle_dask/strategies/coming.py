"""Those that were admitted to an engine and do not live there yet: between an admission and its first step."""

from __future__ import annotations

from collections.abc import Collection

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.transitions import TrajectoryState


class Coming:
    """Who is to come to which engine."""

    def __init__(self) -> None:
        self._to: dict[EngineId, dict[TrajectoryId, Trajectory]] = {}
        self._engine_of: dict[TrajectoryId, EngineId] = {}
        # Engines from which somebody who was to come was placed since, there or elsewhere.
        self._asked: dict[EngineId, None] = {}

    def __bool__(self) -> bool:
        return any(self._to.values())

    def add(self, name: EngineId, trajectory: Trajectory) -> None:
        """It was admitted to that engine."""
        self._to.setdefault(name, {})[trajectory.trajectory_id] = trajectory
        self._engine_of[trajectory.trajectory_id] = name

    def to(self, name: EngineId) -> Collection[Trajectory]:
        """Who is to come there, in the order in which they were admitted."""
        return self._to.get(name, {}).values()

    def placed(self, trajectory_id: TrajectoryId) -> EngineId | None:
        """Where it was to go; it is placed now, there or elsewhere."""
        name = self._engine_of.pop(trajectory_id, None)
        if name is not None:
            self._to.get(name, {}).pop(trajectory_id, None)
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
            del coming[trajectory_id]
            self._engine_of.pop(trajectory_id, None)

    def keep(self, names: Collection[EngineId]) -> None:
        """No other engines are ready: nobody comes to them."""
        self._to = {name: coming for name, coming in self._to.items() if name in names}
