"""How far contexts will grow: a distribution of the total growth (`context_forecast`: the KV use that follows).

A trajectory's context grows from its first prompt until the trajectory ends. The total growth is random; it is learned
from trajectories that have ended and from running ones, whose growth so far is a lower bound (right-censored). Growth
is divided into bins of a quarter octave, with a hazard of ending in each (a life table: Kaplan-Meier in bins). A prior
defines the hazard where no trajectory has been yet.

Hazards are uncertain, and an error is common to all trajectories: it does not average out. So forecasts lower the
cumulative hazard by its standard deviation (Nelson-Aalen): careful with few observations, nothing with many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GROWTH_TOKENS: Floats = np.concatenate([[0.0], 64.0 * 2.0 ** (np.arange(61) / 4)])
"""Edges of the bins, from 0 to two million tokens; they are also the horizons of a forecast."""
_WIDTHS = np.diff(GROWTH_TOKENS)
_BINS = len(_WIDTHS)
# Prior: hazard per growth of a context by the factor e (one doubles with probability 0.71), and its weight. Set before
# any measurement, and not tuned.
_PRIOR_PER_E_FOLD = 0.5
_PRIOR_TRAJECTORIES = 1.0


def bin_of(growth_tokens: Floats) -> NDArray[np.int64]:
    """The bin in which each growth lies."""
    found = np.searchsorted(GROWTH_TOKENS, growth_tokens, side="right") - 1
    return np.clip(found, 0, _BINS - 1)


@dataclass(frozen=True, slots=True)
class GrowthCounts:
    """Observed growth: by bin, ends, and trajectories that reached it; one that is in it now counts half."""

    ends: Floats
    reached: Floats

    @classmethod
    def of(cls, ended: Sequence[float], running: Sequence[float]) -> GrowthCounts:
        """Count the total growth of ended trajectories and the growth so far of running ones."""
        ends = np.bincount(bin_of(np.array(ended, dtype=np.float64)), minlength=_BINS)
        here = np.bincount(bin_of(np.array(running, dtype=np.float64)), minlength=_BINS)
        both = ends + here
        beyond = both.sum() - np.cumsum(both)
        return cls(ends.astype(np.float64), beyond + ends + here / 2)

    def __add__(self, other: GrowthCounts) -> GrowthCounts:
        return GrowthCounts(self.ends + other.ends, self.reached + other.reached)


def prior_hazard(first_tokens: float) -> Floats:
    """Hazards before any observation: a context is as likely to double again whatever its length."""
    return _PRIOR_PER_E_FOLD * np.diff(np.log(GROWTH_TOKENS + max(1.0, first_tokens)))


class GrowthLaw:
    """Distribution of the growth still to come, by the growth so far.

    Parameters
    ----------
    counts
        What was observed.
    prior
        Hazard of each bin before that: `prior_hazard`, or `hazard` of a wider class of trajectories.
    doubt
        Standard deviations by which the cumulative hazard is lowered.

    Attributes
    ----------
    hazard
        Cumulative hazard of each bin.
    survival
        Row: bin of the growth so far; column: horizon of `GROWTH_TOKENS`. The probability that a trajectory grows by
        more than the horizon from there.
    """

    def __init__(self, counts: GrowthCounts, prior: Floats, doubt: float) -> None:
        reached = counts.reached + _PRIOR_TRAJECTORIES
        ends = counts.ends + _PRIOR_TRAJECTORIES * -np.expm1(-prior)
        self.hazard: Floats = -np.log1p(-ends / reached)
        mean = np.concatenate([[0.0], np.cumsum(self.hazard)])
        variance = np.concatenate([[0.0], np.cumsum(ends / reached**2)])
        start = GROWTH_TOKENS[:-1]
        until = start[:, None] + GROWTH_TOKENS[None, :]
        ahead = np.interp(until, GROWTH_TOKENS, mean) - mean[:-1, None]
        unsure = np.interp(until, GROWTH_TOKENS, variance) - variance[:-1, None]
        low = np.maximum.accumulate(np.maximum(0.0, ahead - doubt * np.sqrt(np.maximum(0.0, unsure))), axis=1)
        self.survival: Floats = np.exp(-low)


class GrowingContext(NamedTuple):
    """A live trajectory.

    Attributes
    ----------
    growth
        Tokens by which its context has grown so far.
    context_tokens
        Its present context, with the first prompt.
    engine
        Number of its engine.
    group
        Its group, whose members have the first prompt in common.
    """

    growth: float
    context_tokens: float
    engine: int
    group: str


@dataclass(slots=True)
class DomainGrowth:
    """What is known of the trajectories of one domain.

    Attributes
    ----------
    ended
        Total growth of those that have ended.
    cut
        Growth of those that were stopped before they ended by themselves.
    live
        Those that are alive.
    others
        Those of other runs that are alive. They hold memory, but nothing is learned from them: their ends are not seen.
    """

    ended: Sequence[float] = ()
    cut: Sequence[float] = ()
    live: list[GrowingContext] = field(default_factory=list)
    others: list[GrowingContext] = field(default_factory=list)

    @property
    def growth(self) -> list[float]:
        """Growth so far of those that are alive."""
        return [each.growth for each in self.live]


class GrowthLaws:
    """The law of each domain; the hazards of all together are the prior of each.

    Parameters
    ----------
    domains
        What is known of each domain.
    first_tokens
        Length of a first prompt, while no trajectory has begun.
    doubt
        Standard deviations by which cumulative hazards are lowered.
    """

    def __init__(self, domains: Mapping[str, DomainGrowth], first_tokens: float, doubt: float) -> None:
        counts = {name: GrowthCounts.of(list(d.ended), [*d.cut, *d.growth]) for name, d in domains.items()}
        prior = prior_hazard(_first_tokens(domains, first_tokens))
        self._every = GrowthLaw(sum(counts.values(), GrowthCounts.of((), ())), prior, doubt)
        self._laws: dict[str, GrowthLaw] = {}
        if len(domains) > 1:
            self._laws = {name: GrowthLaw(c, self._every.hazard, doubt) for name, c in counts.items()}

    def of(self, domain: str) -> GrowthLaw:
        """The law of a domain; that of all together where it was never seen."""
        return self._laws.get(domain, self._every)


def _first_tokens(domains: Mapping[str, DomainGrowth], unknown: float) -> float:
    """Mean first prompt of the live trajectories."""
    first = [each.context_tokens - each.growth for domain in domains.values() for each in domain.live]
    return max(1.0, sum(first) / len(first)) if first else unknown
