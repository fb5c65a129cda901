"""The history of a prompt: earlier attempts at it, over epochs, runs and weight versions, and what they still tell.

An attempt by older weights tells less: the policy has moved on since. How much less is measured (`variances`): the
squared difference between two attempts at one prompt grows with the number of versions between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from heddle_dask.predictors.features import NAN, NO_SIBLINGS, Finished, GroupFacts, Progress

ATTEMPTS_KEPT = 16
PROMPTS_KEPT = 16_384
# A run apart counts like this many versions: what ran in between is not known.
RUN_VERSIONS = 4

Attempt = TypeVar("Attempt", "Finished", "PastAttempt | Finished")
Locate = Callable[["Progress | Finished | PastAttempt"], float]


class PastAttempt(NamedTuple):
    """What the history keeps of a trajectory that has ended; the fields are those of `Finished`."""

    trajectory_id: str
    domain: str
    policy_version: int
    prompt_tokens: int
    message_tokens: int
    max_steps: int
    generated_tokens: int
    observed_tokens: int
    steps_finished: int
    tools_s: float
    duration_s: float
    censored: bool
    lineage: str
    run: int

    @classmethod
    def of(cls, one: Finished) -> PastAttempt:
        return cls(*[getattr(one, name) for name in cls._fields])


def prompt_of(one: Progress | Finished) -> str:
    """The key under which attempts at its prompt are found."""
    return one.prompt_key or one.group_id


class Moment(NamedTuple):
    """The policy that is asked about: its version, and the run of the predictor."""

    policy_version: int
    lineage: str = ""
    run: int = 0


def versions_apart(one: Moment | PastAttempt | Finished, other: Moment | PastAttempt | Finished) -> int:
    """Number of versions between two policies.

    Versions are comparable within one line of training, or one run. Else only the order of the runs is known.
    """
    known = one.lineage and other.lineage
    if one.lineage == other.lineage if known else one.run == other.run:
        return abs(one.policy_version - other.policy_version)
    return RUN_VERSIONS * max(1, abs(one.run - other.run))


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a model expects without a history, and how a history fades.

    Attributes
    ----------
    tokens, seconds
        Expected log of total tokens and of total seconds, from the prompt.
    drift
        Variance that a version adds between attempts at a prompt, as a share of that within a version.
    """

    tokens: Locate
    seconds: Locate
    drift: float = 0.0


def ended_facts(attempts: Iterable[PastAttempt | Finished], now: Moment, expected: Expectation) -> GroupFacts:
    pairs = [(each, math.log1p(each.generated_tokens) - expected.tokens(each)) for each in attempts]
    whole, count, excess = faded_mean(pairs, now, expected.drift)
    if not whole:
        return NO_SIBLINGS
    same = [value for each, value in whole if versions_apart(now, each) == 0]
    seconds = [
        math.log1p(each.duration_s) - expected.seconds(each) for each, _ in whole if not math.isnan(each.duration_s)
    ]
    return GroupFacts(
        finished=count,
        mean_excess=excess,
        same_excess=sum(same) / len(same) if same else NAN,
        largest=math.log1p(max(each.generated_tokens for each, _ in whole)),
        latest_excess=whole[-1][1],
        excess_s=sum(seconds) / len(seconds) if seconds else NAN,
        past_tokens=float(sum(each.generated_tokens for each, _ in whole)),
        past_tools_s=float(sum(each.tools_s for each, _ in whole)),
        past_observed_tokens=float(sum(each.observed_tokens for each, _ in whole)),
    )


def faded_mean(
    pairs: Iterable[tuple[Attempt, float]], now: Moment, drift: float
) -> tuple[list[tuple[Attempt, float]], float, float]:
    """The attempts that count, attempts by the present policy that would tell as much, and the weighted mean.

    An attempt that was cut off counts only if it was longer than the others already: it says that the prompt can be
    long, and nothing else.

    Parameters
    ----------
    pairs
        Attempts and their excess over the expectation, oldest first.

    Notes
    -----
    The mean of n attempts d versions ago has the variance (1 / n + drift d) times that within a version. Means of
    different versions are weighted by the inverse.
    """
    whole, cut = list[tuple[Attempt, float]](), list[tuple[Attempt, float]]()
    for pair in pairs:
        (cut if pair[0].censored else whole).append(pair)
    count, mean = _mean_over_versions(whole, now, drift)
    longer = [pair for pair in cut if pair[1] > mean]
    if longer:
        whole += longer
        count, mean = _mean_over_versions(whole, now, drift)
    return whole, count, mean


def _mean_over_versions(pairs: Sequence[tuple[Attempt, float]], now: Moment, drift: float) -> tuple[float, float]:
    """Effective number and weighted mean; 0 and 0 without attempts."""
    by_distance: dict[int, list[float]] = {}
    for each, value in pairs:
        by_distance.setdefault(versions_apart(now, each), []).append(value)
    total = weighted = 0.0
    for distance, values in by_distance.items():
        worth = 1.0 / (1.0 / len(values) + drift * distance)
        total += worth
        weighted += worth * sum(values) / len(values)
    return total, weighted / total if total else 0.0


