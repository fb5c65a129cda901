"""Which predictor the body runs, as options of a preset: names and defaults, no code of theirs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearnedPredictorOptions:
    """XGBoost that learns online from finished trajectories; group history, prompt and a constant until then.

    Parameters
    ----------
    warm
        What to start from, as the scheduler sees it: a saved predictor, an earlier run, a trace; or nothing.
    token_scale, tool_scale
        Factors on a trace's token counts and tool seconds, as a replay of it has them.
    """

    warm: str = ""
    token_scale: float = 1.0
    tool_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.token_scale <= 0 or self.tool_scale < 0:
            raise ValueError("use token_scale above 0 and tool_scale of at least 0")


@dataclass(frozen=True, slots=True)
class OracleOptions:
    """The truth, where the environment knows it (replayed traces).

    Parameters
    ----------
    error_factor
        Typical factor by which it errs: 1 is exact, 2 is off by a factor of about 2 either way.
    """

    error_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.error_factor < 1:
            raise ValueError(f"error_factor={self.error_factor}: use a number of at least 1")
