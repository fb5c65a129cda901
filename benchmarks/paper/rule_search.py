"""The search of the best simple rule: a router, a uniform TP degree and a limit of live trajectories.

A limit is a number that a user must tune, as a TP degree is. So the baselines are searched on seeds of their own, and
the best of them is measured on others, as a tuned rule would be used.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.tables import names
from heddle_dask.core.errors import BadInput

ROUTERS = (
    "sticky-least-loaded",
    "verl",
    "verl-hybrid",
    "cache-aware",
    "autellix",
    "slime",
    "least-load",
)
"""Presets that take a limit. The first one runs with all limits, the others with those near its best one."""
PROBING = ("sticky-least-loaded", "verl-hybrid")
"""Presets that also run with the admission ``additive-increase``, which finds its limit by itself."""
LEAST_SHARE = 1 / 32
"""The smallest limit tried is this share of the trajectories."""
HOPELESS = 1.5
"""A router that takes this much longer than the best one, with that one's limit and alone, is not searched further."""
KEPT = 2
"""Routers and degrees whose limits are refined: the best by the coarse grid."""


def routers_named(text: str) -> tuple[str, ...]:
    """Those of `ROUTERS` that `text` names, separated by commas, in its order; all of them if it is empty.

    Raises
    ------
    BadInput
        A name is not one of them.
    """
    found = tuple(names(text))
    for name in found:
        if name not in ROUTERS:
            raise BadInput(f"--routers {name}: give {', '.join(ROUTERS)}")
    return found or ROUTERS


@dataclass(frozen=True, slots=True)
class SimpleRule:
    """One point of the search.

    Attributes
    ----------
    alive
        Limit of live trajectories; None: that of the preset, or none.
    probing
        With ``admission=additive-increase`` in place of a limit.
    """

    router: str
    tp_degree: int
    alive: int | None = None
    probing: bool = False

    @property
    def arm(self) -> str:
        """Text form of its strategies."""
        if self.probing:
            return f"{self.router}:admission=additive-increase"
        return self.router if self.alive is None else f"{self.router}:admission=at-most,alive={self.alive}"


Seconds = Callable[[SimpleRule], float]
Makespan = Callable[[SimpleRule, int], float]
"""Makespan of a rule with a seed. It is asked for the same pair again and again."""


class RuleSearch:
    """The best of all routers, degrees and limits by their makespans on the search seeds.

    Coarse, on the first seed and for each degree: the first router runs without a limit and with half of the
    trajectories, a quarter and so on, until two smaller limits in a row gain nothing. A good limit depends on the
    memory of the engines more than on the router, so the others climb from the best limit so far to half and twice of
    it, as long as that gains; without a limit each runs too. Fine: for the `KEPT` best pairs of router and degree,
    limits a factor of √2 and then of √√2 away, by the mean over all search seeds.

    Parameters
    ----------
    trajectories
        Of each run: no limit is larger.
    """

    def __init__(self, routers: Sequence[str], degrees: Sequence[int], trajectories: int, seeds: Sequence[int]) -> None:
        self._routers, self._degrees = tuple(routers), tuple(degrees)
        self._trajectories = trajectories
        self._seeds = tuple(seeds)

    def best(self, makespan_s: Makespan) -> list[SimpleRule]:
        """The best rule of each of the `KEPT` best pairs, best first."""

        def mean_s(rule: SimpleRule) -> float:
            return statistics.fmean(makespan_s(rule, seed) for seed in self._seeds)

        def first_s(rule: SimpleRule) -> float:
            return makespan_s(rule, self._seeds[0])

        coarse = sorted((rule for d in self._degrees for rule in self._coarse(d, first_s)), key=first_s)
        return sorted((self._refined(rule, mean_s) for rule in coarse[:KEPT]), key=mean_s)

    def _coarse(self, degree: int, seconds: Seconds) -> list[SimpleRule]:
        """The best rule of each router at one degree."""
        best = self._halved(SimpleRule(self._routers[0], degree), seconds)
        found = [best]
        for router in self._routers[1:]:
            found.append(self._climbed(SimpleRule(router, degree), best, seconds))
            best = min(best, found[-1], key=seconds)
        return found + [SimpleRule(name, degree, probing=True) for name in self._routers if name in PROBING]

    def _halved(self, start: SimpleRule, seconds: Seconds) -> SimpleRule:
        """The best of all limits, from the largest on."""
        best, worse, alive = start, 0, self._trajectories // 2
        while worse < 2 and alive >= max(1.0, LEAST_SHARE * self._trajectories):
            rule = replace(start, alive=alive)
            worse = 0 if seconds(rule) < seconds(best) else worse + 1
            best = min(best, rule, key=seconds)
            alive //= 2
        return best

    def _climbed(self, start: SimpleRule, known: SimpleRule, seconds: Seconds) -> SimpleRule:
        """The best limit near that of a known good rule, or no limit."""
        limit = known.alive or self._trajectories // 2
        best = min(start, replace(start, alive=limit), key=seconds)
        if seconds(best) > HOPELESS * seconds(known):
            return best
        for factor in (0.5, 2.0):
            alive = int((best.alive or limit) * factor)
            while 1 <= alive <= self._trajectories:
                rule = replace(start, alive=alive)
                if seconds(rule) >= seconds(best):
                    break
                best, alive = rule, int(alive * factor)
        return best

    def _refined(self, rule: SimpleRule, seconds: Seconds) -> SimpleRule:
        """The best limit near that of the rule; without one, near the number of trajectories."""
        for factor in () if rule.probing else (2**0.5, 2**0.25):
            limit = rule.alive or self._trajectories
            near = (max(1, round(limit / factor)), round(limit * factor))
            others = [replace(rule, alive=alive) for alive in near if alive < self._trajectories]
            rule = min((rule, *others), key=seconds)
        return rule