class PromptHistory:
    """The latest attempts at each prompt: `ATTEMPTS_KEPT` at most, of the `PROMPTS_KEPT` prompts tried last."""

    def __init__(self) -> None:
        self._attempts: dict[str, list[PastAttempt]] = {}
        self._facts: dict[str, dict[Moment, GroupFacts]] = {}
        self._expected: Expectation | None = None

    def add(self, key: str, attempt: PastAttempt) -> None:
        """Record the end of an attempt, once."""
        known = self._attempts.pop(key, [])
        name = (attempt.trajectory_id, attempt.run)
        earlier = [each for each in known if (each.trajectory_id, each.run) != name]
        # The dictionary is in order of last use: re-insert the prompt at the end; eviction takes the head.
        self._attempts[key] = [*earlier, attempt][-ATTEMPTS_KEPT:]
        self._facts.pop(key, None)
        if len(self._attempts) > PROMPTS_KEPT:
            oldest = next(iter(self._attempts))
            del self._attempts[oldest]
            self._facts.pop(oldest, None)

    def facts(self, key: str, now: Moment, expected: Expectation) -> GroupFacts:
        """Facts as known now; kept until one more attempt at the prompt ends."""
        attempts = self._attempts.get(key)
        if attempts is None:
            return NO_SIBLINGS
        if expected is not self._expected:
            self._facts.clear()
            self._expected = expected
        known = self._facts.setdefault(key, {})
        facts = known.get(now)
        if facts is None:
            facts = known[now] = ended_facts(attempts, now, expected)
        return facts

    def attempts(self) -> Mapping[str, Sequence[PastAttempt]]:
        """All attempts by prompt, in order of last use."""
        return self._attempts


# A prompt's attempts resemble each other more or less from task to task: these hold until enough prompts tell.
DEFAULT_TRUST = 2.0
DEFAULT_DRIFT = 0.05
_LEAST_PROMPTS = 5
# The measured drift has this weight against the default one: squared differences scatter widely.
_DRIFT_PAIRS = 50.0


class Variances(NamedTuple):
    """How attempts at one prompt differ.

    Attributes
    ----------
    trust
        Attempts at which a prompt's mean gets weight one half: variance within over variance between prompts.
    drift
        As in `Expectation`.
    """

    trust: float = DEFAULT_TRUST
    drift: float = DEFAULT_DRIFT


def variances(excess: Iterable[tuple[Finished, float]]) -> Variances:
    """Measure them on complete attempts and their excess over the expectation."""
    prompts: dict[str, list[tuple[Finished, float]]] = {}
    for one, value in excess:
        prompts.setdefault(prompt_of(one), []).append((one, value))
    several = [members[-ATTEMPTS_KEPT:] for members in prompts.values() if len(members) > 1]
    if len(several) < _LEAST_PROMPTS:
        return Variances()
    within, drift = _within(several)
    means = [sum(value for _, value in members) / len(members) for members in several]
    centre = sum(means) / len(means)
    spread = sum((mean - centre) ** 2 for mean in means) / len(means)
    noise = sum(within / len(members) for members in several) / len(several)
    between = max(spread - noise, 1e-3)
    return Variances(min(max(within / between, 0.02), 50.0), drift)


def _within(prompts: Sequence[Sequence[tuple[Finished, float]]]) -> tuple[float, float]:
    """Variance within a version, and the share of it that a version adds, by a line through half squared differences.

    Each prompt has the weight of its degrees of freedom.
    """
    weight = distances = halves = squares = products = 0.0
    for members in prompts:
        share = 2.0 / len(members)
        for index, (one, value) in enumerate(members):
            for other, other_value in members[:index]:
                distance, half = versions_apart(one, other), (value - other_value) ** 2 / 2.0
                weight += share
                distances += share * distance
                halves += share * half
                squares += share * distance * distance
                products += share * distance * half
    mean, usual = distances / weight, halves / weight
    spread, common = squares - weight * mean * mean, products - weight * mean * usual
    # A line through the mean with slope s has the intercept usual - s mean; the default is a slope of
    # DEFAULT_DRIFT times the intercept.
    default = DEFAULT_DRIFT * usual / (1.0 + DEFAULT_DRIFT * mean)
    slope = max(0.0, (common + _DRIFT_PAIRS * default) / (spread + _DRIFT_PAIRS))
    within = max(usual - slope * mean, usual / 10.0, 1e-6)
    return within, slope / within


# Candidates of `ratio_trust`; infinite: attempts at one prompt do not resemble each other.
_RATIO_TRUSTS = (math.inf, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25)


def ratio_trust(finished: Iterable[Finished]) -> float:
    """Attempts at which a prompt's ratio of observation tokens gets weight one half, beside that of all trajectories.

    The candidate with the least mean error of the log of the final context, each complete attempt left out in turn.
    """
    prompts: dict[str, list[Finished]] = {}
    for one in finished:
        if not one.censored and one.generated_tokens > 0:
            prompts.setdefault(prompt_of(one), []).append(one)
    several = [members[-ATTEMPTS_KEPT:] for members in prompts.values() if len(members) > 1]
    if len(several) < _LEAST_PROMPTS:
        return math.inf
    kept = [one for members in several for one in members]
    sizes = np.array([len(members) for members in several])
    begin, at = np.cumsum(sizes) - sizes, np.repeat(np.arange(len(several)), sizes)
    generated = np.array([one.generated_tokens for one in kept], dtype=np.float64)
    observed = np.array([one.observed_tokens for one in kept], dtype=np.float64)
    prompt = np.array([one.prompt_tokens for one in kept], dtype=np.float64)
    others = (np.add.reduceat(observed, begin)[at] - observed) / (np.add.reduceat(generated, begin)[at] - generated)
    of_all, count = observed.sum() / generated.sum(), sizes[at] - 1
    errors = []
    for trust in _RATIO_TRUSTS:
        ratio = of_all + (others - of_all) * count / (count + trust)
        predicted = prompt + generated * (1.0 + ratio)
        errors.append(float(np.abs(np.log(predicted / (prompt + generated + observed))).mean()))
    return _RATIO_TRUSTS[int(np.argmin(errors))]
