"""Encodes events and commands as plain lists, and replays recorded sessions.

A journal line of the controller is `[event, [command, ...]]`. An event or a command is `[type name, field, ...]`; a
field with fields of its own (a `StepId`, a description) is a list of these. Replaying the events through a fresh
controller gives the same commands, so a journal serves as a parity test, a bug report and a regression test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from heddle_dask.core.commands import Command
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.events import Event
from heddle_dask.core.ids import RunId
from heddle_dask.core.value_types import check_types

_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*get_args(Event), *get_args(Command))}


def _is_composite(kind: Any) -> bool:
    """Whether values of this type have fields of their own: dataclasses and named tuples."""
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))


def _field_names(kind: Any) -> tuple[str, ...]:
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    names: tuple[str, ...] = kind._fields
    return names


def _fields_without_default(kind: Any) -> int:
    if not is_dataclass(kind):
        return len(_field_names(kind))
    return sum(field.default is MISSING and field.default_factory is MISSING for field in fields(kind))


def _composite_in(hint: Any) -> Any:
    """The composite type of a field, also inside an optional type or a tuple of any length; None for plain values."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType, tuple) else (hint,)
    return next((option for option in options if _is_composite(option)), None)


# Computed once, also for nested types: encoding runs on every event of a live session.
_FIELDS: dict[type, tuple[str, ...]] = {}
_NESTED: dict[type, tuple[Any, ...]] = {}
_SEVERAL: dict[type, tuple[bool, ...]] = {}
# Fields that came in later are at the end and have a default: journals from before can be replayed.
_NEEDED: dict[type, int] = {}


def _register(kind: type) -> None:
    if kind in _FIELDS:
        return
    hints = get_type_hints(kind)
    _FIELDS[kind] = _field_names(kind)
    _NESTED[kind] = tuple(_composite_in(hints[name]) for name in _FIELDS[kind])
    _NEEDED[kind] = _fields_without_default(kind)
    _SEVERAL[kind] = tuple(get_origin(hints[name]) is tuple for name in _FIELDS[kind])
    for nested in _NESTED[kind]:
        if nested is not None:
            _register(nested)


for _kind in _TYPES.values():
    _register(_kind)


def encode(item: Event | Command) -> list[Any]:
    """Encode `item` as a list of its type name and its fields; nested values become lists too."""
    row = _plain(item)
    row.insert(0, type(item).__name__)
    return row  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    names = _FIELDS.get(type(value))
    if names is not None:
        return [_plain(getattr(value, name)) for name in names]
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def decode(row: Sequence[Any]) -> Event | Command:
    """The inverse of `encode`.

    Raises
    ------
    BadInput
        The type is unknown, or fields without a default are missing: the line is from another version.
    """
    kind = _TYPES.get(row[0]) if row and isinstance(row[0], str) else None
    if kind is None:
        raise _foreign(row)
    try:
        item: Event | Command = _build(kind, row[1:], row)
        check_types(item)
    except (TypeError, ValueError, LookupError, RecursionError):
        raise _foreign(row) from None
    return item


def _build(kind: type, values: Any, row: Sequence[Any]) -> Any:
    if not isinstance(values, Sequence) or not _NEEDED[kind] <= len(values) <= len(_FIELDS[kind]):
        raise _foreign(row)
    return kind(
        *(
            _field(value, nested, several, row)
            for nested, several, value in zip(_NESTED[kind], _SEVERAL[kind], values, strict=False)
        )
    )


def _field(value: Any, nested: Any, several: bool, row: Sequence[Any]) -> Any:
    if nested is None or value is None:
        return _frozen(value)
    if not several:
        return _build(nested, value, row)
    if not isinstance(value, Sequence):
        raise _foreign(row)
    return tuple(_build(nested, item, row) for item in value)


def _frozen(value: Any) -> Any:
    """JSON has lists where events and commands have tuples."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _foreign(row: Sequence[Any]) -> BadInput:
    return BadInput(f"journal entry {list(row[:1])} is not of this version; replay it with the version that wrote it")


_MISSING = "JournalLinesMissing"


def gap(missing: int) -> list[Any]:
    """The journal line that stands for `missing` lines that were dropped because they were not fetched in time."""
    return [[_MISSING, missing], []]


def missing_lines(line: Sequence[Any]) -> int:
    """How many lines this one stands for; 0 where it is an event with its commands."""
    return int(line[0][1]) if line[0][0] == _MISSING else 0


_OF_RUN = "JournalOfRun"


def of_run(run_id: RunId) -> list[Any]:
    """The first journal line of a run that has joined a controller: the lines are those of all its runs."""
    return [[_OF_RUN, run_id], []]


def run_of_journal(line: Sequence[Any]) -> RunId | None:
    """The run of the journal that begins with this line; None where it is an event with its commands."""
    return RunId(line[0][1]) if line[0][0] == _OF_RUN else None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A difference of a replay: line number, event, recorded and replayed commands."""

    line: int
    event: list[Any]
    recorded: list[list[Any]]
    replayed: list[list[Any]]


def replay(controller: Controller, lines: Iterable[Sequence[Any]]) -> Iterator[Mismatch]:
    """Feed recorded events to a fresh controller and yield every line whose commands differ."""
    for number, (event_row, command_rows) in enumerate(lines, start=1):
        event = decode(event_row)
        replayed = [encode(command) for command in controller.handle(event)]  # type: ignore[arg-type]
        recorded = [encode(decode(row)) for row in command_rows]
        if replayed != recorded:
            yield Mismatch(number, list(event_row), recorded, replayed)
