"""The version of the model that is being trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """Weights after `number` optimiser steps of one line of training.

    Attributes
    ----------
    lineage
        Name of the line of training. A run that is resumed from an older checkpoint begins a new one, so that two
        different models never have the same version; empty: the weights that an engine was started with.
    number
        Finished optimiser steps; 0 for the weights with which the training began.
    """

    lineage: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.lineage}:{self.number}" if self.lineage else str(self.number)

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read what `str` makes.

        Raises
        ------
        ValueError
            It is none.
        """
        lineage, _, number = text.rpartition(":")
        return cls(lineage, int(number))

    def is_newer_than(self, other: PolicyVersion) -> bool:
        """Whether these weights replace `other` on an engine: another lineage, or a later step of the same one."""
        return self.lineage != other.lineage or self.number > other.number
