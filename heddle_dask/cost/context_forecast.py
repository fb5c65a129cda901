"""How far contexts will grow, and the KV use that the trajectories on each engine will reach.

A trajectory's context grows from its first prompt until the trajectory ends. The total growth is random; it is learned
from trajectories that have ended and from running ones, whose growth so far is a lower bound (right-censored). Growth
is divided into bins of a quarter octave, with a hazard of ending in each (a life table: Kaplan-Meier in bins). A prior
defines the hazard where no trajectory has been yet.

Hazards are uncertain, and an error is common to all trajectories: it does not average out. A forecast may lower the
cumulative hazard by its standard deviation (Nelson-Aalen): careful with few observations, nothing with many.

In a forecast all contexts grow at one pace, until their trajectories end. The members of a group have their first
prompt in common, and an engine holds it once, until the last of them ends. So the use of an engine after a horizon is
the sum of each prompt, if any member of its group on this engine still runs then, and of what each running trajectory
has beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GROWTH_TOKENS: Floats = np.concatenate([[0.0], 64.0 * 2.0 ** (np.arange(61) / 4)])
"""Edges of the bins, from 0 to two million tokens; they are also the horizons of a forecast."""
_WIDTHS = np.diff(GROWTH_TOKENS)
_BINS = len(_WIDTHS)
# Growth after each horizon (column) from the start of each bin (row), the bin in which it is, and how far in.
_UNTIL: Floats = GROWTH_TOKENS[:-1, None] + GROWTH_TOKENS
_UNTIL_BIN: NDArray[np.intp] = np.minimum(np.searchsorted(GROWTH_TOKENS, _UNTIL, side="right") - 1, _BINS - 1)
_UNTIL_IN_BIN: Floats = np.minimum(_UNTIL, GROWTH_TOKENS[-1]) - GROWTH_TOKENS[_UNTIL_BIN]
# Hazard of a bin that all but no trajectory survives; one of 1 has no logarithm.
_MOST_HAZARD = 20.0
# Trajectories that the prior counts for.
_PRIOR_TRAJECTORIES = 1.0


def bin_of(growth_tokens: Floats) -> NDArray[np.int64]:
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


def prior_hazard(mean_tokens: float) -> Floats:
    """Hazards before any observation: growth is exponential, so that each token is as likely to be the last."""
    return np.minimum(_WIDTHS / mean_tokens, _MOST_HAZARD)


class GrowthLaw:
    """Distribution of the growth still to come, by the growth so far.

    Parameters
    ----------
    prior
        Hazard of each bin before that: `prior_hazard`, or `hazard` of a wider class of trajectories.
    doubt
        Standard deviations by which the cumulative hazard is lowered.
    horizons
        Number of horizons of `survival`, from the first.

    Attributes
    ----------
    hazard
        Cumulative hazard of each bin.
    """

    def __init__(self, counts: GrowthCounts, prior: Floats, doubt: float, horizons: int = _BINS + 1) -> None:
        self._reached = counts.reached + _PRIOR_TRAJECTORIES
        self._ends = counts.ends + _PRIOR_TRAJECTORIES * -np.expm1(-prior)
        self._doubt, self._horizons = doubt, horizons
        self.hazard: Floats = -np.log1p(-self._ends / self._reached)

    @cached_property
    def survival(self) -> Floats:
        """The probability that a trajectory grows by more than a horizon from where it is.

        Row: bin of the growth so far; column: horizon of `GROWTH_TOKENS`.
        """
        ahead = self._ahead(self.hazard)
        if self._doubt > 0:
            unsure = self._ahead(self._ends / self._reached**2)
            ahead -= self._doubt * np.sqrt(np.maximum(0.0, unsure))
        survival: Floats = np.exp(-np.maximum.accumulate(np.maximum(0.0, ahead), axis=1))
        return survival

    def _ahead(self, of_bins: Floats) -> Floats:
        """The sum over what lies between each start and each horizon, even within a bin."""
        sums = np.concatenate([[0.0], np.cumsum(of_bins)])
        bins = _UNTIL_BIN[:, : self._horizons]
        ahead: Floats = (np.diff(sums) / _WIDTHS)[bins] * _UNTIL_IN_BIN[:, : self._horizons] + sums[bins]
        ahead -= sums[:-1, None]
        return ahead


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
    """The law of each domain; the hazards of all together are the prior of each."""

    def __init__(
        self, domains: Mapping[str, DomainGrowth], prior_tokens: float, doubt: float, horizons: int = _BINS + 1
    ) -> None:
        counts = {name: GrowthCounts.of(list(d.ended), [*d.cut, *d.growth]) for name, d in domains.items()}
        hazard = prior_hazard(prior_tokens)
        self._every = GrowthLaw(sum(counts.values(), GrowthCounts.of((), ())), hazard, doubt, horizons)
        self._laws: dict[str, GrowthLaw] = {}
        if len(domains) > 1:
            self._laws = {name: GrowthLaw(c, self._every.hazard, doubt, horizons) for name, c in counts.items()}

    def of(self, domain: str) -> GrowthLaw:
        """The law of a domain; that of all together where it was never seen."""
        return self._laws.get(domain, self._every)


class _Group(NamedTuple):
    """The members of one group on one engine.

    Attributes
    ----------
    prompt_tokens
        The first prompt that they share.
    gone
        Probability that none of them runs, by horizon.
    own_tokens
        Mean tokens that the running ones have beyond the prompt, by horizon.
    """

    prompt_tokens: float
    gone: Floats
    own_tokens: Floats


class ContextForecast:
    """Mean and variance of the KV use of every engine after every horizon of `GROWTH_TOKENS`.

    Parameters
    ----------
    capacity_tokens
        KV tokens of each engine that may be used.
    most_tokens
        Longest context that engines take: a trajectory ends there.
    prior_tokens
        Mean growth of a context before any trajectory has ended.
    doubt
        Standard deviations by which cumulative hazards are lowered.
    spread
        Standard deviations of the use that are kept free. Trajectories end independently of each other.
    """

    def __init__(
        self,
        domains: Mapping[str, DomainGrowth],
        capacity_tokens: Sequence[float],
        most_tokens: float,
        prior_tokens: float,
        *,
        doubt: float,
        spread: float,
    ) -> None:
        self._capacity = np.array(capacity_tokens, dtype=np.float64)
        self._most_tokens, self._spread = most_tokens, spread
        # Beyond the first horizon at which every trajectory has ended, nothing changes.
        self._horizons = GROWTH_TOKENS[: int(np.searchsorted(GROWTH_TOKENS, most_tokens)) + 1]
        self._mean: Floats = np.zeros((len(capacity_tokens), len(self._horizons)))
        self._variance: Floats = np.zeros_like(self._mean)
        self._groups: dict[str, dict[int, _Group]] = {}
        self._laws = GrowthLaws(domains, prior_tokens, doubt, len(self._horizons))
        for name, domain in domains.items():
            if live := [*domain.live, *domain.others]:
                self._add_all(self._laws.of(name), live)

    def shares(self) -> Floats:
        """The largest use of each engine over all horizons, with the margin, as a share of its capacity."""
        return self._shares(self._mean, self._variance)

    def best_engine(self, domain: str, context_tokens: float, group: str) -> tuple[int, bool]:
        """The engine that is least full at its fullest with one more new trajectory, and whether that fits there."""
        shares = self._shares_with(domain, context_tokens, group)
        engine = int(shares.argmin())
        return engine, bool(shares[engine] <= 1.0)

    def fits(self, domain: str, context_tokens: float, group: str, engine: int) -> bool:
        """Whether one more new trajectory fits on this engine."""
        alive = self._alive_of_new(domain, context_tokens)
        members = self._groups.get(group, {}).get(engine) or _nobody(context_tokens, len(alive))
        return bool(self._share_with(engine, members, alive, context_tokens) <= 1.0)

    def _shares_with(self, domain: str, context_tokens: float, group: str) -> Floats:
        """The largest share of each engine if one more new trajectory starts there."""
        alive = self._alive_of_new(domain, context_tokens)
        mean, variance, _ = _with_one(_nobody(context_tokens, len(alive)), alive, context_tokens)
        shares = self._shares(self._mean + mean, self._variance + variance)
        for engine, members in self._groups.get(group, {}).items():
            shares[engine] = self._share_with(engine, members, alive, context_tokens)
        return shares

    def _share_with(self, engine: int, members: _Group, alive: Floats, context_tokens: float) -> float:
        """The largest share of one engine if one more trajectory starts there, beside the members of its group."""
        mean, variance, _ = _with_one(members, alive, context_tokens)
        most = self._most(self._mean[engine] + mean, self._variance[engine] + variance)
        return float(most / self._capacity[engine])

    def holds(self, engine: int, group: str) -> bool | None:
        """Whether the engine holds the prompt of a group; None if no engine does."""
        there = self._groups.get(group)
        return engine in there if there else None

    def mean_growth(self, domain: str) -> float:
        within = self._horizons[self._most_tokens >= self._horizons]
        alive = self._laws.of(domain).survival[0, : len(within)]
        return float(np.dot(np.diff(within), (alive[1:] + alive[:-1]) / 2))

    def add(self, domain: str, context_tokens: float, group: str, engine: int) -> None:
        there = self._groups.setdefault(group, {})
        alive = self._alive_of_new(domain, context_tokens)
        members = there.get(engine) or _nobody(context_tokens, len(alive))
        mean, variance, there[engine] = _with_one(members, alive, context_tokens)
        self._mean[engine] += mean
        self._variance[engine] += variance

    def _shares(self, mean: Floats, variance: Floats) -> Floats:
        shares: Floats = self._most(mean, variance) / self._capacity
        return shares

    def _most(self, mean: Floats, variance: Floats) -> Floats:
        # Differences of sums may be a little below 0.
        most: Floats = (mean + self._spread * np.sqrt(np.maximum(0.0, variance))).max(axis=-1)
        return most

    def _alive_of_new(self, domain: str, context_tokens: float) -> Floats:
        """Probability by horizon that a new trajectory still runs."""
        within = context_tokens + self._horizons <= self._most_tokens
        alive: Floats = np.where(within, self._laws.of(domain).survival[0, : len(within)], 0.0)
        alive[0] = 1.0
        return alive

    def _add_all(self, law: GrowthLaw, live: Sequence[GrowingContext]) -> None:
        growths, contexts, of_engine, of_group = zip(*live, strict=True)
        members = list(zip(of_engine, of_group, strict=True))
        place = {each: row for row, each in enumerate(dict.fromkeys(members))}
        which = np.fromiter(map(place.__getitem__, members), dtype=np.intp, count=len(members))
        order = np.argsort(which, kind="stable")
        starts = np.searchsorted(which[order], np.arange(len(place)))
        grown, context = np.array(growths)[order], np.array(contexts)[order]
        alive = law.survival[bin_of(grown), : len(self._horizons)]
        alive[context[:, None] + self._horizons > self._most_tokens] = 0.0
        alive[:, 0] = 1.0
        prompt = np.minimum.reduceat(context - grown, starts)
        own = (context - prompt[which[order]])[:, None] + self._horizons
        own_mean = alive * own
        own_variance = np.add.reduceat(own_mean * (own - own_mean), starts)
        own_mean = np.add.reduceat(own_mean, starts)
        gone = np.multiply.reduceat(1.0 - alive, starts)
        shared_mean, shared_variance = _of_prompt(prompt[:, None], gone, own_mean)
        engines, prompts = [engine for engine, _ in place], prompt.tolist()
        np.add.at(self._mean, engines, own_mean + shared_mean)
        np.add.at(self._variance, engines, own_variance + shared_variance)
        for (engine, group), row in place.items():
            self._groups.setdefault(group, {})[engine] = _Group(prompts[row], gone[row], own_mean[row])


def _nobody(prompt_tokens: float, horizons: int) -> _Group:
    return _Group(prompt_tokens, np.ones(horizons), np.zeros(horizons))


def _of_prompt(prompt_tokens: Floats | float, gone: Floats, own_tokens: Floats) -> tuple[Floats, Floats]:
    """Mean of the prompt's use, and what it adds to the variance: its own, and twice the covariance with `own_tokens`.

    The prompt is held while any member runs. So the covariance with the tokens x of a member that runs with probability
    s is ``prompt * x * s * gone``.
    """
    held = 1.0 - gone
    return prompt_tokens * held, gone * prompt_tokens * (prompt_tokens * held + 2.0 * own_tokens)


def _with_one(members: _Group, alive: Floats, context_tokens: float) -> tuple[Floats, Floats, _Group]:
    """What one more member adds to the mean and the variance of the use, and the members with it."""
    prompt_tokens = members.prompt_tokens
    own = max(0.0, context_tokens - prompt_tokens) + GROWTH_TOKENS[: len(alive)]
    after = _Group(prompt_tokens, members.gone * (1.0 - alive), members.own_tokens + alive * own)
    mean_before, variance_before = _of_prompt(*members)
    mean, variance = _of_prompt(*after)
    own_variance = alive * (1.0 - alive) * own**2
    return mean - mean_before + alive * own, variance - variance_before + own_variance, after
