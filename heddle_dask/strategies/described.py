"""The strategies of a run from what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from heddle_dask.core.run_description import RunDescription
from heddle_dask.core.view import StrategySet
from heddle_dask.strategies.presets import strategies_of_run


def strategies_of_description(run: RunDescription) -> StrategySet:
    """The strategies of a live run that joins or joined a controller.

    Raises
    ------
    BadInput
        As `strategies_of_run`.
    """
    return strategies_of_run(
        {
            "strategy": run.strategy,
            "overrides": run.overrides,
            "seed": run.seed,
            "cost": json.loads(run.cost) if run.cost else None,
        }
    )


def cost_text(cost: Mapping[str, Any] | None) -> str:
    """The cost of a run as its description holds it."""
    return "" if cost is None else json.dumps(cost)
