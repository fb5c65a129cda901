"""Admission that probes: raises the limit of live trajectories while engines are calm, and cuts it under pressure.

The rule and its constants are those of prime-rl's concurrency controller (`src/prime_rl/orchestrator/concurrency.py`,
commit 559b447), where "inflight" counts whole rollouts; none was chosen here, except `_TRANSIT`, which only covers the
path of a step to its engine. It looks at running steps only, not at idle contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from heddle_dask.core.entities import Engine
from heddle_dask.core.view import Admit, ClusterView

_BINDING = 0.9
"""The limit rises only while this share of it is alive."""
_QUEUE_RATIO = 0.5
"""Engines are overloaded if more steps wait there than this share of those that run, for `_QUEUE_POLLS` polls."""
_QUEUE_POLLS = 6
_QUEUE_CUT = 0.9
_TRIM_POLLS = 6
"""Polls between two trims, so that each shows its effect first."""
_TRANSIT = 0.1
"""Steps on their way to an engine count as waiting here: up to this share of the running ones is no queue."""


@dataclass(slots=True)
class AdditiveIncrease:
    """Each trajectory that ends adds a constant to the limit while KV use is low; pressure cuts it by a factor.

    The limit starts where every trajectory could fill its context. If any engine does not report its KV capacity, there
    is no limit. Live trajectories are never stopped, where prime-rl cancels the youngest: after a cut, new ones wait
    until enough have ended.

    Parameters
    ----------
    low, high
        Shares of an engine's KV capacity in use by running steps, on the fullest engine: the limit rises below `low`,
        and is trimmed above `high`.
    target
        A trim lowers the limit to what would use this share.
    growth
        Factor by which the limit rises while as many end as are alive.
    cut
        Factor after engines had to compute evicted contexts again. prime-rl reads preemptions of running requests here,
        which evictions precede.
    poll_s
        Seconds between two looks at the engines.
    """

    low: float = 0.6
    high: float = 0.8
    target: float = 0.7
    growth: float = 1.25
    cut: float = 0.8
    poll_s: float = 5.0
    _limit: float = field(init=False, default=0.0)
    _alive: int = field(init=False, default=0)
    _engines: Sequence[Engine] | None = field(init=False, default=None)
    _known: bool = field(init=False, default=False)
    _next_poll_s: float = field(init=False, default=0.0)
    _is_calm: bool = field(init=False, default=False)
    _is_draining: bool = field(init=False, default=False)
    _evictions: int = field(init=False, default=0)
    _queue_polls: int = field(init=False, default=0)
    _trim_polls: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.target <= self.high:
            raise ValueError("use 0 < low <= target <= high")
        if self.growth <= 1 or not 0 < self.cut < 1 or self.poll_s <= 0:
            raise ValueError("use growth > 1, 0 < cut < 1 and poll_s > 0")

    def admit(self, view: ClusterView) -> Sequence[Admit]:
        engines = view.ready_engines
        if engines is not self._engines:
            self._take_engines(engines)
        if not self._known:
            return [Admit(trajectory) for trajectory in view.unadmitted]
        if not view.alive:
            self._evictions = view.evictions  # ignore evictions of a batch that has ended
        self._count_ended(view.alive)
        if view.at >= self._next_poll_s:
            self._next_poll_s = view.at + self.poll_s
            self._poll(engines, view.alive, view.evictions)
        room = max(0, int(self._limit) - view.alive)
        admitted = [Admit(trajectory) for trajectory in islice(view.unadmitted, room)]
        self._alive = view.alive + len(admitted)
        return admitted

    def _take_engines(self, engines: Sequence[Engine]) -> None:
        """Raise the limit to its start if the engines have become more."""
        self._engines = engines
        self._known = all(engine.spec.kv_capacity_tokens > 0 for engine in engines)
        start = sum(engine.spec.kv_capacity_tokens / engine.spec.max_context_tokens for engine in engines)
        self._limit = max(self._limit, start, 1.0)

    def _count_ended(self, alive: int) -> None:
        """Raise the limit for the trajectories that have ended since the last call, if engines are calm."""
        for before in range(self._alive, alive, -1):
            if self._is_calm and before >= _BINDING * int(self._limit):
                self._limit *= self.growth ** (1 / before)

    def _poll(self, engines: Sequence[Engine], alive: int, evictions: int) -> None:
        """Look at the engines: are they calm, and is the limit to be cut?"""
        use = max([_kv_use(engine) for engine in engines], default=0.0)
        running = sum([len(engine.running) for engine in engines])
        waiting = sum([len(engine.inflight) for engine in engines]) - running
        crowded = running > 0 and waiting > _QUEUE_RATIO * running
        self._queue_polls = self._queue_polls + 1 if crowded else 0
        overloaded = self._queue_polls >= _QUEUE_POLLS
        evicted = evictions > self._evictions
        self._evictions = evictions
        if self._is_draining and alive <= self._limit and not evicted and not overloaded:
            self._is_draining = False
        self._trim_polls = max(0, self._trim_polls - 1)
        pressed = evicted or overloaded or use > self.low or waiting > _TRANSIT * running
        self._is_calm = not pressed and not self._is_draining
        if self._is_draining:
            return  # what is left of the pressure is that of the time before the cut
        if evicted or overloaded:
            self._cut_to(alive * (_QUEUE_CUT if overloaded else self.cut))
            self._queue_polls, self._is_draining = 0, True
        elif use > self.high and not self._trim_polls:
            self._cut_to(alive * self.target / use)
            self._trim_polls = _TRIM_POLLS

    def _cut_to(self, limit: float) -> None:
        self._limit = max(1.0, min(self._limit, limit))


def _kv_use(engine: Engine) -> float:
    """Share of the KV capacity that the contexts of running steps take."""
    held = sum([trajectory.context_tokens for trajectory in engine.running.values()])
    return held / engine.spec.kv_capacity_tokens
