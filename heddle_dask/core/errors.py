"""Errors by boundary.

Two kinds of blame are kept apart. `BadInput` is the user's: one line that says what is wrong, where,
and what to do; the command line turns it into exit code 2. `InvalidTransition` and `GuardViolation`
are ours: they carry the story and are raised at once. Failures of agents, tools and engines are
neither: they are data (a `cause` in events and records).
"""

from __future__ import annotations


class HeddleError(Exception):
    """Base of all errors raised on purpose by this package."""


class BadInput(HeddleError):
    """The user asked for something that cannot be; the message is one line that says what to do."""


class InvalidTransition(HeddleError):
    """A state machine met an event that its state cannot take. Our own bug; carries the story."""


class GuardViolation(HeddleError):
    """A strategy proposed a command that would break the cluster. Our own bug; carries the reason."""
