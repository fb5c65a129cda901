"""Messages as plain mappings, and back.

A message is a frozen dataclass. On the wire it is a mapping by field name, and so is every dataclass or named tuple in
its fields: no position has a meaning. `transport` sends and receives messages.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from heddle_dask.engines.contract import Packed

OP = "op"
"""Under this name a mapping says of which type its message is; Dask finds the handler by it."""


class WireValue:
    """A value with fields that travels as a part of a message or of a task."""

    __slots__ = ()

    def to_wire(self) -> dict[str, Any]:
        """The fields by name, in types that msgpack carries."""
        return to_mapping(self)

    @classmethod
    def from_wire(cls, mapping: Mapping[str, Any]) -> Self:
        """The inverse of `to_wire`.

        Raises
        ------
        TypeError
            A field is missing or unknown: another version sent it.
        """
        value: Self = from_mapping(cls, mapping)
        return value


class Message(WireValue):
    """What one process tells another."""

    __slots__ = ()

    op: ClassVar[str]  # names the type, also in Dask's tables of handlers

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.op = f"heddle-{cls.__name__}"


Answer = TypeVar("Answer", bound=Message)


class Request(Message, Generic[Answer]):
    """A message that is answered."""

    __slots__ = ()

    # The type of the answer, as the class says it: ``class GetCapacity(Request[Capacity])``.
    answer: ClassVar[type[Message]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        (cls.answer,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]


class _Field(NamedTuple):
    """A field of a message: its name, and the conversion of values that msgpack would not give back as they were."""

    name: str
    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any] | None


class _Conversion(NamedTuple):
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def to_mapping(value: Any) -> dict[str, Any]:
    """The fields of a dataclass or named tuple by name; those of a message with its operation."""
    kind: Any = type(value)
    mapping = {
        name: getattr(value, name) if encode is None else encode(getattr(value, name))
        for name, encode, _ in _fields_of(kind)
    }
    if isinstance(value, Message):
        mapping[OP] = value.op
    return mapping


def from_mapping(kind: Any, mapping: Mapping[str, Any]) -> Any:
    """The inverse of `to_mapping`; raises as `WireValue.from_wire`."""
    values = {name: value for name, value in mapping.items() if name != OP}
    for name, _, decode in _fields_of(kind):
        if decode is not None and name in values:
            values[name] = decode(values[name])
    return kind(**values)


@functools.cache
def _fields_of(kind: Any) -> tuple[_Field, ...]:
    """Read once for each type: a step sends several messages."""
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else kind._fields
    return tuple(_Field(name, *(_conversion(hints[name]) or (None, None))) for name in names)


def _conversion(hint: Any) -> _Conversion | None:
    """How a field of this type travels; None: as it is."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(arguments[1], Packed):
        return _packed(arguments[1].typecode)
    if origin in (Union, UnionType):
        return _conversion_of_union([each for each in arguments if each is not NoneType])
    if origin is tuple:
        return _conversion_of_tuple(arguments)
    if hint is bytes:
        return _Conversion(bytes, bytes)
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        return _Conversion(to_mapping, functools.partial(from_mapping, hint))
    if any(_conversion(each) is not None for each in arguments):
        raise TypeError(f"a message cannot have a field of type {hint}: use a tuple of one type")
    return None


def _packed(typecode: str) -> _Conversion:
    """Numbers as the bytes of an array; what was read is an array."""
    return _Conversion(
        lambda values: (values if isinstance(values, array) else array(typecode, values)).tobytes(),
        lambda data: array(typecode, bytes(data)),
    )


def _conversion_of_union(kinds: list[Any]) -> _Conversion | None:
    """One type or None; or several types with fields, distinguished by their names."""
    if len(kinds) > 1 and all(isinstance(kind, type) and is_dataclass(kind) for kind in kinds):
        names = {kind: kind.op if issubclass(kind, Message) else kind.__name__ for kind in kinds}
        by_name = {name: kind for kind, name in names.items()}
        return _Conversion(
            lambda value: {**to_mapping(value), OP: names[type(value)]},
            lambda mapping: from_mapping(by_name[mapping[OP]], mapping),
        )
    inner = _conversion(kinds[0]) if len(kinds) == 1 else None
    if inner is None:
        return None
    encode, decode = inner
    return _Conversion(
        lambda value: None if value is None else encode(value),
        lambda value: None if value is None else decode(value),
    )


def _conversion_of_tuple(arguments: tuple[Any, ...]) -> _Conversion:
    """Of any length and one type, or pairs of plain values; a list that was read is a tuple again."""
    inner = _conversion(arguments[0]) if arguments[-1] is Ellipsis else None
    if inner is None:
        return _Conversion(tuple, tuple)
    encode, decode = inner
    return _Conversion(
        lambda values: tuple(encode(value) for value in values),
        lambda values: tuple(decode(value) for value in values),
    )
