"""One engine as an admission sees it: how many may still queue, how many it holds, its memory and its prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import GroupId
from heddle_dask.cost.memory_profile import MemoryProfile
from heddle_dask.strategies.admission.engine_backlog import EngineRoom, ask_of
from heddle_dask.strategies.remaining import is_certain
from heddle_dask.strategies.remaining_demand import Stay


class Longest(NamedTuple):
    """Who of an engine ends last: its path, the tokens of that, and whether there is no doubt about them."""

    path: float
    tokens: float
    exact: bool


NOBODY = Longest(0.0, 0.0, exact=True)


def longest_of(there: Sequence[tuple[Trajectory, Stay]]) -> Longest:
    """Who ends last of them."""
    paths = [stay.tokens * stay.stretch for _, stay in there]
    if not paths:
        return NOBODY
    path = max(paths)
    trajectory, stay = there[paths.index(path)]
    return Longest(path, stay.tokens, is_certain(trajectory))


class AdmissionSite:
    """An engine during one admission.

    Parameters
    ----------
    free
        How many more may generate or queue.
    held
        How many live there or are coming.
    capacity_tokens
        KV memory that may be promised; 0 when the engine does not say how much it has.
    longest
        Of the residents.
    residents
        Who lives there or is coming, and how long each may stay. May be left out where nobody will be fitted in.
    margin
        Standard deviations of the memory in use that are kept free.
    room
        Its work until everything is to be done; None: that does not matter.

    Attributes
    ----------
    late
        Who fits by memory, and would not be done in time; None while nobody was found.
    """

    def __init__(
        self,
        engine: Engine,
        free: float,
        held: int,
        capacity_tokens: float = 0.0,
        residents: Sequence[tuple[Trajectory, Stay]] = (),
        longest: Longest = NOBODY,
        margin: float = 0.0,
        room: EngineRoom | None = None,
    ) -> None:
        self.engine = engine
        self.free = free
        self.held = held
        self._capacity_tokens = capacity_tokens
        self._residents = residents
        self.longest = longest
        self._margin = margin
        self.room = room
        self.late: Trajectory | None = None

    @functools.cached_property
    def prompts(self) -> dict[GroupId, int]:
        """The longest prompt of each group that is there: as much of the others' prompts takes no memory of its own."""
        prompts: dict[GroupId, int] = {}
        for trajectory, _ in self._residents:
            _keep_longest(prompts, trajectory)
        return prompts

    @functools.cached_property
    def _memory(self) -> MemoryProfile | None:
        """Made when it is first asked for: where the queue is too long already, nobody asks."""
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
        """So much may be promised from now on."""
        if self._memory is not None:
            self._capacity_tokens = capacity_tokens
            self._memory.set_capacity(capacity_tokens)

    def fits(self, trajectory: Trajectory, stay: Stay) -> bool:
        """Whether it fits until it ends, in the mean."""
        if self._memory is None:
            return True
        need = _need(trajectory, stay, self.prompts)
        return self._memory.fits(need, stay.tokens, stay.stretch, stay.growth)

    def may_ever_fit(self, stay: Stay) -> bool:
        """Whether it would fit if nobody else were there."""
        return (
            self._capacity_tokens <= 0
            or stay.context_tokens + stay.growth * stay.tokens <= self._capacity_tokens
        )

    def in_time(self, stay: Stay) -> bool:
        """Whether it will be done in time with one more."""
        return self.room is None or self.room.fits(ask_of(stay))

    def add(self, trajectory: Trajectory, stay: Stay) -> None:
        """It will come."""
        if self._memory is not None:
            need = _need(trajectory, stay, self.prompts)
            self._memory.add(need, stay.lengths, stay.stretch, stay.growth)
        if self.room is not None:
            self.room.add(ask_of(stay))
        self.free -= 1
        self.held += 1
        _keep_longest(self.prompts, trajectory)


def _need(trajectory: Trajectory, stay: Stay, prompts: dict[GroupId, int]) -> float:
    """KV tokens of its own."""
    shared = min(trajectory.spec.prompt_tokens, prompts.get(trajectory.spec.group_id, 0))
    return stay.context_tokens - shared


def _keep_longest(prompts: dict[GroupId, int], trajectory: Trajectory) -> None:
    group, prompt = trajectory.spec.group_id, trajectory.spec.prompt_tokens
    if prompt > prompts.get(group, 0):
        prompts[group] = prompt
