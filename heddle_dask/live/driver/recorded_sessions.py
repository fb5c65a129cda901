"""The sessions of a run as its journal holds them, and whether today's controller decides as theirs did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.journal_codec import Mismatch, missing_lines, replay
from heddle_dask.core.retries import RetryPolicy
from heddle_dask.live.driver.run_writer import journal_path
from heddle_dask.records.journal import JournalReader
from heddle_dask.strategies.imported import imported_names
from heddle_dask.strategies.presets import strategies_of_run


class RecordedSession:
    """One session that wrote to a run, replayed: the first, and one more each time it was resumed or appended to.

    Attributes
    ----------
    facts
        How it was started: strategy, overrides, seed, cost, retries and more.
    events
        Events that the journal holds.
    missing
        Events that the journal lacks because the driver did not fetch them in time; what follows the first of them
        cannot be compared.
    compared
        Events whose commands were compared.
    mismatch
        The first event after which a fresh controller of the same strategies commands something else.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.events = 0
        self.missing = 0
        self.compared = 0
        self.mismatch: Mismatch | None = None
        retries = RetryPolicy.from_mapping(facts.get("retries", {}))
        self._controller = Controller(strategies_of_run(facts), retries)

    def take(self, lines: Iterable[Sequence[Any]]) -> None:
        """Replay the next lines of its journal.

        Raises
        ------
        BadInput
            Another version wrote them.
        """
        for line in lines:
            missing = missing_lines(line)
            self.missing += missing
            self.events += not missing
            if not (self.missing or self.mismatch):
                self.compared += 1
                differs = next(replay(self._controller, [line]), None)
                self.mismatch = differs and replace(differs, line=self.events)


def recorded_sessions(run: str | Path, *, import_strategies: bool = False) -> list[RecordedSession]:
    """The sessions of the run at `run`, oldest first; each has a controller and a clock of its own.

    Parameters
    ----------
    import_strategies
        Whether modules that the journal names as strategies of other packages may be imported: this runs their code.

    Raises
    ------
    BadInput
        There is no such run, its journal is missing or damaged, another version wrote it, or it names a strategy that
        may not be imported.
    """
    sessions: list[RecordedSession] = []
    for facts, lines in control_lines(run):
        if facts is not None:
            imported = imported_names(facts.get("overrides", ()))
            if imported and not import_strategies:
                raise BadInput(
                    f"the journal of {run} names the strategy {imported[0]}: give --import-strategies to import and "
                    "run it, if you trust it"
                )
            sessions.append(RecordedSession(facts))
        sessions[-1].take(lines)
    return sessions


def control_lines(run: str | Path) -> Iterator[tuple[Mapping[str, Any] | None, list[Any]]]:
    """The controller's lines in the journal of a run, some at a time; with the facts of a session where one begins.

    Raises
    ------
    BadInput
        As `recorded_sessions`.
    """
    journal = journal_path(run)
    if not journal.exists():
        raise BadInput(f"no journal at {journal}: give the path of a run that was written with one")
    has_begun = False
    for kind, body, _ in JournalReader(journal, {"session", "control"}):
        if kind == "session":
            has_begun = True
            yield body, []
        elif has_begun:
            yield None, body["lines"]
        else:
            raise BadInput(f"{journal} does not begin with a session: another version wrote it")
