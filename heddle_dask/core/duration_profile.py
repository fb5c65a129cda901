"""How long an action runs with how many units of its elastic resource."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DurationProfile:
    """Seconds of an action by its units: Amdahl's law (ARL-Tangram, section 4.1: T_ori and E).

    Attributes
    ----------
    one_unit_s
        Seconds with one unit.
    serial_share
        Share of these seconds that more units do not shorten: 0 scales perfectly, 1 not at all.
    """

    one_unit_s: float
    serial_share: float = 0.0

    def seconds(self, units: int) -> float:
        """Seconds with `units` units (at least one)."""
        return self.one_unit_s * (self.serial_share + (1.0 - self.serial_share) / max(1, units))
