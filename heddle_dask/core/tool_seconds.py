"""Mean seconds of tools by label, as the expected time of a running call."""

from __future__ import annotations

from collections.abc import Iterable


class ToolSeconds:
    """Seconds of finished actions, by label. Grows with the number of labels, not of actions."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._total_s: dict[str, float] = {}

    def took(self, label: str, seconds: float) -> None:
        """Count a finished action of that label."""
        self._count[label] = self._count.get(label, 0) + 1
        self._total_s[label] = self._total_s.get(label, 0.0) + seconds

    def mean_s(self, labels: Iterable[str]) -> float | None:
        """The largest mean over these labels, for concurrent calls; None if no such action has ended yet."""
        known = [self._total_s[label] / self._count[label] for label in labels if label in self._count]
        return max(known, default=None)
