"""The page `docs/states.md`, written from the transition tables: ``python -m scripts.states_page``.

A test compares the committed page with this one; the tables are the only place where states are changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

from heddle_dask.core import transitions
from heddle_dask.core.transitions import LATE, MACHINES, NEVER, Machine, Mark

_HEAD = """\
# States

Generated from `heddle_dask/core/transitions.py` by `python -m scripts.states_page`: do not edit.

A cell is the state after the event. **late**: the event is stale, ignored and counted. A dot: the event is impossible
in that state and raises `InvalidTransition` with the history. The first row is the initial state.
"""


def states_page() -> str:
    """The whole page."""
    sections = [_HEAD, *(_section(machine) for machine in MACHINES), _coupling()]
    return "\n".join(sections)


def _section(machine: Machine[Any, Any]) -> str:
    title = machine.name.capitalize().replace("Kv", "KV")
    return "\n".join([f"## {title}", "", *_table(machine), ""])


def _table(machine: Machine[Any, Any]) -> Iterator[str]:
    events = list(next(iter(machine.rows.values())))
    yield "| state | " + " | ".join(event.value for event in events) + " |"
    yield "|---" * (len(events) + 1) + "|"
    for state, row in machine.rows.items():
        cells = " | ".join(_cell(state, row[event]) for event in events)
        yield f"| **{state.value}** | {cells} |"


def _cell(state: Enum, cell: Enum | Mark) -> str:
    if cell is NEVER:
        return "·"
    if cell is LATE:
        return "**late**"
    return "stays" if cell is state else str(cell.value)


def _coupling() -> str:
    """The coupling rules, from the module's docstring."""
    _, _, rules = (transitions.__doc__ or "").partition("Coupling, in one place:")
    return f"## Coupling\n\n{rules.strip()}\n"


if __name__ == "__main__":
    sys.stdout.write(states_page())
