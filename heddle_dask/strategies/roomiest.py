"""Placement where most room is left, for trajectories that start one by one as others end.

A plan of the whole batch binds trajectories before anybody knows which engine will be free, and ends late on the
engine that got the unexpected; measured so in `docs/strategies.md`. A group's prompt that an engine holds already takes
no room, which draws the members of a group together as far as memory is scarce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle_dask.core.ids import EngineId, GroupId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.state import Engine, Trajectory
from heddle_dask.strategies.room import GROWTH, expected_context_tokens, reserved_tokens
from heddle_dask.strategies.sticky import home_among

# A session may last for days; groups that nobody asked for in so long have ended.
_GROUPS_KEPT = 4096


@dataclass(slots=True)
class Roomiest:
    """Keep the home; without one, the engine whose scarcer resource is least taken with this trajectory added.

    Parameters
    ----------
    growth
        Context tokens that a predicted token stands for (`room`).
    per_slot
        Residents per slot that count as much as all of the KV memory: those in tools and in the queue hold no slot.
    """

    growth: float = GROWTH
    per_slot: float = 4.0
    _prompts: dict[GroupId, dict[EngineId, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.growth < 0 or self.per_slot <= 0:
            raise ValueError("use growth of at least 0 and per_slot above 0")

    def choose_engine(
        self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]
    ) -> Engine:
        """The home, else the roomiest; of equals the one with least predicted work, then the first to join."""
        home = home_among(trajectory, candidates)
        if home is not None:
            return home
        prompts = self._prompts_of(trajectory.spec.group_id)
        need = max(float(step.context_tokens), expected_context_tokens(trajectory, self.growth))
        chosen = min(candidates, key=lambda engine: self._taken(engine, need, prompts))
        if trajectory.steps_finished == 0:
            known = prompts.get(chosen.engine_id, 0)
            prompts[chosen.engine_id] = max(known, step.context_tokens)
        return chosen

    def _taken(self, engine: Engine, need: float, prompts: dict[EngineId, int]) -> tuple[float, float]:
        """Share of the scarcer resource, and predicted work."""
        slots = (len(engine.residents) + 1) / (self.per_slot * engine.spec.slots)
        capacity = engine.spec.kv_capacity_tokens
        if capacity <= 0:
            return slots, engine.expected_tokens
        shared = min(float(prompts.get(engine.engine_id, 0)), need)
        kv = (reserved_tokens(engine, self.growth) + need - shared) / capacity
        return max(kv, slots), engine.expected_tokens

    def _prompts_of(self, group_id: GroupId) -> dict[EngineId, int]:
        """Where this group's prompt was computed, and how long it was there; most recently used last."""
        prompts = self._prompts.pop(group_id, {})
        self._prompts[group_id] = prompts
        if len(self._prompts) > _GROUPS_KEPT:
            del self._prompts[next(iter(self._prompts))]
        return prompts
