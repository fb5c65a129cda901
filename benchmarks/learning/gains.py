"""What trainings gained, and what a score cost them, over seeds: pure, from rows of evaluations."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import numpy as np

from benchmarks.row_file import Row
from benchmarks.tables import Column
from heddle_dask.training.intervals import DRAWS, LEVEL, MeanInterval, interval_of, resampled_means, task_differences

BASELINE: Final = "async"
Rewards = Mapping[str, float]
"""By task."""


@dataclass(frozen=True, slots=True)
class ArmGain:
    """One arm on one environment, over its seeds.

    Attributes
    ----------
    before, after
        Mean held-out reward of the first and the last weights.
    gain
        after - before, paired by task.
    over_baseline
        Reward of the last weights minus that of the baseline's, paired by seed and task; None: it is the baseline.
    reached
        Seeds whose held-out reward rose by the asked gain: over the mean of the seed's first evaluations, since all
        arms begin with the same weights.
    tokens, seconds
        Mean cost of the first weights that had, where every seed reached it.
    """

    env: str
    arm: str
    seeds: int
    before: float
    after: float
    gain: MeanInterval
    over_baseline: MeanInterval | None
    reached: int
    tokens: float | None
    seconds: float | None


COLUMNS: Final[Sequence[Column]] = (
    ("environment", lambda row: row.env),
    ("arm", lambda row: row.arm),
    ("seeds", lambda row: str(row.seeds)),
    ("before", lambda row: f"{row.before:.3f}"),
    ("after", lambda row: f"{row.after:.3f}"),
    ("gain, 95 %", lambda row: _interval(row.gain)),
    (f"after, minus {BASELINE}", lambda row: _interval(row.over_baseline)),
    ("seeds that reached the score", lambda row: str(row.reached)),
    ("tokens to it", lambda row: "-" if row.tokens is None else f"{row.tokens:,.0f}"),
    ("seconds to it", lambda row: "-" if row.seconds is None else f"{row.seconds:,.0f}"),
)


def _interval(found: MeanInterval | None) -> str:
    return "-" if found is None else f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def arm_gains(rows: Sequence[Row], gain: float) -> Iterator[ArmGain]:
    """Each arm of each environment, from its evaluations; runs with fewer than two of them do not count."""
    runs: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: int(row["number"])):
        runs.setdefault((row["env"], row["arm"]), {}).setdefault(int(row["seed"]), []).append(row)
    for (env, arm), found in sorted(runs.items()):
        mine = {seed: run for seed, run in sorted(found.items()) if len(run) > 1}
        base = runs.get((env, BASELINE), {}) if arm != BASELINE else {}
        pairs = [
            (base[seed][-1]["rewards"], run[-1]["rewards"]) for seed, run in mine.items() if len(base.get(seed, ())) > 1
        ]
        firsts = {
            seed: [each[seed][0] for (of, _), each in runs.items() if of == env and seed in each] for seed in mine
        }
        scores = {seed: statistics.fmean(row["reward"] for row in rows) + gain for seed, rows in firsts.items()}
        costs = [cost for seed, run in mine.items() if (cost := cost_to_score(run, scores[seed])) is not None]
        is_whole = bool(mine) and len(costs) == len(mine)
        if mine:
            yield ArmGain(
                env,
                arm,
                len(mine),
                statistics.fmean(run[0]["reward"] for run in mine.values()),
                statistics.fmean(run[-1]["reward"] for run in mine.values()),
                difference_over_runs([(run[0]["rewards"], run[-1]["rewards"]) for run in mine.values()]),
                difference_over_runs(pairs) if pairs else None,
                len(costs),
                statistics.fmean(cost["tokens"] for cost in costs) if is_whole else None,
                statistics.fmean(cost["seconds"] for cost in costs) if is_whole else None,
            )


def cost_to_score(run: Sequence[Row], score: float) -> Row | None:
    """The first evaluation of one training, of trained weights, that has reached the score; None: none has."""
    ordered = sorted((row for row in run if row["number"]), key=lambda row: int(row["number"]))
    missed = len(list(takewhile(lambda row: row["reward"] < score, ordered)))
    return ordered[missed] if missed < len(ordered) else None


def difference_over_runs(
    runs: Sequence[tuple[Rewards, Rewards]],
    *,
    seed: int = 0,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> MeanInterval:
    """As `paired_difference`, over several runs: runs are resampled, and the tasks within each drawn run.

    Each run counts the same.

    Parameters
    ----------
    runs
        (before, after) of each.

    Raises
    ------
    ValueError
        There is no run, or one of them has no task with both.
    """
    if not runs:
        raise ValueError("no runs")
    rng = np.random.default_rng(seed)
    of_runs = [task_differences(before, after) for before, after in runs]
    # What one run would show with other tasks; then which runs were drawn.
    within = np.stack([resampled_means(values, rng, draws * len(of_runs)) for values in of_runs])
    chosen = rng.integers(len(of_runs), size=(draws, len(of_runs)))
    columns = np.arange(draws * len(of_runs)).reshape(draws, len(of_runs))
    means = within[chosen, columns].mean(axis=1)
    return interval_of(float(np.mean([values.mean() for values in of_runs])), means, level)
