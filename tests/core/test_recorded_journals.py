"""Journals of live sessions, recorded before the core vocabulary changed: today's controller gives the same commands.

Each file in `tests/journals` holds the facts of a session and then a line per event, `[event, [command, ...]]`. They
are of emulated engines on a local cluster: learned and exact predictions, admission by KV memory and by a deadline, the
paper's moves, priced moves with a given cost, eager preemption. Their commands were compared with those of commit
4828efd when they were converted to the journal format of today; only `DropContext` came in.
`search-heddle` was recorded when `least-work` began to carry out every reservation: three engines, 15 moves.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from worlds.integrity import check_integrity

from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import replay
from heddle_dask.strategies.presets import strategies_of_run

JOURNALS = sorted((Path(__file__).parent.parent / "journals").glob("*.jsonl.gz"))


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.name.partition(".")[0])
def test_a_recorded_session_gets_the_same_commands(journal: Path) -> None:
    with gzip.open(journal, "rt", encoding="utf-8") as file:
        facts, *lines = (json.loads(line) for line in file)
    controller = Controller(strategies_of_run(facts))
    assert next(replay(controller, lines), None) is None
    check_integrity(controller.state)
    assert len(lines) > 1000


def test_there_are_journals() -> None:
    assert len(JOURNALS) == 4
