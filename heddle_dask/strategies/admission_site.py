"""One engine as an admission sees it: how many may still queue, how many it holds, its memory and its prompts."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from heddle_dask.core.ids import GroupId
from heddle_dask.core.state import Engine, Trajectory
from heddle_dask.strategies.memory_profile import MemoryProfile


class AdmissionSite:
    """An engine during one admission.

    Parameters
    ----------
    free
        How many more may generate or queue.
    capacity_tokens
        KV memory that may be promised; 0 when the engine does not say how much it has.
    growth
        Context tokens that come with each generated one.
    residents
        Who lives there or is coming, and what each has left.

    Attributes
    ----------
    held
        How many those are.
    prompts
        The longest prompt of each group that is there: as much of the others' prompts takes no memory of its own.
    """

    def __init__(
        self,
        engine: Engine,
        free: float,
        capacity_tokens: float,
        growth: float,
        residents: Iterable[tuple[Trajectory, float]],
    ) -> None:
        self.engine = engine
        self.free = free
        self.held = 0
        self.prompts: dict[GroupId, int] = {}
        needs = []
        for trajectory, left in residents:
            needs.append((self._need(trajectory), left))
            self._count(trajectory)
        self._known = (capacity_tokens, growth, needs)

    @functools.cached_property
    def _memory(self) -> MemoryProfile | None:
        """Made when it is first asked for: where the queue is too long already, nobody asks."""
        capacity_tokens, growth, needs = self._known
        return MemoryProfile(capacity_tokens, growth, needs) if capacity_tokens > 0 else None

    def _need(self, trajectory: Trajectory) -> float:
        context = max(trajectory.context_tokens, trajectory.spec.prompt_tokens)
        shared = min(trajectory.spec.prompt_tokens, self.prompts.get(trajectory.spec.group_id, 0))
        return float(context - shared)

    def _count(self, trajectory: Trajectory) -> None:
        self.held += 1
        group, prompt = trajectory.spec.group_id, trajectory.spec.prompt_tokens
        self.prompts[group] = max(prompt, self.prompts.get(group, 0))

    def fits(self, trajectory: Trajectory, left_tokens: float) -> bool:
        """Whether it fits until it ends."""
        return self._memory is None or self._memory.fits(self._need(trajectory), left_tokens)

    def add(self, trajectory: Trajectory, left_tokens: float) -> None:
        """It will come."""
        if self._memory is not None:
            self._memory.add(self._need(trajectory), left_tokens)
        self.free -= 1
        self._count(trajectory)

    def __lt__(self, other: AdmissionSite) -> bool:
        return (self.share, self.engine.number) < (other.share, other.engine.number)

    @property
    def share(self) -> float:
        """Trajectories per slot, or KV memory held, whichever is more of what there is; four a slot are all."""
        slots = self.held / (4 * self.engine.spec.slots)
        return slots if self._memory is None else max(slots, self._memory.held_share)
