"""What a program may meet when it asks for a step or an action, besides refused parameters and failed actions."""

from __future__ import annotations


class BudgetExhausted(Exception):
    """The program asked for a step although its step, token or context budget is used up."""


class StepLost(Exception):
    """A step has no result: the engine refuses it, or it was lost too often. The message says why."""


class ReplayDiverged(Exception):
    """On resuming, the program asked for something else than the journal holds."""


class SandboxDiffers(Exception):
    """A sandbox was to be rebuilt on another worker, and one of its commands had another output there."""
