"""Placement on the reserved engine, else on the one with the least work among those with room.

An admission that reserves an engine forecasts its memory; another engine, chosen for its work, would undo the forecast.
Without a reservation, work is the predicted work of the residents and of the new trajectory, in seconds of a full
batch, plus the prefill of its prompt unless a member of its group has it there. A plan of the whole batch would assign
trajectories before it is known which engine will be free, and end late on an engine with unexpected work
(experiments.md, memory short).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.engine_list import engine_among
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId, GroupId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.placement.sticky import home_among

# Number of groups kept, least recently used dropped: a session may last for days.
_GROUPS_KEPT = 4096
# Context tokens per predicted token: recorded coding agents read two tokens for each that they write, and the mean
# growth of a context over its life is half of its final growth.
_GROWTH = 1.5


@dataclass(slots=True)
class LeastWork:
    """The home; without one, the reserved engine; else the one with least work among those with enough KV memory.

    Parameters
    ----------
    profile
        Cost profile of the engines (`heddle_dask.cost`); only ratios matter.
    fill
        Share of the KV memory that may be used, with the mean future contexts of residents and new trajectory. If no
        engine has room, the least full one takes the trajectory.
    """

    profile: str = "tiny-cpu"
    fill: float = 0.95
    _costs: EngineCosts = field(init=False)
    _prompts: dict[GroupId, dict[EngineId, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.fill <= 0:
            raise ValueError("use fill above 0")
        self._costs = EngineCosts(self.profile)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        """Use these costs by TP degree in place of the profile."""
        self._costs = EngineCosts(self.profile, known)

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        """The home, else the engine of the reservation or the one with room and least work; ties: the first to join."""
        home = home_among(trajectory, candidates)
        if home is not None:
            return home
        prompts = self._prompts_of(trajectory.spec.group_id)
        context = max(step.context_tokens, trajectory.spec.prompt_tokens)
        chosen = engine_among(candidates, trajectory.reserved_on)
        if chosen is None:
            chosen = self._least_busy(trajectory, context, candidates, prompts)
        if trajectory.steps_finished == 0:
            known = prompts.get(chosen.engine_id, 0)
            prompts[chosen.engine_id] = max(known, context)
        return chosen

    def _least_busy(
        self,
        trajectory: Trajectory,
        context: int,
        candidates: Sequence[Engine],
        prompts: Mapping[EngineId, int],
    ) -> Engine:
        """Of the engines with room, the one with the least work; without room, the least full one."""
        need = context + _GROWTH * trajectory.expected_tokens
        there = [(engine, prompts.get(engine.engine_id, 0)) for engine in candidates]
        roomy = [pair for pair in there if _taken(pair[0], need, pair[1]) <= self.fill]
        if roomy:
            return min(roomy, key=lambda pair: self._work_s(pair[0], trajectory, context, pair[1]))[0]
        return min(there, key=lambda pair: _taken(pair[0], need, pair[1]))[0]

    def _work_s(self, engine: Engine, trajectory: Trajectory, context: int, prompt_there: int) -> float:
        """Seconds of the predicted work of the residents and the new trajectory."""
        cost, slots = self._costs.of(engine), engine.spec.slots
        per_token_s = cost.iteration_s(slots, engine.resident_tokens) / slots
        # Without predictions, compare by context tokens, as a router would.
        tokens = engine.expected_tokens + trajectory.expected_tokens
        decode_s = per_token_s * (tokens or engine.inflight_tokens + context)
        return decode_s + cost.prefill_token_s * max(0, context - prompt_there)

    def _prompts_of(self, group_id: GroupId) -> dict[EngineId, int]:
        """Engines with this group's prompt, and its length there; marks the group as most recently used."""
        prompts = self._prompts.pop(group_id, {})
        self._prompts[group_id] = prompts
        if len(self._prompts) > _GROUPS_KEPT:
            del self._prompts[next(iter(self._prompts))]
        return prompts


def _taken(engine: Engine, need: float, prompt_there: int) -> float:
    """Share of the KV memory in use with one more trajectory; 0 if the engine does not report its memory."""
    capacity = engine.spec.kv_capacity_tokens
    if capacity <= 0:
        return 0.0
    held = engine.resident_tokens + _GROWTH * engine.expected_tokens + engine.reserved_tokens
    return (held + need - min(float(prompt_there), need)) / capacity
