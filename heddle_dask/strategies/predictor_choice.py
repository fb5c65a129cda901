"""Which predictor the body runs, as options of a preset: names and defaults, no code of theirs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearnedPredictor:
    """XGBoost that learns online from finished trajectories; group history, prompt and a constant until then.

    Parameters
    ----------
    warm
        File of a saved predictor to start from, or nothing.
    """

    warm: str = ""


@dataclass(frozen=True, slots=True)
class Oracle:
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
