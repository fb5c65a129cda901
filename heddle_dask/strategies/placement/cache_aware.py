"""Placement on the engine with the cached prefix, unless the load is skewed (`cache_aware` of SGLang's router)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId, GroupId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.strategies.placement.sticky import home_among

# The router evicts the least recently used prefixes; older groups are no longer in a cache.
_MOST_GROUPS = 10_000


@dataclass(slots=True)
class CacheAware:
    """The home, else the engine with the group's prompt, else the emptiest cache; under skew the least load.

    Parameters
    ----------
    skew_steps, skew_ratio
        The load (steps in flight) is skewed when the largest exceeds the smallest by more than `skew_steps`, and is
        more than `skew_ratio` times the smallest. 64 and 1.5 are the router's own defaults; 32 and 1 those of Heddle's
        hybrid baseline.
    """

    skew_steps: int = 64
    skew_ratio: float = 1.5
    _seen: dict[GroupId, EngineId] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.skew_steps < 0 or self.skew_ratio < 1:
            raise ValueError(f"skew_steps={self.skew_steps}, skew_ratio={self.skew_ratio}: use >= 0 and >= 1")

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        """Always one of the candidates."""
        chosen = self._choose(trajectory, candidates)
        self._remember(trajectory.spec.group_id, chosen.engine_id)
        return chosen

    def _remember(self, group_id: GroupId, engine_id: EngineId) -> None:
        """Record the group's first engine; groups are in order of use, and the least recently used one is dropped."""
        self._seen[group_id] = self._seen.pop(group_id, engine_id)
        if len(self._seen) > _MOST_GROUPS:
            del self._seen[next(iter(self._seen))]

    def _choose(self, trajectory: Trajectory, candidates: Sequence[Engine]) -> Engine:
        least = min(candidates, key=lambda engine: len(engine.inflight))
        most = max(len(engine.inflight) for engine in candidates)
        spread = most - len(least.inflight)
        if spread > self.skew_steps and most > self.skew_ratio * len(least.inflight):
            return least
        home = home_among(trajectory, candidates)
        if home is not None:
            return home
        seen = self._seen.get(trajectory.spec.group_id)
        for engine in candidates:
            if engine.engine_id == seen:
                return engine
        emptiest = min(candidates, key=lambda engine: engine.resident_tokens)
        self._seen[trajectory.spec.group_id] = emptiest.engine_id  # the recorded engine may be lost
        return emptiest
