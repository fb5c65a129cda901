"""Demand of trajectories that nothing was predicted of, by the growth of the contexts of the same run."""

from __future__ import annotations

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.context_growth import GROWTH_TOKENS, GrowthLaws
from heddle_dask.strategies.admission.growth_book import GrowthBook, first_prompt_tokens, growth_so_far
from heddle_dask.strategies.remaining_demand import RemainingDemand


class UnknownLengths:
    """Growth still to come in place of tokens: every token that a context grows by counts as one to generate."""

    def __init__(self) -> None:
        self._book = GrowthBook()
        self._laws: GrowthLaws | None = None

    def ended(self, trajectory: Trajectory) -> None:
        """Learn from a trajectory that has ended."""
        self._book.ended(trajectory)

    def update(self, view: ClusterView) -> None:
        """Look at the live trajectories again, from time to time."""
        engines = view.ready_engines
        if not engines or not (self._book.is_due(view.alive) or self._laws is None):
            return
        first = first_prompt_tokens(next(iter(view.unadmitted), None), engines)
        self._laws = GrowthLaws(self._book.domains(view, engines), first)

    def demand(self, trajectory: Trajectory, count: int, most_tokens: float) -> RemainingDemand:
        """The demand from now to its end, with `count` lengths; a trajectory ends at a context of `most_tokens`."""
        context = float(max(trajectory.context_tokens, trajectory.spec.prompt_tokens))
        if self._laws is None:
            return RemainingDemand(0.0, (0.0,), context_tokens=context)
        room = max(0.0, most_tokens - context)
        law = self._laws.of(trajectory.spec.domain)
        mean, lengths = law.growth_left(growth_so_far(trajectory), min(room, GROWTH_TOKENS[-1]), count)
        return RemainingDemand(mean, lengths, context_tokens=context)
