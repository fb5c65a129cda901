"""Whether values have the types that their dataclass says: for what comes from files that others may have written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import UnionType
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from heddle_dask.core.errors import BadInput, GuardViolation, InvalidTransition, one_line_of

T = TypeVar("T")
MOST_S = 1e12
"""No time of a run is larger, in seconds (30,000 years): views can make nanoseconds of it."""

FAULTS = (
    *(
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ),
    *(GuardViolation, InvalidTransition),
)
"""What reading raises where a file says something else than what heddle writes."""


@contextmanager
def read_from(where: object) -> Iterator[None]:
    """Turn `FAULTS` of what a file says into one line (`BadInput`); the cause stays behind it."""
    try:
        yield
    except BadInput:
        raise
    except FAULTS as error:
        told = "has what this heddle does not know: use the version that wrote it, or restore it from a copy"
        raise BadInput(f"{where} {told} ({type(error).__name__}: {one_line_of(error)[:200]})") from error


def check_types(value: object) -> None:
    """Raise `TypeError` for a dataclass or named tuple with a field of another type, also in fields of fields."""
    if not _is_of(value, type(value)):
        raise TypeError(f"a value of another type in {type(value).__name__}")


def checked(value: T) -> T:
    """The value, as `check_types` finds it."""
    check_types(value)
    return value


_hints_of = cache(get_type_hints)
_PLAIN: dict[Any, Any] = {Any: object, float: float | int}


def _is_of(value: Any, hint: Any) -> bool:
    origin, options = get_origin(hint), get_args(hint)
    if isinstance(hint, NewType):
        return _is_of(value, hint.__supertype__)
    if origin is Literal:
        return isinstance(value, str | int) and value in options
    if origin in (Union, UnionType):
        return any(_is_of(value, option) for option in options)
    if origin in (dict, Mapping):
        return (
            isinstance(value, Mapping)
            and all(map(_is_of, value, options[:1] * len(value)))
            and all(map(_is_of, value.values(), options[1:] * len(value)))
        )
    if origin in (tuple, list, Sequence):
        kinds = options if origin is tuple and options[-1] is not ... else options[:1] * len(value)
        return isinstance(value, origin) and len(value) == len(kinds) and all(map(_is_of, value, kinds))
    return isinstance(value, _PLAIN.get(hint, hint)) and all(
        _is_of(field := getattr(value, name), kind)
        and not (kind is float and name.endswith("_s") and abs(field) > MOST_S)
        for name, kind in (_hints_of(hint) if hasattr(hint, "__annotations__") else {}).items()
    )
