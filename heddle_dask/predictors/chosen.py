"""Builds the predictor that a preset names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.core.view import PredictorChoice
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.known import KnownWork, NoisyOracle, Oracle


def build_predictor(
    choice: PredictorChoice,
    known: KnownWork,
    warm: Callable[[str, Mapping[str, Any]], Predictor] | None = None,
    *,
    observation_per_token: float | None = None,
) -> Predictor:
    """The predictor of that name.

    Parameters
    ----------
    known
        True totals that oracles read. The caller adds trajectories as they are submitted.
    warm
        Makes a predictor from the file that the options name, and the options; None: saved predictors only.
    observation_per_token
        Observation tokens per generated token that oracles report (`core.nouns.Prediction`); a learned predictor
        measures it instead.
    """
    # XGBoost takes a second to import; sessions without a learned predictor skip it.
    from heddle_dask.predictors.learned import LearnedPredictor
    from heddle_dask.predictors.stored import load_predictor

    options = choice.options
    match choice.name:
        case "xgboost" if options["warm"]:
            return load_predictor(options["warm"]) if warm is None else warm(options["warm"], options)
        case "xgboost":
            return LearnedPredictor()
        case "oracle" if options["error_factor"] == 1:
            return Oracle(known, observation_per_token=observation_per_token)
        case "oracle":
            return NoisyOracle(
                known,
                observation_per_token=observation_per_token,
                error=options["error_factor"],
                seed=options["seed"],
            )
        case _:
            raise BadInput(f"unknown predictor '{choice.name}': use xgboost or oracle")
