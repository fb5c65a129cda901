"""Resets of environments in virtual time: heavy tails, failures, and new attempts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResetTimes:
    """Seconds until an environment is ready, drawn from the seed and the trajectory's name.

    Attributes
    ----------
    mean_s, log_sd
        Log-normal; a mean of 0: ready at once.
    tail_share, tail_s, tail_exponent
        Share of the resets that hang behind image pulls or disks (RollArt, section 2.3: hundreds of seconds), and the
        Pareto distribution of their seconds, at least `tail_s`.
    failure_share, failure_s
        Share of the attempts that fail, and seconds until that is known; another attempt follows.
    limit_s
        An attempt that takes longer is given up and repeated in a fresh environment; infinity: never.
    seed
        Seed of all draws.
    """

    mean_s: float = 0.0
    log_sd: float = 0.5
    tail_share: float = 0.0
    tail_s: float = 100.0
    tail_exponent: float = 2.0
    failure_share: float = 0.0
    failure_s: float = 60.0
    limit_s: float = math.inf
    seed: int = 0

    def seconds(self, trajectory_id: str) -> float:
        """From the first attempt until the environment is ready."""
        if self.mean_s <= 0:
            return 0.0
        # A seed of type str is hashed by SHA-512, not by `hash`: the same in every process.
        rng = random.Random(f"reset {self.seed} {trajectory_id}")
        passed_s = 0.0
        for _ in range(100):
            if rng.random() < self.failure_share:
                passed_s += min(self.failure_s, self.limit_s)
                continue
            attempt_s = self.mean_s * math.exp(self.log_sd * rng.gauss(0.0, 1.0) - self.log_sd**2 / 2)
            if rng.random() < self.tail_share:
                attempt_s += self.tail_s * rng.paretovariate(self.tail_exponent)
            if attempt_s <= self.limit_s:
                return passed_s + attempt_s
            passed_s += self.limit_s
        return passed_s
