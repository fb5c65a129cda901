"""The sessions of a run as its journal holds them, and whether today's controller decides as theirs did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.journal_codec import Mismatch, replay
from heddle_dask.core.retries import RetryPolicy
from heddle_dask.live.driver.run_writer import journal_path
from heddle_dask.records.journal import read_journal
from heddle_dask.strategies.presets import strategies_of_run


@dataclass(slots=True)
class RecordedSession:
    """One session that wrote to a run: the first, and one more each time that the run was resumed or appended to.

    Attributes
    ----------
    facts
        How it was started: strategy, overrides, seed, cost, retries and more.
    lines
        Every event of its controller with the commands that followed.
    """

    facts: Mapping[str, Any]
    lines: list[Any] = field(default_factory=list)

    def first_mismatch(self) -> Mismatch | None:
        """The first event after which a fresh controller of the same strategies commands something else.

        Raises
        ------
        BadInput
            Another version wrote it.
        """
        retries = RetryPolicy.from_mapping(self.facts.get("retries", {}))
        return next(replay(Controller(strategies_of_run(self.facts), retries), self.lines), None)


def recorded_sessions(run: str | Path) -> list[RecordedSession]:
    """The sessions of the run at `run`, oldest first; each has a controller and a clock of its own.

    Raises
    ------
    BadInput
        There is no such run, or its journal is missing or damaged.
    """
    journal = journal_path(run)
    if not journal.exists():
        raise BadInput(f"no journal at {journal}: give the path of a run that was written with one")
    sessions: list[RecordedSession] = []
    for kind, body in read_journal(journal):
        if kind == "session":
            sessions.append(RecordedSession(body))
        elif kind == "control":
            if not sessions:
                raise BadInput(f"{journal} does not begin with a session: another version wrote it")
            sessions[-1].lines += body["lines"]
    return sessions
