"""How long each kind of action runs with how many units: declared, or learned while actions run.

The law is Amdahl's, T(m) = a + b / m, fitted per kind by recursive least squares on (1, 1/m). Seconds of one kind vary
by factors rather than by sums, so each observation counts with its relative error. A kind is measured once it has run
with different amounts of units; `trial_units` sees to that while units are idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from heddle_dask.core.nouns import ActionRequest, DurationProfile
from heddle_dask.core.view import EndedAction

FORGETTING = 0.995
"""What an observation counts for after the next one: about the latest 200 matter."""
LEAST_SPREAD = 0.02
FIRST_SPREAD = 0.5
OUTLIER = 4.0
"""Seconds that differ from the expected ones by more than this factor count as differing by this factor."""
TRUSTED = 5
"""Observations after which an outlier is recognised as one."""
RETRY_AFTER = 100
"""Observations after which a kind without a speed-up gets one more trial: its programs may have changed."""
EARLY_TRIALS = 4
UNKNOWN_S = 1.0
USUAL_SHARE, SHARE_SPREAD = 0.15, 0.3
"""Serial share of an unknown kind, mean and standard deviation: a guess that a few observations outweigh."""
MAX_KINDS = 4096


@dataclass(slots=True)
class KindDuration:
    """What is known of one kind of action. Constant size.

    Attributes
    ----------
    observed
        Number of durations.
    least_units, most_units
        Fewest and most units of them.
    trials
        Trials with more than the least units that were started.
    failed, refused
        Actions that failed, and those that an API refused for their rate: data, but no durations.
    spread
        Relative standard deviation of the durations.
    """

    observed: int = 0
    least_units: int = 0
    most_units: int = 0
    trials: int = 0
    trials_observed: int = 0
    failed: int = 0
    refused: int = 0
    spread: float = FIRST_SPREAD
    # Weighted sums of 1, x, x², y, x y with x = 1/m: the information matrix and its right side.
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def observe(self, units: int, seconds: float) -> None:
        """Count one duration with this many units (at least 1)."""
        expected = self.seconds(units)
        if expected is not None and expected > 0:
            if self.observed >= TRUSTED:
                seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
            error = seconds / expected - 1.0
            rate = max(1.0 - FORGETTING, 1.0 / (self.observed + 2))
            self.spread = math.sqrt((1 - rate) * self.spread**2 + rate * error * error)
        scale = max(1e-6, seconds if expected is None else expected)
        weight, x = 1.0 / (scale * scale), 1.0 / units
        terms = (1.0, x, x * x, seconds, x * seconds)
        self._sums = [FORGETTING * kept + weight * term for kept, term in zip(self._sums, terms, strict=True)]
        self.observed += 1
        self.least_units = min(self.least_units or units, units)
        self.most_units = max(self.most_units, units)

    def seconds(self, units: int) -> float | None:
        """Expected duration with this many units; None before the first observation."""
        if not self.observed:
            return None
        a, b = self._law()
        return a + b / units

    def _law(self) -> tuple[float, float]:
        """The constants a and b, neither below 0."""
        n, x, xx, y, xy = self._sums
        determinant = n * xx - x * x
        if determinant > 1e-9 * n * xx:
            a, b = (xx * y - x * xy) / determinant, (n * xy - x * y) / determinant
            if a >= 0 and b >= 0:
                return a, b
            if a < 0:
                return 0.0, max(0.0, xy / xx)
        return y / n, 0.0

    def serial_share(self) -> float:
        """The share of one unit's seconds that more units do not shorten; half its standard error is added.

        A measured share is weighed with what is expected of any kind, by their variances. One that is known badly
        counts as worse than its mean: units go where a speed-up is certain.
        """
        n, x, xx, _, _ = self._sums
        a, b = self._law()
        one_unit_s = a + b
        determinant = n * xx - x * x
        if one_unit_s <= 0 or determinant <= 1e-9 * n * xx:
            return 1.0
        # Variance of a / (a + b) by its derivatives (b, -a) / (a + b)²; the covariance is the inverse information.
        noise = max(self.spread, LEAST_SPREAD) ** 2 / determinant
        variance = noise * (b * b * xx + 2 * a * b * x + a * a * n) / one_unit_s**4
        believed = variance / (variance + SHARE_SPREAD**2)
        share = believed * USUAL_SHARE + (1.0 - believed) * a / one_unit_s
        return min(1.0, share + 0.5 * math.sqrt(believed) * SHARE_SPREAD)

    def profile(self) -> DurationProfile | None:
        """The law with the uncertain part of the speed-up taken off; None before different amounts were tried."""
        if self.most_units == self.least_units:
            return None
        a, b = self._law()
        return DurationProfile(a + b, self.serial_share())


class Durations:
    """The durations of all kinds of one session.

    Parameters
    ----------
    trials
        Trials of a kind with more than its least units before its speed-up counts as known; 0: none, so that only
        declared speed-ups are used.
    """

    def __init__(self, trials: int) -> None:
        self.trials = trials
        self.kinds: dict[str, KindDuration] = {}
        self._all = KindDuration()

    def observe(self, ended: EndedAction) -> None:
        kind = self._kind(ended.request.label)
        if ended.cause == "rate-limited":
            kind.refused += 1
        elif not ended.ok:
            kind.failed += 1
        else:
            units = max(1, ended.units)
            kind.trials_observed += kind.trials > kind.trials_observed and units > _least(ended.request)
            kind.observe(units, ended.run_s)
            self._all.observe(1, ended.run_s)

    def _kind(self, label: str) -> KindDuration:
        kind = self.kinds.pop(label, None) or KindDuration()
        self.kinds[label] = kind  # the latest at the end
        if len(self.kinds) > MAX_KINDS:
            del self.kinds[next(iter(self.kinds))]
        return kind

    def seconds(self, request: ActionRequest, units: int) -> float:
        """Expected duration of an action with this many units of its elastic resource."""
        if request.profile is not None:
            return request.profile.seconds(units)
        kind = self.kinds.get(request.label)
        known = None if kind is None else kind.seconds(max(1, units))
        if known is None:
            known = self._all.seconds(1)
        return UNKNOWN_S if known is None else known

    def profile(self, request: ActionRequest) -> DurationProfile | None:
        """The speed-up of an action: declared, or measured; None where it is unknown or there is none."""
        if request.profile is not None:
            return request.profile if request.profile.serial_share < 1 else None
        kind = self.kinds.get(request.label)
        if kind is None or kind.trials_observed < min(self.trials, 2) or not self.trials:
            return None
        profile = kind.profile()
        return profile if profile is not None and profile.serial_share < 1 else None

    def trial_units(self, request: ActionRequest, amounts: Iterable[int]) -> int | None:
        """An amount with which an action of unknown speed-up may be tried now; None: with its least.

        Trials take turns with the runs at least units that have ended, but for the first `EARLY_TRIALS`. They double
        the units: 2, 4, 8 … times the least.

        Parameters
        ----------
        amounts
            The possible amounts that idle units allow, ascending, the least first.
        """
        if request.profile is not None or not self.trials:
            return None
        least, *larger = amounts
        if not larger:
            return None
        kind = self._kind(request.label)
        plain = kind.observed - kind.trials_observed
        due = self.trials + kind.observed // RETRY_AFTER
        if kind.trials >= min(due, plain + EARLY_TRIALS):
            return None
        rungs = [amount for amount in larger if amount >= 2 * max(1, least)] or larger[-1:]
        wanted = max(1, least) * 2 ** (1 + kind.trials % 5)
        chosen = [amount for amount in rungs if amount <= wanted]
        kind.trials += 1
        return chosen[-1] if chosen else rungs[0]


def _least(request: ActionRequest) -> int:
    elastic = request.demand.elastic
    return 0 if elastic is None else request.demand[elastic].least
