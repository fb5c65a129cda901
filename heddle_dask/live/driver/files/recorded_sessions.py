"""The sessions of a run as its journal holds them, and whether today's controller decides as theirs did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.events import RunStarted
from heddle_dask.core.ids import FIRST_RUN
from heddle_dask.core.journal_codec import Mismatch, decode, missing_lines, replay, run_of_journal
from heddle_dask.core.run_description import RetryPolicy, RunDescription
from heddle_dask.core.run_names import own_row
from heddle_dask.core.value_types import read_from
from heddle_dask.core.view import StrategySet
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.journal import JournalReader
from heddle_dask.strategies.described import strategies_of_description
from heddle_dask.strategies.imported import imported_names
from heddle_dask.strategies.presets import strategies_of_run

_BEFORE = {"max_pool_wait_s": 0}
"""Limits that did not exist in sessions which do not name them."""


class RecordedSession:
    """One session that wrote to a run, replayed: the first, and one more each time it was resumed or appended to.

    Where it shared the cluster with others, its journal has the lines of all of them since their controller began.
    """

    def __init__(self, facts: Mapping[str, Any], import_strategies: bool = False) -> None:
        self.facts = facts  # how it was started: strategy, overrides, seed, cost, retries and more
        self._import_strategies = import_strategies
        self.events = 0  # events that the journal holds
        # Events that the journal lacks because the driver did not fetch them in time; what follows the first of them
        # cannot be compared.
        self.missing = 0
        self.compared = 0  # events whose commands were compared
        # The first event after which a fresh controller of the same strategies commands something else.
        self.mismatch: Mismatch | None = None
        known = facts.get("retries", {})
        if "max_pool_wait_s" not in known:
            # Before actions had elastic units, every preset started them in order, each with its least.
            facts = {**facts, "overrides": ("actions=fcfs-minimum", *facts["overrides"])}
        # Parts of a strategy that came later are off in what had been recorded before.
        self._off = tuple(f"{part}=none" for part in ("stealing",) if part not in facts.get("parts", ()))
        facts = {**facts, "overrides": (*self._off, *facts["overrides"])}
        retries = RetryPolicy.from_mapping({**_BEFORE, **known})
        self.controller = Controller(strategies_of_run(facts), retries, self._build)
        self._joined = False

    def _build(self, run: RunDescription) -> StrategySet:
        check_imported(run.overrides, self._import_strategies)
        return strategies_of_description(replace(run, overrides=(*self._off, *run.overrides)))

    def take(self, lines: Iterable[Sequence[Any]]) -> None:
        """Replay the next lines of its journal.

        Raises
        ------
        BadInput
            Another version wrote them.
        """
        for line in lines:
            if run_of_journal(line) is not None:
                self._joined = True
                continue
            if self._joined and not self.events and line[0][0] == RunStarted.__name__:
                # The controller began with the strategies of another run.
                first = decode(line[0])
                assert isinstance(first, RunStarted) and first.run.run_id == FIRST_RUN
                self.controller = Controller(self._build(first.run), first.run.retries, self._build)
            missing = missing_lines(line)
            self.missing += missing
            self.events += not missing
            if not (self.missing or self.mismatch):
                self.compared += 1
                differs = next(replay(self.controller, [line]), None)
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
    with read_from(journal_path(run)):
        for facts, lines in control_lines(run):
            if facts is not None:
                check_imported(facts.get("overrides", ()), import_strategies)
                sessions.append(RecordedSession(facts, import_strategies))
            sessions[-1].take(lines)
    return sessions


def check_imported(overrides: Sequence[str], import_strategies: bool) -> None:
    """Refuse strategies of other packages that may not be imported."""
    imported = imported_names(overrides)
    if imported and not import_strategies:
        raise BadInput(
            f"the journal names the strategy {imported[0]}: give --import-strategies to import and run it, if you "
            "trust it"
        )


def own_lines(
    sessions: Iterable[tuple[Mapping[str, Any] | None, list[Any]]],
) -> Iterator[tuple[Mapping[str, Any] | None, list[Any]]]:
    """What `control_lines` yields, without what concerns other runs on the cluster, in the names of the run itself."""
    own = FIRST_RUN
    for facts, lines in sessions:
        if facts is not None:
            own = FIRST_RUN
        mine: list[Any] = []
        for line in lines:
            joined = run_of_journal(line)
            if joined is not None:
                own = joined
                continue
            event = own_row(line[0], own)
            commands = [row for each in line[1] if (row := own_row(each, own)) is not None]
            if event is not None:
                mine.append([event, commands])
            elif commands:
                # An event of another run made room for this one.
                mine.append([["TimeReached", line[0][1]], commands])
        yield facts, mine


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
            yield None, body.get("lines", [])
        else:
            raise BadInput(f"{journal} does not begin with a session: another version wrote it")
