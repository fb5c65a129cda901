"""How far this process is with its batch: who waits for it can tell slow from stuck."""

from __future__ import annotations


class Progress:
    """Counts what is done, from the start of the process; one thread counts, others read.

    Attributes
    ----------
    parts
        Passes of the model over a micro-batch, optimiser steps, and batches that were read or written.
    """

    def __init__(self) -> None:
        self.parts = 0

    def made(self) -> None:
        self.parts += 1


PROGRESS = Progress()
"""That of this process, which has one trainer."""
