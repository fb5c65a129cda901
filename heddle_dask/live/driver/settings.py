"""Settings: defaults from Dask's configuration, under the key ``heddle``; and fields as options of the command line.

They come from ``~/.config/dask/*.yaml``, from variables ``DASK_HEDDLE__…``, or from `dask.config.set`. Only what the
user has set is there: the defaults themselves belong to the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, TypeVar

from heddle_dask.core.errors import BadInput

Value = TypeVar("Value")

SECTIONS = ("budget", "engines", "otel", "patience", "sampling", "strategy")

Form = Literal["count", "tokens", "whole", "seconds", "number", "share", "share above 0", "switch", "engine kind"]
"""What the command line takes as a value; a tuple in its place: one of these words."""


@dataclass(frozen=True, slots=True)
class Option:
    """A field as an option of the command line."""

    flag: str  # such as ``--max-steps``
    form: Form | tuple[str, ...]
    text: str  # its help
    default: Any  # of the command line: the field's, unless it has its own

    @property
    def name(self) -> str:
        """The name of its value among those of the command."""
        return self.flag.removeprefix("--").replace("-", "_")


_OWN = object()


def option(
    default: Value,
    flag: str,
    form: Form | tuple[str, ...],
    text: str = "",
    *,
    on_command_line: object = _OWN,
) -> Value:
    """A field of a dataclass with an option of the command line; `on_command_line` is a default of its own there."""
    shown = default if on_command_line is _OWN else on_command_line
    made: Any = field(default=default, metadata={Option: Option(flag, form, text, shown)})
    return made  # type: ignore[no-any-return]


def options_of(kind: type) -> dict[str, Option]:
    """The options of a dataclass, by the names of their fields."""
    return {each.name: each.metadata[Option] for each in fields(kind) if Option in each.metadata}


_SECTION_OF: dict[type, str] = {}


def section_of(kind: type) -> str:
    """The section with the settings of a class that is `configured`."""
    return _SECTION_OF[kind]


def configured(
    section: str, *, leave_out: Collection[str] = (), instead: str = ""
) -> Callable[[type[Value]], type[Value]]:
    """Let a dataclass take the fields that its caller leaves out from the settings ``heddle.<section>``.

    Parameters
    ----------
    section
        One of `SECTIONS`.
    leave_out
        Fields that are no settings.
    instead
        A field that stands in place of those of the settings: where it is given, they are not read.
    """

    def decorate(kind: type[Value]) -> type[Value]:
        construct: Callable[..., None] = kind.__init__
        names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
        allowed = [name for name in names if name not in leave_out]

        @wraps(construct)
        def construct_with_settings(self: Value, *args: Any, **given: Any) -> None:
            taken = {**dict(zip(names, args, strict=False)), **given}
            settings = {} if taken.get(instead) is not None else settings_of(section)
            for name in settings:
                _check_key(name, allowed, f"heddle.{section}.")
            used = {name: value for name, value in settings.items() if name not in taken}
            try:
                construct(self, *args, **given, **used)
            except BadInput:
                _blame(kind, construct, section, used)
                raise

        kind.__init__ = construct_with_settings  # type: ignore[assignment, method-assign]
        _SECTION_OF[kind] = section
        return kind

    return decorate


def settings_of(section: str) -> dict[str, Any]:
    """What the user has set in a section, by name.

    Raises
    ------
    BadInput
        The section is no mapping, or there is a section of unknown name.
    """
    found = _whole().get(section, {})
    if not isinstance(found, Mapping):
        raise BadInput(f"Dask configuration: heddle.{section} is {found!r}: use a mapping of names to values")
    return {_name(key): value for key, value in found.items()}


def configured_strategy() -> str | None:
    """The preset of the setting ``heddle.strategy``; None: not set.

    Raises
    ------
    BadInput
        It is no text, or ``heddle`` has an unknown key.
    """
    preset = _whole().get("strategy")
    if preset is not None and not isinstance(preset, str):
        raise BadInput(f"Dask configuration: heddle.strategy is {preset!r}: use the name of a preset")
    return preset


def _whole() -> dict[str, Any]:
    # Imported here: the command line reads the options of classes at every start, and no settings for its help.
    import dask.config

    found = dask.config.get("heddle", None) or {}
    if not isinstance(found, Mapping):
        raise BadInput(f"Dask configuration: heddle is {found!r}: use a mapping of names to values")
    sections = {_name(key): value for key, value in found.items()}
    for name in sections:
        _check_key(name, SECTIONS, "heddle.")
    return sections


def _name(key: object) -> str:
    return str(key).replace("-", "_")


def _check_key(name: str, allowed: Collection[str], prefix: str) -> None:
    if name in allowed:
        return
    close = get_close_matches(name, allowed, n=1)
    hint = f" (did you mean {prefix}{close[0]}?)" if close else ""
    raise BadInput(f"Dask configuration: {prefix}{name} is unknown{hint}; allowed: {', '.join(allowed)}")


def _blame(kind: type, construct: Callable[..., None], section: str, used: Mapping[str, Any]) -> None:
    """Raise again, with the key, if one of the settings is wrong by itself."""
    for name, value in used.items():
        try:
            construct(object.__new__(kind), **{name: value})
        except BadInput as error:
            raise BadInput(f"Dask configuration: heddle.{section}.{name}: {error}") from None
