"""Did trainings learn? Paired differences of held-out reward, with an interval over seeds and tasks.

``python scripts/learning.py RUN_DIR…`` reads directories of ``heddle train`` that differ in their seed only, and prints
one JSON object. docs/training.md has the commands that make them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from heddle_dask.training.intervals import MeanInterval, difference_over_runs, paired_difference
from heddle_dask.training.json_lines import read_lines
from heddle_dask.training.run_directory import TrainingDirectory
from heddle_dask.training.training_result import evaluated


def rewards_of(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Rewards by task of the first and the last evaluation."""
    by_number = evaluated(read_lines(TrainingDirectory(path).evaluations))
    if len(by_number) < 2:
        raise SystemExit(f"{path} has {len(by_number)} evaluations: train it to its end with --eval-tasks")
    return dict(by_number[min(by_number)].rewards), dict(by_number[max(by_number)].rewards)


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
