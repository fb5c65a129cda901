"""What bounds the memory of a history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """What bounds the memory of a history: about 40 MB at 10,000 live trajectories by default.

    Attributes
    ----------
    segments
        Segments that are kept of each trajectory; the oldest go first.
    ended
        Ended trajectories that are kept; None: all of them.
    samples
        Samples of the series.
    sample_interval_s
        Least seconds between two samples at first; it doubles when the series is full.
    lengths
        Pairs of predicted and actual length.
    """

    segments: int = 256
    ended: int | None = 500
    samples: int = 512
    sample_interval_s: float = 0.25
    lengths: int = 1000


REPORT_LIMITS: Final = HistoryLimits(segments=UNLIMITED, ended=None, samples=2048)
"""Of a stored run, whose every segment is looked at once."""
