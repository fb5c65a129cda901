"""One engine during one call of an admission: how much may still queue, its memory and the prompts it holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import GroupId
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.memory_profile import MemoryProfile
from heddle_dask.strategies.remaining_demand import RemainingDemand


class Longest(NamedTuple):
    """The trajectory of an engine that ends last: its path, in tokens, and the tokens of that which it generates."""

    path: float
    tokens: float


NONE_LONGEST = Longest(0.0, 0.0)

Residents = Sequence[tuple[Trajectory, RemainingDemand]]


def longest_of(there: Residents) -> Longest:
    """The trajectory that ends last of these."""
    paths = [demand.tokens * demand.stretch for _, demand in there]
    if not paths:
        return NONE_LONGEST
    path = max(paths)
    _, demand = there[paths.index(path)]
    return Longest(path, demand.tokens)


def load_of(engine: Engine) -> tuple[int, int]:
    """Trajectories that live on the engine, and steps that generate or queue there; reservations included."""
    reserved = len(engine.reserved)
    return len(engine.residents) + reserved, len(engine.inflight) + reserved


def held_tokens(view: ClusterView, engine: Engine) -> int:
    """Context tokens of the trajectories that live on the engine or have a reservation there."""
    return engine.resident_tokens + sum(t.context_tokens for t in view.reserved(engine))


class EngineSnapshot:
    """An engine during one admission.

    Parameters
    ----------
    free
        How many more trajectories may generate or queue.
    held
        Trajectories that live there or have a reservation.
    capacity_tokens
        KV memory that may be reserved; 0 when the engine does not report its memory.
    residents
        Trajectories that live there or have a reservation, and what is left of each. May be left out where none will
        be added.
    longest
        Of the residents.
    margin
        Standard deviations of the memory in use that are kept free.
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
        """The longest prompt of each group that is there: a sibling's prompt takes no memory of its own up to it."""
        prompts: dict[GroupId, int] = {}
        for trajectory, _ in self._residents:
            _keep_longest(prompts, trajectory)
        return prompts

    @functools.cached_property
    def _memory(self) -> MemoryProfile | None:
        """Made when it is first asked for: not needed where the queue is too long already."""
        if self._capacity_tokens <= 0:
            return None
        # `_need` and `_keep_longest` of each, written out: hundreds of residents at each look.
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
        """This much KV memory may be reserved from now on."""
        if self._memory is not None:
            self._capacity_tokens = capacity_tokens
            self._memory.set_capacity(capacity_tokens)

    def fits(self, trajectory: Trajectory, demand: RemainingDemand) -> bool:
        """Whether the memory suffices until the trajectory ends, in the mean."""
        if self._memory is None:
            return True
        need = _need(trajectory, demand, self.prompts)
        return self._memory.fits(need, demand.tokens, demand.stretch, demand.growth)

    def takes(self, trajectory: Trajectory, demand: RemainingDemand) -> bool:
        """Whether the trajectory may start here."""
        return self.fits(trajectory, demand)

    def may_ever_fit(self, demand: RemainingDemand) -> bool:
        """Whether the trajectory would fit if it were alone here."""
        return (
            self._capacity_tokens <= 0
            or demand.context_tokens + demand.growth * demand.tokens <= self._capacity_tokens
        )

    def add(self, trajectory: Trajectory, demand: RemainingDemand) -> None:
        """The trajectory has a reservation here."""
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
