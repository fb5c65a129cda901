"""Admission by the contexts that trajectories will reach, learned from those of the same run: no predictor, no number.

If the contexts of the live trajectories do not fit into the engines, each is evicted during its tool call and
prefilled again at nearly every step. Present contexts say little about that: trajectories that start together grow
together. So the KV use of all live trajectories is forecast over their growth still to come (`cost.context_forecast`),
and the next trajectory starts when the forecast with it never exceeds the memory.

`spread` was set on seed 400 (experiments.md, admission without parameters), the look for a prompt on seeds 340 to 343
(careful opponent), `fill` and `prior` on seeds 340 to 349 of three workloads and 0 to 7 of a fourth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.view import Admit, ClusterView
from heddle_dask.cost.context_forecast import ContextForecast
from heddle_dask.strategies.admission.growth_book import GroupPrompts, GrowthBook

# Waiting trajectories that are looked at for a prompt that an engine holds.
_MOST_ASKED = 256
# Before any has ended, no more than so many steps of the mean growth are expected of a trajectory.
_PRIOR_STEPS = 100


@dataclass(slots=True)
class KvForecast:
    """Admit the oldest waiting trajectory while the forecast KV use stays within the memory; at least one per engine.

    Each is admitted to the engine that will be least full at its fullest, where the prompt of a group counts once. The
    placement should honour the reservation. If any engine does not report its KV capacity, there is no limit.

    Parameters
    ----------
    fill
        Share of the KV memory that may be used. Above 1, since the forecast is of the fullest moment, and what is
        evicted then is little.
    prior
        Mean growth of a context before any has ended, as a share of the longest context: that of 100 steps if less.
    doubt
        Standard deviations by which the learned hazard of ending is lowered: how careful to be before many have ended.
        With more than 0, each trajectory has a margin of its own, which adds up: too few start.
    spread
        Standard deviations of an engine's forecast use that are kept free.
    """

    fill: float = 1.05
    prior: float = 0.3
    doubt: float = 0.0
    spread: float = 0.5
    _growth: GrowthBook = field(init=False, compare=False, default_factory=GrowthBook)
    _prompts: GroupPrompts = field(init=False, compare=False, default_factory=GroupPrompts)
    _forecast: ContextForecast | None = field(init=False, default=None)
    _engines: Sequence[Engine] | None = field(init=False, default=None)
    _known: bool = field(init=False, default=False)
    # The trajectory that did not fit; it is asked again with the next forecast.
    _rejected: Trajectory | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if min(self.fill, self.prior) <= 0 or min(self.doubt, self.spread) < 0:
            raise ValueError("use fill and prior above 0, doubt and spread from 0")

    def forget(self, trajectory: Trajectory) -> None:
        self._growth.ended(trajectory)

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
        if self._growth.is_due(view.alive) or self._forecast is None:
            self._forecast = self._forecast_now(view, engines)
            self._rejected = None
        if view.alive < len(engines):
            self._rejected = None
        while (first := next(iter(view.unadmitted), None)) is not None and first is not self._rejected:
            spec, prompt = first.spec, self._prompts.tokens_of(first, engines)
            number, fits = self._forecast.best_engine(spec.domain, prompt, spec.group_id)
            if not fits and view.alive >= len(engines):
                self._rejected = first
                return
            chosen = self._next(view, first, prompt, number)
            spec, prompt = chosen.spec, self._prompts.tokens_of(chosen, engines)
            self._forecast.add(spec.domain, prompt, spec.group_id, number)
            yield Admit(chosen, engines[number].engine_id, prompt)

    def _next(self, view: ClusterView, first: Trajectory, prompt_tokens: float, number: int) -> Trajectory:
        """The oldest, unless only other engines hold the prompt of its group and that prompt is long.

        Long: longer than the expected growth of a trajectory. Then it is the oldest that fits and has a prompt
        that this engine or none holds.
        """
        assert self._forecast is not None and self._engines is not None
        if prompt_tokens <= self._forecast.mean_growth(first.spec.domain):
            return first
        for trajectory in islice(view.unadmitted, _MOST_ASKED):
            spec = trajectory.spec
            if self._forecast.holds(number, spec.group_id) is False:
                continue
            prompt = self._prompts.tokens_of(trajectory, self._engines)
            if trajectory is first or self._forecast.fits(spec.domain, prompt, spec.group_id, number):
                return trajectory
        return first

    def _forecast_now(self, view: ClusterView, engines: Sequence[Engine]) -> ContextForecast:
        """Forecast from all that have ended, and the use of all that are alive, those of other runs included."""
        for engine in engines:
            for trajectory in view.residents(engine):
                self._prompts.began(trajectory)
        domains = self._growth.domains(view, engines, self._prompts)
        capacity_tokens = [self.fill * engine.spec.kv_capacity_tokens for engine in engines]
        most = float(max(engine.spec.max_context_tokens for engine in engines))
        prior_tokens = min(self.prior * most, _PRIOR_STEPS * self._growth.step_tokens)
        forecast = ContextForecast(domains, capacity_tokens, most, prior_tokens, doubt=self.doubt, spread=self.spread)
        for trajectory in view.homeless:  # they come back to one of these engines, and wait for no admission
            spec, context = trajectory.spec, self._prompts.tokens_of(trajectory, engines)
            number, _ = forecast.best_engine(spec.domain, context, spec.group_id)
            forecast.add(spec.domain, context, spec.group_id, number)
        return forecast
