"""Distributions of the total length: a location per trajectory, and one distribution of the residuals.

They are the fallbacks (constant, prompt only, group history), they are blended with the trees, and censored training
rows draw their future from them. Logarithms of ``1 + total`` throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from heddle_dask.predictors.features import Finished, Floats, Progress
from heddle_dask.predictors.prompt_history import PastAttempt

# The effect of a cell with n trajectories is multiplied by n / (n + CELL_TRUST).
CELL_TRUST = 8.0
TAIL_SHARE = 0.05
MEMO_KEPT = 65_536


@dataclass(frozen=True)
class ResidualDistribution:
    """Kaplan-Meier survival of the residuals; beyond its last 5 % an exponential tail (a Pareto tail of the length).

    Attributes
    ----------
    at, survival
        Ascending residuals, and the survival function: the share above each.
    tail_at, tail_scale
        Residual at which the tail begins, and the mean excess beyond it.
    """

    at: Floats
    survival: Floats
    tail_at: float
    tail_scale: float

    @classmethod
    def fit(cls, residuals: Floats, censored: np.ndarray) -> ResidualDistribution:
        """Fit on at least one residual; censored ones are lower bounds."""
        order = np.lexsort((censored, residuals))
        at, ends = residuals[order], ~censored[order]
        at_risk = np.arange(len(at), 0, -1)
        survival = np.cumprod(1.0 - ends / at_risk)
        inside = np.searchsorted(-survival, -TAIL_SHARE, side="left")
        tail_at = float(at[min(inside, len(at) - 1)])
        beyond = np.maximum(at - tail_at, 0.0)
        exits = max(int(ends[at > tail_at].sum()), 1)
        return cls(at, survival, tail_at, min(max(float(beyond.sum()) / exits, 0.1), 1.5))

    def above(self, residual: Floats) -> Floats:
        """Survival function at each residual, never 0."""
        index = np.searchsorted(self.at, residual, side="right")
        inside = np.concatenate([[1.0], self.survival])[index]
        tail = TAIL_SHARE * np.exp(-np.maximum(residual - self.tail_at, 0.0) / self.tail_scale)
        return np.asarray(np.where(residual >= self.tail_at, tail, np.maximum(inside, TAIL_SHARE)))

    def quantile(self, above: Floats) -> Floats:
        """Inverse of `above`: the residual with this share of the distribution above it."""
        index = np.searchsorted(-self.survival, -above, side="left")
        inside = self.at[np.minimum(index, len(self.at) - 1)]
        tail = self.tail_at + self.tail_scale * np.log(TAIL_SHARE / np.minimum(above, TAIL_SHARE))
        return np.asarray(np.where(above < TAIL_SHARE, tail, np.minimum(inside, self.tail_at)))

    def log_remaining(self, location: Floats, done: Floats, share: Floats | float) -> Floats:
        """Log(1 + tokens left) at the quantile `share`, given that the total exceeds `done`.

        The arguments broadcast against each other.
        """
        begun = self.above(np.log1p(done) - location)
        # Before the first token there is no condition on the total.
        begun = np.where(done > 0, begun, 1.0)
        total = np.expm1(np.minimum(location + self.quantile(begun * (1.0 - share)), 30.0))
        return np.asarray(np.log1p(np.maximum(total - done, 1.0)))


@dataclass(frozen=True)
class Location:
    """Expected log total from facts known before the first step: domain, step limit, policy, prompt length.

    `cells` holds the effect of each cell on the residuals of the level before it, shrunk by its count.
    """

    overall: float
    cells: Mapping[str, float] = field(default_factory=dict)
    _known: dict[tuple[str, int, int, int, int], float] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def fit(cls, finished: Sequence[Finished], logs: Floats) -> Location:
        """Fit level by level on the residuals of the level before."""
        overall = float(np.mean(logs)) if len(logs) else 0.0
        left, cells = logs - overall, dict[str, float]()
        keys = [_cells(each) for each in finished]
        for level in range(len(keys[0]) if keys else 0):
            names = [key[level] for key in keys]
            sums: dict[str, float] = {}
            counts: dict[str, int] = {}
            for name, value in zip(names, left.tolist(), strict=True):
                sums[name] = sums.get(name, 0.0) + value
                counts[name] = counts.get(name, 0) + 1
            cells.update({name: sums[name] / (counts[name] + CELL_TRUST) for name in sums})
            left = left - np.array([cells[name] for name in names])
        return cls(overall, cells)

    def of(self, one: Progress | Finished | PastAttempt) -> float:
        """Expected log total; an unknown cell adds nothing."""
        key = (one.domain, one.policy_version, one.max_steps, one.prompt_tokens, one.message_tokens)
        value = self._known.get(key)
        if value is None:
            if len(self._known) >= MEMO_KEPT:
                self._known.clear()
            value = self.overall + sum([self.cells.get(name, 0.0) for name in _cells(one)])
            self._known[key] = value
        return value


def _cells(one: Progress | Finished | PastAttempt) -> tuple[str, ...]:
    domain = one.domain
    size, message = round(2.0 * math.log2(1 + one.prompt_tokens)), round(math.log2(1 + one.message_tokens))
    return (
        domain,
        f"{domain}|limit {one.max_steps}",
        f"{domain}|policy {one.policy_version}",
        f"{domain}|policy {one.policy_version}|limit {one.max_steps}",
        f"{domain}|prompt {size}",
        f"{domain}|message {message}",
    )


def label_effects(rows: Sequence[Progress], logs: Floats, trust: float = 20.0) -> dict[str, float]:
    """Per label of the last tool: shrunk mean of the log of the tokens left, less the mean at its step."""
    by_step: dict[int, list[float]] = {}
    for row, value in zip(rows, logs.tolist(), strict=True):
        by_step.setdefault(min(row.steps_finished, 20), []).append(value)
    means = {step: sum(values) / len(values) for step, values in by_step.items()}
    sums: dict[str, list[float]] = {}
    for row, value in zip(rows, logs.tolist(), strict=True):
        if row.tool_labels:
            sums.setdefault(row.tool_labels[-1], []).append(value - means[min(row.steps_finished, 20)])
    return {label: sum(values) / (len(values) + trust) for label, values in sums.items()}
