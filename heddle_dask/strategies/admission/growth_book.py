"""Growth of contexts as a run observes it: of trajectories that have ended, and of those that are alive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId, GroupId
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.context_growth import DomainGrowth

# Ended trajectories of a domain that count: a session may last for days, and the model that it samples changes.
_REMEMBERED = 4096
# Groups whose prompt may still be cached.
_MOST_GROUPS = 10_000
# Forecasts are repeated when this share of the live trajectories has ended, or so many events per live trajectory have
# passed, but no fewer than the last number: one takes time for each trajectory, and half a millisecond in any case.
_ENDED_SHARE, _EVENTS_SHARE, _LEAST_EVENTS = 1 / 64, 1 / 16, 32
# Assumed first prompt as a share of the longest context, where tasks do not say its length.
_PROMPT_SHARE = 1 / 16


class GrowthBook:
    """Keeps the total growth of ended trajectories, by domain; the latest ones only."""

    __slots__ = ("_cut", "_ended", "_events", "_left")

    def __init__(self) -> None:
        self._ended: dict[str, deque[float]] = {}
        self._cut: dict[str, deque[float]] = {}
        self._left = self._events = 0

    def ended(self, trajectory: Trajectory) -> None:
        """Record a trajectory that has ended, or was cut off."""
        self._left += 1
        if trajectory.steps_finished:
            book = self._cut if trajectory.cancelled else self._ended
            rows = book.setdefault(trajectory.spec.domain, deque(maxlen=_REMEMBERED))
            rows.append(growth_so_far(trajectory))

    def is_due(self, alive: int) -> bool:
        """Count an event; whether enough has happened since the last True for another look at the live ones."""
        self._events += 1
        many = max(_LEAST_EVENTS, _EVENTS_SHARE * alive)
        due = self._left > _ENDED_SHARE * alive or self._events >= many
        if due:
            self._left = self._events = 0
        return due

    def domains(self, view: ClusterView, engines: Sequence[Engine]) -> dict[str, DomainGrowth]:
        """All that have ended, and all that are alive on `engines`, those of other runs included."""
        names = dict.fromkeys([*self._ended, *self._cut])
        domains = {n: DomainGrowth(self._ended.get(n, ()), self._cut.get(n, ())) for n in names}
        for number, engine in enumerate(engines):
            for trajectory in (*view.residents(engine), *view.reserved(engine)):
                domain = domains.setdefault(trajectory.spec.domain, DomainGrowth())
                domain.growth.append(growth_so_far(trajectory))
                domain.contexts.append(float(trajectory.context_tokens))
                domain.engines.append(number)
        return domains


class GroupPrompts:
    """Where the first prompt of each group is, and how long it is; the groups that were admitted last."""

    __slots__ = ("_engines", "_tokens")

    def __init__(self) -> None:
        self._engines: dict[GroupId, EngineId] = {}
        self._tokens: dict[GroupId, int] = {}

    def admit(self, group_id: GroupId, engine_id: EngineId) -> None:
        """Record the engine of the first member; the group counts as used last."""
        self._engines[group_id] = self._engines.pop(group_id, engine_id)
        if len(self._engines) > _MOST_GROUPS:
            oldest = next(iter(self._engines))
            del self._engines[oldest]
            self._tokens.pop(oldest, None)

    def began(self, trajectory: Trajectory) -> None:
        """Record the first prompt of a member."""
        group_id = trajectory.spec.group_id
        if group_id in self._engines:
            self._tokens[group_id] = trajectory.first_context_tokens

    def tokens(self, group_id: GroupId) -> int:
        """Tokens of the group's first prompt; 0 where no member has begun."""
        return self._tokens.get(group_id, 0)

    def engine(self, group_id: GroupId) -> EngineId | None:
        """The engine of the member that was admitted first."""
        return self._engines.get(group_id)


def growth_so_far(trajectory: Trajectory) -> float:
    """Tokens by which the context has grown beyond its first prompt."""
    if not trajectory.first_context_tokens:
        return 0.0
    return float(max(0, trajectory.context_tokens - trajectory.first_context_tokens))


def first_prompt_tokens(trajectory: Trajectory | None, engines: Iterable[Engine], of_group: int = 0) -> float:
    """Its first prompt, else that of its group; a share of the longest context where that is unknown."""
    if trajectory is not None and trajectory.context_tokens:
        return float(trajectory.context_tokens)
    if of_group:
        return float(of_group)
    return _PROMPT_SHARE * max(engine.spec.max_context_tokens for engine in engines)
