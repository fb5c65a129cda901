"""Admission by the contexts that trajectories will reach, learned from those of the same run: no predictor, no number.

If the contexts of the live trajectories do not fit into the engines, each is evicted during its tool call and
prefilled again at nearly every step. Present contexts say little about that: trajectories that start together grow
together. So the KV use of all live trajectories is forecast over their growth still to come (`cost.context_growth`),
and the next trajectory starts when the forecast with it never exceeds the memory.

`doubt` and `spread` were set on seed 400 (docs/experiments, admission without parameters); the prior and the other
constants were not tuned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.view import Admit, ClusterView
from heddle_dask.cost.context_growth import ContextForecast, DomainGrowth

# Ended trajectories of a domain that count: a session may last for days, and the model that it samples changes.
_REMEMBERED = 4096
# The forecast is repeated when this share of the live trajectories has ended, or so many events per live trajectory
# have passed, but no fewer than the last number: it takes time for each trajectory, and half a millisecond in any case.
_ENDED_SHARE, _EVENTS_SHARE, _LEAST_EVENTS = 1 / 64, 1 / 16, 32
# Assumed first prompt as a share of the longest context, where tasks do not say its length.
_PROMPT_SHARE = 1 / 16


@dataclass(slots=True)
class KvForecast:
    """Admit the oldest waiting trajectory while the forecast KV use stays within the memory; at least one per engine.

    Each is admitted to the engine that will be least full at its fullest; the placement should honour the reservation.
    If any engine does not report its KV capacity, there is no limit.

    Parameters
    ----------
    fill
        Share of the KV memory that may be used.
    doubt
        Standard deviations by which the learned hazard of ending is lowered: how careful to be before many have ended.
    spread
        Standard deviations of an engine's forecast use that are kept free.
    """

    fill: float = 0.95
    doubt: float = 0.5
    spread: float = 0.5
    _ended: dict[str, deque[float]] = field(init=False, default_factory=dict)
    _cut: dict[str, deque[float]] = field(init=False, default_factory=dict)
    _forecast: ContextForecast | None = field(init=False, default=None)
    _engines: Sequence[Engine] | None = field(init=False, default=None)
    _known: bool = field(init=False, default=False)
    # The trajectory that did not fit; it is asked again with the next forecast.
    _rejected: Trajectory | None = field(init=False, default=None)
    # Trajectories that have ended, and calls, since the latest forecast.
    _left: int = field(init=False, default=0)
    _events: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.fill <= 0 or min(self.doubt, self.spread) < 0:
            raise ValueError("use fill above 0, doubt and spread from 0")

    def forget(self, trajectory: Trajectory) -> None:
        """Learn from a trajectory that has ended."""
        self._left += 1
        if trajectory.steps_finished:
            book = self._cut if trajectory.cancelled else self._ended
            rows = book.setdefault(trajectory.spec.domain, deque(maxlen=_REMEMBERED))
            rows.append(_growth_of(trajectory))

    def admit(self, view: ClusterView) -> Iterator[Admit]:
        """Admit the oldest that fit, each with a reservation on the engine that will be least full."""
        engines = view.ready_engines
        if engines is not self._engines:
            self._engines, self._forecast = engines, None
            self._known = all(engine.spec.kv_capacity_tokens > 0 for engine in engines)
        if not engines:
            return
        if not self._known:
            yield from [Admit(trajectory) for trajectory in view.unadmitted]
            return
        self._events += 1
        many = max(_LEAST_EVENTS, _EVENTS_SHARE * view.alive)
        due = self._left > _ENDED_SHARE * view.alive or self._events >= many
        if self._forecast is None or due:
            self._forecast = self._forecast_now(view, engines)
            self._left = self._events = 0
            self._rejected = None
        asked = self._rejected
        while (first := next(iter(view.unadmitted), None)) is not None and first is not asked:
            prompt = self._prompt_tokens(first, engines)
            number, fits = self._forecast.best_engine(first.spec.domain, prompt)
            if not fits and view.alive >= len(engines):
                self._rejected = first
                return
            self._forecast.add(first.spec.domain, prompt, number)
            asked = first
            yield Admit(first, engines[number].engine_id, prompt)

    def _forecast_now(self, view: ClusterView, engines: Sequence[Engine]) -> ContextForecast:
        """Forecast from all that have ended, and all that are alive, those of other runs included."""
        names = [*self._ended, *self._cut]
        domains = {n: DomainGrowth(self._ended.get(n, ()), self._cut.get(n, ())) for n in names}
        for number, engine in enumerate(engines):
            for trajectory in (*view.residents(engine), *view.reserved(engine)):
                domain = domains.setdefault(trajectory.spec.domain, DomainGrowth())
                domain.growth.append(_growth_of(trajectory))
                domain.contexts.append(float(trajectory.context_tokens))
                domain.engines.append(number)
        capacity_tokens = [self.fill * engine.spec.kv_capacity_tokens for engine in engines]
        most = float(max(engine.spec.max_context_tokens for engine in engines))
        prompt = self._prompt_tokens(next(iter(view.unadmitted), None), engines)
        return ContextForecast(domains, capacity_tokens, most, prompt, doubt=self.doubt, spread=self.spread)

    @staticmethod
    def _prompt_tokens(trajectory: Trajectory | None, engines: Sequence[Engine]) -> float:
        """Its first prompt; a share of the longest context where that is unknown."""
        if trajectory is not None and trajectory.context_tokens:
            return float(trajectory.context_tokens)
        return _PROMPT_SHARE * max(engine.spec.max_context_tokens for engine in engines)


def _growth_of(trajectory: Trajectory) -> float:
    """Tokens by which the context has grown beyond its first prompt."""
    if not trajectory.first_context_tokens:
        return 0.0
    return float(max(0, trajectory.context_tokens - trajectory.first_context_tokens))
