"""Work stealing by price: an idle engine takes a step of a loaded one where to compute its context again costs less.

Both rules compare seconds until the step has its tokens. The expected number of these is what a step of the trajectory,
or of its engine, has generated on average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.transitions import KvState
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts


@dataclass(slots=True)
class PricedStealing:
    """Take a step if it ends earlier on the idle engine, its context computed there included.

    Parameters
    ----------
    profile
        Cost profile of the engines, where theirs is not known.
    """

    profile: str = "tiny-cpu"
    _costs: EngineCosts = field(init=False)

    def __post_init__(self) -> None:
        self._costs = EngineCosts(self.profile)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        self._costs = EngineCosts(self.profile, known)

    def take(
        self, view: ClusterView, idle: Engine, loaded: Engine, queue: Sequence[Trajectory], most: int
    ) -> Sequence[Trajectory]:
        """From the end of the queue, those that would wait there for longer than their recomputation takes."""
        slot_s = self._step_s(loaded, view.residents(loaded)) / loaded.spec.slots
        room = self._room(idle)
        taken: list[Trajectory] = []
        for place in range(len(queue), 0, -1):
            if len(taken) == most:
                break
            trajectory = queue[place - 1]
            price_s = self._recomputation_s(trajectory, idle)
            if trajectory.context_tokens <= room and (price_s == 0.0 or price_s < place * slot_s):
                taken.append(trajectory)
                room -= trajectory.context_tokens
        return taken

    def prefers(self, trajectory: Trajectory, home: Engine, idle: Engine) -> bool:
        """Whether a new step gains more than its recomputation costs it and those that run on `idle` already."""
        if not trajectory.steps_finished or trajectory.context_tokens > self._room(idle):
            return False
        tokens = trajectory.generated_tokens / trajectory.steps_finished
        price_s = self._recomputation_s(trajectory, idle)
        at_home_s = self._generation_s(home, trajectory, tokens)
        gain_s = at_home_s - self._generation_s(idle, trajectory, tokens)
        return price_s * (1 + len(idle.inflight)) < gain_s

    def _generation_s(self, engine: Engine, trajectory: Trajectory, tokens: float) -> float:
        """Seconds for `tokens` of one more step there, the wait for a slot included."""
        slots, steps = engine.spec.slots, len(engine.inflight) + 1
        held = engine.inflight_tokens + trajectory.context_tokens
        batch = min(steps, slots)
        alone_s = tokens * self._costs.of(engine).iteration_s(batch, held * batch // steps)
        return alone_s * (1.0 + max(0, steps - slots) / slots)

    def _step_s(self, engine: Engine, residents: Sequence[Trajectory]) -> float:
        """Mean seconds of a step of these trajectories on that engine with all slots in use; 0 before the first."""
        steps = sum(trajectory.steps_finished for trajectory in residents)
        tokens = sum(trajectory.generated_tokens for trajectory in residents)
        held = engine.inflight_tokens * engine.spec.slots // max(engine.spec.slots, len(engine.inflight))
        return tokens / max(1, steps) * self._costs.of(engine).iteration_s(engine.spec.slots, held)

    def _recomputation_s(self, trajectory: Trajectory, target: Engine) -> float:
        """Seconds to compute on `target` what its engine has of the context; 0 where that has nothing."""
        if trajectory.kv is not KvState.RESIDENT:
            return 0.0
        kept = min(trajectory.kept_tokens, trajectory.context_tokens)
        cost = self._costs.of(target)
        return cost.prefill_s(trajectory.context_tokens) - cost.prefill_s(trajectory.context_tokens - kept, kept)

    def _room(self, engine: Engine) -> float:
        """KV tokens that neither residents nor reservations of that engine have."""
        capacity = engine.spec.kv_capacity_tokens or float("inf")
        return capacity - engine.resident_tokens - engine.reserved_tokens
