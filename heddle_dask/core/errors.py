"""Errors by boundary.

`BadInput` is an error of the user: one line that says what is wrong, where, and what to do; the command line turns it
into exit code 2. `InvalidTransition` and `GuardViolation` are bugs of this package: they carry the history or the
reason, and are raised at once. Failures of agents, tools and engines are neither: they are data (a `cause` in events
and records).
"""

from __future__ import annotations


class HeddleError(Exception):
    """Base of all errors raised on purpose by this package."""


class BadInput(HeddleError):
    """The user's input is invalid; the message is one line that says what to do."""


class InvalidTransition(HeddleError):
    """An event is impossible in the current state of a state machine. A bug; of a trajectory, with its history."""


class GuardViolation(HeddleError):
    """A strategy proposed an invalid command. A bug; the message has the reason."""
