"""The result of a training from its logs: the same after one run as after several resumed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle_dask.training.intervals import MeanInterval, bootstrap_mean, paired_difference
from heddle_dask.training.step_row import StepSeconds

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EvaluatedWeights:
    """The newest evaluation of one version of the weights.

    Attributes
    ----------
    rewards
        Mean reward by task; tasks whose reward is unknown are missing.
    """

    number: int
    rewards: Mapping[str, float]

    @classmethod
    def of(cls, row: Row) -> EvaluatedWeights:
        return cls(int(row["number"]), dict(row["rewards"]))

    def interval(self) -> MeanInterval | None:
        """Mean reward over tasks; None when no reward is known."""
        return bootstrap_mean([self.rewards[task] for task in sorted(self.rewards)]) if self.rewards else None


def evaluated(rows: Sequence[Row]) -> dict[int, EvaluatedWeights]:
    return {each.number: each for each in map(EvaluatedWeights.of, rows)}


def training_result(
    metrics: Sequence[Row], evaluations: Sequence[Row], out: str, unlogged: StepSeconds | None = None
) -> dict[str, Any]:
    """The JSON object of ``heddle train``.

    Parameters
    ----------
    metrics, evaluations
        Rows of ``metrics.jsonl`` and ``evaluations.jsonl``.
    unlogged
        Seconds of this process after the last row.
    """
    by_number = evaluated(evaluations)
    first = by_number[min(by_number)] if by_number else None
    last = by_number[max(by_number)] if len(by_number) > 1 else None
    before, after = (each and each.interval() for each in (first, last))
    seconds = unlogged or StepSeconds()
    for row in metrics:
        seconds = seconds.plus(StepSeconds(**row["seconds"]))
    return {
        "steps": max((int(row["step"]) for row in metrics), default=0),
        "samples": sum(int(row["samples"]) for row in metrics),
        "reward_before": before and before.mean,
        "reward_after": after and after.mean,
        "reward_before_ci": before and list(before.bounds),
        "reward_after_ci": after and list(after.bounds),
        "staleness": dict(sorted(_summed(metrics, "staleness").items(), key=lambda item: int(item[0]))),
        "wasted_tokens": dict(sorted(_summed(metrics, "wasted_tokens").items())),
        "seconds": seconds.rounded(),
        "logprob_difference_mean": _mean_over_tokens(metrics, "logprob_difference_mean"),
        "out": out,
    }


def reward_change(evaluations: Sequence[Row]) -> MeanInterval | None:
    """Last minus first evaluation, paired by task; None with fewer than two, or no common task."""
    by_number = evaluated(evaluations)
    if len(by_number) < 2:
        return None
    before, after = (by_number[pick(by_number)].rewards for pick in (min, max))
    return paired_difference(before, after) if before.keys() & after.keys() else None


def _summed(rows: Sequence[Row], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row[name])
    return total


def _mean_over_tokens(rows: Sequence[Row], name: str) -> float | None:
    """A mean of means, by the tokens that each is over."""
    known = [(row["trainer"], row["trainer"].get(name)) for row in rows]
    pairs = [(trainer.get("tokens") or 0, value) for trainer, value in known if value is not None]
    tokens = sum(count for count, _ in pairs)
    return sum(count * value for count, value in pairs) / tokens if tokens else None
