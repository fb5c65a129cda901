"""Events and commands as plain lists, and the replay of a recorded session.

A journal line of the controller is `[event, [command, ...]]`, each of them `[type name, field, ...]`.
Replaying the events through a fresh controller must give the same commands: parity test, bug report and
regression corpus in one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args

from heddle_dask.core import events, nouns
from heddle_dask.core.commands import Command
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.events import Event

_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*get_args(Event), *get_args(Command))}
_NESTED: dict[str, type] = {
    "trajectory": nouns.TrajectorySpec,
    "step": nouns.StepRequest,
    "action": nouns.ActionRequest,
    "engine": nouns.EngineDescription,
    "host": nouns.HostDescription,
}
# Field names per type, read once: encoding runs on every event of a live session.
_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(f.name for f in fields(kind))
    for kind in (*_TYPES.values(), *_NESTED.values(), events.TrajectorySubmitted)
}


def encode(item: Event | Command) -> list[Any]:
    """`item` as a list of its type name and its fields; nested nouns are lists of their fields."""
    kind = type(item)
    out: list[Any] = [kind.__name__]
    for name in _FIELDS[kind]:
        value = getattr(item, name)
        if is_dataclass(value) and not isinstance(value, type):
            value = [getattr(value, inner) for inner in _FIELDS[type(value)]]
        elif isinstance(value, tuple):
            value = list(value)
        out.append(value)
    return out


def decode(row: Sequence[Any]) -> Event | Command:
    """The inverse of `encode`.

    Raises
    ------
    BadInput
        The type is unknown or the number of fields differs: another version wrote it.
    """
    kind = _TYPES.get(row[0]) if row and isinstance(row[0], str) else None
    if kind is None:
        raise _foreign(row)
    item: Event | Command = _build(kind, row[1:], row)
    return item


def _build(kind: type, values: Sequence[Any], row: Sequence[Any]) -> Any:
    names = _FIELDS[kind]
    if len(values) != len(names):
        raise _foreign(row)
    return kind(
        *(
            _build(_NESTED[name], value, row) if name in _NESTED else _frozen(value)
            for name, value in zip(names, values, strict=True)
        )
    )


def _frozen(value: Any) -> Any:
    """JSON has lists where events and commands have tuples."""
    return tuple(value) if isinstance(value, list) else value


def _foreign(row: Sequence[Any]) -> BadInput:
    return BadInput(
        f"journal entry {list(row[:1])} is not of this version; replay it with the version that wrote it"
    )


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A place where a replay differs: line number, the event, recorded and replayed commands."""

    line: int
    event: list[Any]
    recorded: list[list[Any]]
    replayed: list[list[Any]]


def replay(controller: Controller, lines: Iterable[Sequence[Any]]) -> Iterator[Mismatch]:
    """Feed recorded events to a fresh controller and yield every line whose commands differ."""
    for number, (event_row, command_rows) in enumerate(lines, start=1):
        event = decode(event_row)
        replayed = [encode(command) for command in controller.handle(event)]  # type: ignore[arg-type]
        recorded = [list(row) for row in command_rows]
        if replayed != recorded:
            yield Mismatch(number, list(event_row), recorded, replayed)
