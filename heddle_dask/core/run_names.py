"""Names of a run in events and commands: qualified on their way to the controller, plain on their way back.

Which fields hold a name follows from their types (`TrajectoryId`, `GroupId`, `ActionId`), so new events need no code
here. Names of sandboxes are names of a run as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, get_args, get_type_hints

from heddle_dask.core.commands import Command
from heddle_dask.core.events import Event
from heddle_dask.core.ids import FIRST_RUN, ActionId, GroupId, RunId, StepId, TrajectoryId
from heddle_dask.core.run_record import plain_name, qualified

_NAMES = (TrajectoryId, GroupId, ActionId)
_SANDBOX = "sandbox"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Fields:
    """Where a type holds names.

    Attributes
    ----------
    names, nested
        Fields that are a name, and fields with names in them; `run` if it says of which run it is.
    """

    names: tuple[str, ...]
    nested: tuple[str, ...]
    run: bool


_FIELDS: dict[type, _Fields] = {}


def _register(kind: type) -> _Fields:
    if kind in _FIELDS:
        return _FIELDS[kind]
    hints = get_type_hints(kind)
    listed = [field.name for field in fields(kind)] if is_dataclass(kind) else list(hints)
    options = {name: (hints[name], *get_args(hints[name])) for name in listed}
    names = [n for n in listed if n == _SANDBOX or any(option in _NAMES for option in options[n])]
    nested = []
    for name in listed:
        for option in options[name]:
            composite = isinstance(option, type) and (is_dataclass(option) or option is StepId)
            if composite and option in (hints[name], *get_args(hints[name])) and _holds_names(option):
                nested.append(name)
    _FIELDS[kind] = _Fields(tuple(names), tuple(nested), "run_id" in listed)
    return _FIELDS[kind]


def _holds_names(kind: type) -> bool:
    found = _register(kind)
    return bool(found.names or found.nested)


for _kind in (*get_args(Event), *get_args(Command)):
    _register(_kind)


def names_in(item: object) -> Iterator[str]:
    """All names of a run in an event or a command."""
    known = _FIELDS[type(item)]
    for field in known.names:
        if value := getattr(item, field):
            yield value
    for field in known.nested:
        value = getattr(item, field)
        if type(value) in _FIELDS:  # neither None nor several
            yield from names_in(value)


def _mapped(item: T, change: Callable[[str], str], run_id: RunId | None) -> T:
    known = _FIELDS[type(item)]
    values: dict[str, Any] = {}
    for field in known.names:
        if value := getattr(item, field):
            values[field] = change(value)
    for field in known.nested:
        value = getattr(item, field)
        if type(value) in _FIELDS:
            values[field] = _mapped(value, change, run_id)
    if known.run and run_id is not None:
        values["run_id"] = run_id
    if isinstance(item, StepId):
        return item._replace(**values)
    return replace(item, **values)  # type: ignore[type-var]


class RunNames:
    """The names of one run."""

    def __init__(self, run_id: RunId) -> None:
        self.run_id = run_id

    def of(self, name: str) -> Any:
        return qualified(self.run_id, name)

    def of_step(self, step_id: StepId) -> StepId:
        return step_id._replace(trajectory_id=self.of(step_id.trajectory_id))

    def qualify(self, event: Event) -> Event:
        """An event of this run as the controller is told of it."""
        if self.run_id == FIRST_RUN and not any("@" in name for name in names_in(event)):
            return event
        return _mapped(event, self.of, self.run_id)


def run_of_item(item: object) -> RunId | None:
    """The run of an event or a command with qualified names; None where it is of no run."""
    for name in names_in(item):
        return plain_name(name)[0]
    return None


def plain(item: T) -> T:
    """An event or a command in the names of its own run."""
    if not any("@" in name for name in names_in(item)):
        return item
    return _mapped(item, lambda name: plain_name(name)[1], None)


# -- rows of a journal -------------------------------------------------------------------------------------------


def _paths_of(kind: type) -> list[tuple[int, ...]]:
    known = _FIELDS[kind]
    hints = get_type_hints(kind)
    listed = [field.name for field in fields(kind)] if is_dataclass(kind) else list(hints)
    paths: list[tuple[int, ...]] = []
    for number, name in enumerate(listed):
        if name in known.names:
            paths.append((number,))
        elif name in known.nested and getattr(hints[name], "__origin__", None) is not tuple:
            (inner,) = [o for o in (hints[name], *get_args(hints[name])) if o in _FIELDS]
            paths += [(number, *path) for path in _paths_of(inner)]
    return paths


# The first field of a row is the name of its type.
_ROW_PATHS = {
    kind.__name__: [(path[0] + 1, *path[1:]) for path in _paths_of(kind)]
    for kind in (*get_args(Event), *get_args(Command))
}


def own_row(row: Sequence[Any], run_id: RunId) -> Sequence[Any] | None:
    """An encoded event or command in the names of this run; as it is where it is of no run, None of another run."""
    found = [value for path in _ROW_PATHS.get(row[0], ()) if (value := _at(row, path))]
    if not found:
        return row
    if plain_name(found[0])[0] != run_id:
        return None
    if not any("@" in name for name in found):
        return row
    copied: list[Any] = _copied(row)
    for path in _ROW_PATHS[row[0]]:
        if value := _at(row, path):
            inner = copied
            for number in path[:-1]:
                inner = inner[number]
            inner[path[-1]] = plain_name(value)[1]
    return copied


def _at(row: Any, path: tuple[int, ...]) -> Any:
    for number in path:
        if not isinstance(row, Sequence) or number >= len(row):
            return None
        row = row[number]
    return row


def _copied(row: Any) -> Any:
    return [_copied(each) for each in row] if isinstance(row, list | tuple) else row
