"""Predictions of trajectories before their first step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.features import Progress
from heddle_dask.strategies.tp_degrees.forecast import Quantiles

# Other sources are constants, or oracles that do not know this batch yet.
_LEARNT = ("xgboost", "group history", "prompt only")


async def forecast(
    predictor: Predictor | None, specs: Sequence[TrajectorySpec], policy_version: int = 0
) -> list[Quantiles]:
    """Median and 0.9 quantile of the tokens of each trajectory; empty without a predictor that has learnt.

    Parameters
    ----------
    policy_version
        The newest that an engine has reported.
    """
    if predictor is None or not specs:
        return []
    rows = [
        Progress(
            spec.trajectory_id,
            spec.group_id,
            domain=spec.domain,
            policy_version=policy_version,
            prompt_tokens=spec.prompt_tokens,
            message_tokens=spec.message_tokens,
            context_tokens=spec.prompt_tokens,
            max_steps=spec.max_steps,
        )
        for spec in specs
    ]
    answers = await asyncio.to_thread(predictor.predict, rows)
    if any(answer.source not in _LEARNT for answer in answers):
        return []
    return [Quantiles(answer.tokens, answer.tokens_q90) for answer in answers]
