"""Growth of contexts as a run observes it: of trajectories that have ended, and of those that are alive."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import GroupId
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.context_forecast import DomainGrowth, GrowingContext

# Ended trajectories of a domain that count: a session may last for days, and the model that it samples changes.
_REMEMBERED = 4096
# Groups whose first prompt is known, the latest ones.
_MOST_GROUPS = 10_000
# Forecasts are repeated when this share of the live trajectories has ended, or so many events per live trajectory have
# passed, but no fewer than the last number: one takes 3 to 5 microseconds for each trajectory, and 0.6 milliseconds in
# any case. With 1/16 and 32 the sum of six draws (seeds 340 and 341) is 1 % smaller, less than draws scatter.
_ENDED_SHARE, _EVENTS_SHARE, _LEAST_EVENTS = 1 / 64, 1 / 8, 128
# Assumed first prompt as a share of the longest context, where tasks do not say its length.
_PROMPT_SHARE = 1 / 16


class GrowthBook:
    """Keeps the total growth of ended trajectories, by domain; the latest ones only.

    Attributes
    ----------
    step_tokens
        Mean growth of a context by one step, as last counted; infinite before any step has finished.
    """

    __slots__ = ("_cut", "_ended", "_ended_steps", "_events", "_left", "step_tokens")

    def __init__(self) -> None:
        self._ended: dict[str, deque[float]] = {}
        self._cut: dict[str, deque[float]] = {}
        self._left = self._events = 0
        # Tokens and steps of all that have ended.
        self._ended_steps = 0.0, 0
        self.step_tokens = math.inf

    def ended(self, trajectory: Trajectory) -> None:
        """Record a trajectory that has ended, or was cut off."""
        self._left += 1
        if trajectory.steps_finished:
            book = self._cut if trajectory.cancelled else self._ended
            rows = book.setdefault(trajectory.spec.domain, deque(maxlen=_REMEMBERED))
            rows.append(growth := growth_so_far(trajectory))
            tokens, steps = self._ended_steps
            self._ended_steps = tokens + growth, steps + trajectory.steps_finished

    def is_due(self, alive: int) -> bool:
        """Count an event; whether enough has happened since the last True for another look at the live ones."""
        self._events += 1
        many = max(_LEAST_EVENTS, _EVENTS_SHARE * alive)
        due = self._left > _ENDED_SHARE * alive or self._events >= many
        if due:
            self._left = self._events = 0
        return due

    def domains(self, view: ClusterView, engines: Sequence[Engine], prompts: GroupPrompts) -> dict[str, DomainGrowth]:
        """All that have ended, and all that are alive on `engines`, those of other runs included."""
        names = dict.fromkeys([*self._ended, *self._cut])
        domains = {n: DomainGrowth(self._ended.get(n, ()), self._cut.get(n, ())) for n in names}
        tokens, steps = self._ended_steps
        for number, engine in enumerate(engines):
            for trajectory in (*view.residents(engine), *view.reserved(engine)):
                spec, growth = trajectory.spec, growth_so_far(trajectory)
                domain = domains.get(spec.domain)
                if domain is None:
                    domain = domains[spec.domain] = DomainGrowth()
                context = trajectory.context_tokens if growth else prompts.tokens_of(trajectory, engines)
                own = view.is_own(trajectory)
                if own:
                    tokens, steps = tokens + growth, steps + trajectory.steps_finished
                live = domain.live if own else domain.others
                live.append(GrowingContext(growth, float(context), number, spec.group_id))
        self.step_tokens = max(1.0, tokens / steps) if steps else math.inf
        return domains


class GroupPrompts:
    """Length of the first prompt of each group, as its first member shows it; the latest groups only."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens: dict[GroupId, int] = {}

    def began(self, trajectory: Trajectory) -> None:
        """Record the first prompt of a member."""
        if trajectory.first_context_tokens:
            self._tokens.setdefault(trajectory.spec.group_id, trajectory.first_context_tokens)
            if len(self._tokens) > _MOST_GROUPS:
                del self._tokens[next(iter(self._tokens))]

    def tokens_of(self, trajectory: Trajectory, engines: Iterable[Engine]) -> float:
        """Its first prompt, else that of its group; a share of the longest context where that is unknown."""
        known = trajectory.context_tokens or self._tokens.get(trajectory.spec.group_id, 0)
        return float(known) if known else unknown_prompt_tokens(engines)


def unknown_prompt_tokens(engines: Iterable[Engine]) -> float:
    """A first prompt of which nothing is known."""
    return _PROMPT_SHARE * max(engine.spec.max_context_tokens for engine in engines)


def growth_so_far(trajectory: Trajectory) -> float:
    """Tokens by which the context has grown beyond its first prompt."""
    if not trajectory.first_context_tokens:
        return 0.0
    return float(max(0, trajectory.context_tokens - trajectory.first_context_tokens))
