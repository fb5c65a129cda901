"""One engine during one call of an admission: free queue places, memory forecast and cached prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import GroupId
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.memory_profile import MemoryProfile
from heddle_dask.strategies.remaining import RemainingDemand


class Longest(NamedTuple):
    """The trajectory of an engine that ends last: its path in tokens, and the generated tokens of that path."""

    path: float
    tokens: float


NONE_LONGEST = Longest(0.0, 0.0)

Residents = Sequence[tuple[Trajectory, RemainingDemand]]


def longest_of(there: Residents) -> Longest:
    """The trajectory of `there` that ends last."""
    paths = [demand.tokens * demand.stretch for _, demand in there]
    if not paths:
        return NONE_LONGEST
    path = max(paths)
    _, demand = there[paths.index(path)]
    return Longest(path, demand.tokens)


def load_of(view: ClusterView, engine: Engine) -> tuple[int, int]:
    """Number of residents, and of steps that generate or queue there; reservations included in both."""
    reserved = len(engine.reserved)
    return len(engine.residents) + reserved, view.queued(engine) + reserved


def held_tokens(view: ClusterView, engine: Engine) -> int:
    """Context tokens of the residents of the engine, reservations included."""
    return engine.resident_tokens + sum(t.context_tokens for t in view.reserved(engine))


class EngineSnapshot:
    """An engine during one call of the admission.

    Parameters
    ----------
    free
        Number of further trajectories that may generate or queue.
    held
        Number of residents, reservations included.
    capacity_tokens
        KV tokens that may be reserved; 0 when the engine does not report its memory.
    residents
        Residents, reservations included, with their demands. May be empty if no trajectory will be added.
    longest
        The longest resident.
    margin
        Standard deviations of the forecast memory use that are kept free.
    """

    def __init__(
        self,
        engine: Engine,
        free: float,
        held: int,
        capacity_tokens: float = 0.0,
        residents: Residents = (),
        longest: Longest = NONE_LONGEST,
        margin: float = 0.0,
    ) -> None:
        self.engine = engine
        self.free = free
        self.held = held
        self._capacity_tokens = capacity_tokens
        self._residents = residents
        self.longest = longest
        self._margin = margin

    @functools.cached_property
    def prompts(self) -> dict[GroupId, int]:
        """The longest prompt of each group on the engine; a sibling shares its memory up to that length."""
        prompts: dict[GroupId, int] = {}
        for trajectory, _ in self._residents:
            _keep_longest(prompts, trajectory)
        return prompts

    @functools.cached_property
    def _memory(self) -> MemoryProfile | None:
        """The memory forecast; computed at first use, since an engine whose queue is full rejects without it."""
        if self._capacity_tokens <= 0:
            return None
        # `_need` and `_keep_longest` inlined for speed: there are hundreds of residents.
        needs: list[tuple[float, Sequence[float], float, float]] = []
        before: dict[GroupId, int] = {}
        for trajectory, (_, lengths, stretch, context, growth, _) in self._residents:
            spec = trajectory.spec
            prompt, known = spec.prompt_tokens, before.get(spec.group_id, 0)
            if prompt > known:
                before[spec.group_id] = prompt
                needs.append((context - known, lengths, stretch, growth))
            else:
                needs.append((context - prompt, lengths, stretch, growth))
        self.prompts = before
        return MemoryProfile(self._capacity_tokens, needs, self._margin)

    def set_capacity(self, capacity_tokens: float) -> None:
        """Set the KV tokens that may be reserved."""
        if self._memory is not None:
            self._capacity_tokens = capacity_tokens
            self._memory.set_capacity(capacity_tokens)

    def fits(self, trajectory: Trajectory, demand: RemainingDemand) -> bool:
        """Whether the memory suffices until the trajectory ends, for its mean length."""
        if self._memory is None:
            return True
        need = _need(trajectory, demand, self.prompts)
        return self._memory.fits(need, demand.tokens, demand.stretch, demand.growth)

    def takes(self, trajectory: Trajectory, demand: RemainingDemand) -> bool:
        """Whether the trajectory may start here."""
        return self.fits(trajectory, demand)

    def may_ever_fit(self, demand: RemainingDemand) -> bool:
        """Whether the trajectory would fit on the empty engine."""
        return (
            self._capacity_tokens <= 0 or demand.context_tokens + demand.growth * demand.tokens <= self._capacity_tokens
        )

    def add(self, trajectory: Trajectory, demand: RemainingDemand) -> None:
        """Count a trajectory with a reservation here."""
        if self._memory is not None:
            need = _need(trajectory, demand, self.prompts)
            self._memory.add(need, demand.lengths, demand.stretch, demand.growth)
        self.free -= 1
        self.held += 1
        _keep_longest(self.prompts, trajectory)


def _need(trajectory: Trajectory, demand: RemainingDemand, prompts: dict[GroupId, int]) -> float:
    """KV tokens that the trajectory does not share."""
    shared = min(trajectory.spec.prompt_tokens, prompts.get(trajectory.spec.group_id, 0))
    return demand.context_tokens - shared


def _keep_longest(prompts: dict[GroupId, int], trajectory: Trajectory) -> None:
    group, prompt = trajectory.spec.group_id, trajectory.spec.prompt_tokens
    if prompt > prompts.get(group, 0):
        prompts[group] = prompt
