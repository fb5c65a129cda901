"""Failures by cause: how many trajectories ended in each way, and the first message of each.

Works on the columns status, cause and detail alone, so that a large run is counted without reading its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

MESSAGE_CHARS = 200
"""Longest `message_of`: a line of a terminal or two."""

_TRACEBACK = ("Traceback (most recent call last):", "Exception Group Traceback (most recent call last):")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_GROUP_MARGIN = re.compile(r"^\s*[|+] ")


@dataclass(frozen=True, slots=True)
class Ended:
    """How one trajectory ended: the columns of the same names of a stored run."""

    trajectory_id: str
    status: str
    cause: str
    detail: str

    @property
    def succeeded(self) -> bool:
        return self.status == "completed"


@dataclass(frozen=True, slots=True)
class CauseCount:
    """Trajectories of one status and cause.

    Attributes
    ----------
    first_message
        One line of the first of them, as `message_of`.
    first_trajectory
        Its id.
    """

    status: str
    cause: str
    count: int
    first_message: str
    first_trajectory: str

    @property
    def title(self) -> str:
        """Status and cause in words."""
        return f"{self.status} by {self.cause}" if self.cause else self.status

    def as_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


class CauseCounts:
    """Counts ends by status and cause while trajectories finish; those that completed are left out."""

    def __init__(self, ended: Iterable[Ended] = ()) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._first: dict[tuple[str, str], tuple[str, str]] = {}
        for each in ended:
            self.add(each)

    def add(self, ended: Ended) -> None:
        if ended.succeeded:
            return
        key = (ended.status, ended.cause)
        self._counts[key] = self._counts.get(key, 0) + 1
        if key not in self._first:
            self._first[key] = (message_of(ended.detail), ended.trajectory_id)

    def rows(self) -> tuple[CauseCount, ...]:
        """The counts, largest first, then by status and cause."""
        keys = sorted(self._counts, key=lambda key: (-self._counts[key], key))
        return tuple(CauseCount(*key, self._counts[key], *self._first[key]) for key in keys)


def message_of(detail: str) -> str:
    """One printable line that says what happened, at most `MESSAGE_CHARS` long.

    Of a traceback it is the line of the exception that was raised last, otherwise the first line with text.
    """
    lines = [_GROUP_MARGIN.sub("", line) for line in detail.splitlines()]
    lines = [line for line in lines if line.strip()]
    chosen = lines[0] if lines else ""
    at = 0
    while at < len(lines) and lines[at] in _TRACEBACK:
        at = next((i for i in range(at + 1, len(lines)) if not lines[i][0].isspace()), len(lines))
        chosen = lines[at] if at < len(lines) else chosen
        # The next traceback belongs to the same story only where Python says that it is chained.
        at = next((i + 1 for i in range(at + 1, len(lines)) if lines[i] in _CHAINED), len(lines))
    text = "".join(char if char.isprintable() else " " for char in chosen).strip()
    return text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 1] + "…"
