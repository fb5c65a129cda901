"""What a tool raises where an API refuses or fails a call that may be repeated."""

from __future__ import annotations

from typing import Literal

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.quotas import RATE_LIMITED, UNAVAILABLE


class Retry(Exception):
    """The call failed for a reason that passes: the controller repeats it after a while.

    Raised by a function of `Context.call`, at most `RetryPolicy.max_call_attempts` times; the program sees the last
    result only.

    Parameters
    ----------
    message
        One line.
    retry_after_s
        Seconds for which the API asks to be left alone, if it says so: no call of the APIs in ``needs=Needs(api=…)``
        starts before.
    """

    cause: Literal["unavailable", "rate-limited"] = UNAVAILABLE

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        if retry_after_s is not None and not (is_finite(retry_after_s) and retry_after_s >= 0):
            raise BadInput(f"retry_after_s is {retry_after_s!r}: use seconds from 0 on, or None")
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[Retry], tuple[object, ...], dict[str, object]]:
        return type(self), self.args, {"retry_after_s": self.retry_after_s}


class RateLimited(Retry):
    """The API refuses the call because there were too many."""

    cause = RATE_LIMITED


def refusal_of(error: BaseException) -> tuple[Literal["raised", "unavailable", "rate-limited"], float | None]:
    """What ended an action that raised: a cause of `ActionFinished`, and the seconds for which the API waits."""
    return (error.cause, error.retry_after_s) if isinstance(error, Retry) else ("raised", None)
