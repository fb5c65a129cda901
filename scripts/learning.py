"""Did trainings learn? Paired differences of held-out reward, with an interval over seeds and tasks.

``python scripts/learning.py RUN_DIR…`` reads directories of ``heddle train`` that differ in their seed only, and prints
one JSON object. docs/training.md has the commands that make them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heddle_dask.training.intervals import (
    DRAWS,
    LEVEL,
    MeanInterval,
    interval_of,
    paired_difference,
    resampled_means,
    task_differences,
)
from heddle_dask.training.json_lines import read_lines
from heddle_dask.training.run_directory import TrainingDirectory
from heddle_dask.training.training_result import evaluated


def rewards_of(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Rewards by task of the first and the last evaluation."""
    by_number = evaluated(read_lines(TrainingDirectory(path).evaluations))
    if len(by_number) < 2:
        raise SystemExit(f"{path} has {len(by_number)} evaluations: train it to its end with --eval-tasks")
    return dict(by_number[min(by_number)].rewards), dict(by_number[max(by_number)].rewards)


def difference_over_runs(
    runs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
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


def as_json(found: MeanInterval) -> dict[str, Any]:
    """Mean and interval, rounded."""
    return {"mean": round(found.mean, 4), "interval": [round(bound, 4) for bound in found.bounds]}


def main(paths: list[Path]) -> None:
    """Print the object."""
    runs = [rewards_of(path) for path in paths]
    each = {str(path): as_json(paired_difference(*run)) for path, run in zip(paths, runs, strict=True)}
    print(json.dumps({"runs": each, "tasks": len(runs[0][0]), "over_runs": as_json(difference_over_runs(runs))}))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("give one directory of `heddle train` for each seed")
    main([Path(text) for text in sys.argv[1:]])
