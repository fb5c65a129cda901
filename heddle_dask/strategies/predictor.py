"""Predictors as options of a preset: their names and defaults. The predictors themselves are in `predictors`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearnedPredictorOptions:
    """XGBoost, fitted online on finished trajectories; until then group history, prompt or a constant.

    Parameters
    ----------
    warm
        Source of a warm start, as a path on the scheduler: a saved predictor, an earlier run, or a trace; empty: none.
    token_scale, tool_scale
        Factors on a trace's token counts and tool seconds, equal to those of its replay.
    """

    warm: str = ""
    token_scale: float = 1.0
    tool_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.token_scale <= 0 or self.tool_scale < 0:
            raise ValueError("use token_scale above 0 and tool_scale of at least 0")


@dataclass(frozen=True, slots=True)
class OracleOptions:
    """The true lengths, for environments that know them (replayed traces).

    Parameters
    ----------
    error_factor
        Typical factor of its error: 1 is exact, 2 is wrong by a factor of about 2 either way.
    """

    error_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.error_factor < 1:
            raise ValueError(f"error_factor={self.error_factor}: use a number of at least 1")
