"""How long each kind of action runs: declared, or the mean of what has ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from heddle_dask.core.nouns import ActionRequest, DurationProfile
from heddle_dask.core.resources import IDLE_NICE
from heddle_dask.core.view import EndedAction

FORGETTING = 0.995
"""What an observation counts for after the next one: about the latest 200 matter."""
OUTLIER = 4.0
"""Seconds that differ from the mean by more than this factor count as differing by this factor."""
TRUSTED = 5
"""Observations after which an outlier is recognised as one."""
UNKNOWN_S = 1.0
MAX_KINDS = 4096


FIRST_NICE = 7
FIRST_NICE_S = 8.0
UNKNOWN_NICE = 19


def nice_of(profile: DurationProfile | None) -> int:
    """The nice value with which an action uses lent CPUs: the shorter it declares to be, the more of them it gets.

    A level for each factor of 1.25, and so weights in inverse proportion to the seconds: the shortest go first, the
    longest still advance. Above the constants: searched on seeds 10 to 12 of `python -m benchmarks actions --experiment
    cpu-hosts`, among first levels of 5 to 9 for 4 to 12 s. Who declares nothing comes with the longest.
    """
    if profile is None:
        return UNKNOWN_NICE
    levels = math.log(max(1.0, profile.one_unit_s / FIRST_NICE_S), 1.25)
    return min(IDLE_NICE, FIRST_NICE + round(levels))


@dataclass(slots=True)
class KindDuration:
    """What is known of one kind of action. Constant size.

    Attributes
    ----------
    observed
        Number of durations.
    failed, refused
        Actions that failed, and those that an API refused for their rate: data, but no durations.
    mean_s
        Mean seconds of the latest.
    """

    observed: int = 0
    failed: int = 0
    refused: int = 0
    mean_s: float = 0.0

    def observe(self, seconds: float) -> None:
        if self.observed >= TRUSTED and self.mean_s > 0:
            seconds = min(max(seconds, self.mean_s / OUTLIER), self.mean_s * OUTLIER)
        self.observed += 1
        self.mean_s += max(1.0 - FORGETTING, 1.0 / self.observed) * (seconds - self.mean_s)


@dataclass(slots=True)
class Durations:
    """The durations of all kinds of one session."""

    kinds: dict[str, KindDuration] = field(default_factory=dict)
    _all: KindDuration = field(default_factory=KindDuration)

    def observe(self, ended: EndedAction) -> None:
        kind = self.kinds.pop(ended.request.label, None) or KindDuration()
        self.kinds[ended.request.label] = kind  # the latest at the end
        if len(self.kinds) > MAX_KINDS:
            del self.kinds[next(iter(self.kinds))]
        if ended.cause == "rate-limited":
            kind.refused += 1
        elif not ended.ok:
            kind.failed += 1
        else:
            kind.observe(ended.run_s)
            self._all.observe(ended.run_s)

    def seconds(self, request: ActionRequest, units: int) -> float:
        """Expected duration of an action; by its units where that is declared."""
        if request.profile is not None:
            return request.profile.seconds(units)
        known = self.kinds.get(request.label)
        if known is None or not known.observed:
            known = self._all
        return known.mean_s if known.observed else UNKNOWN_S

    @staticmethod
    def profile(request: ActionRequest) -> DurationProfile | None:
        """The declared speed-up of an action; None where there is none."""
        profile = request.profile
        return profile if profile is not None and profile.serial_share < 1 else None
