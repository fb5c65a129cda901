"""Values of plain types as JSON, and back: reading them runs no code, whatever the text says.

Plain are None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, and NumPy arrays and scalars without
objects or fields in them. The types are exact: an instance of a subclass (an enum, a named tuple) is not plain.

None, bool, float, str, lists and integers of 64 bits are written as themselves. Everything else is a JSON object with
one entry, whose name is the type. What the values of a container share (the same list twice) is written twice.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import Any

import numpy as np

# JSON encoders and decoders are recursive; a deeper value is no result of a tool.
MAX_DEPTH = 64
_MAX_INT = 2**63
_ARRAY_KINDS = "biufcSU"


class NotPlain(Exception):
    """The value, or one inside it, has another type, is too deep or contains itself."""


def to_plain(value: Any) -> Any:
    """The JSON-able form of a value.

    Raises
    ------
    NotPlain
        It has no such form.
    """
    return _to_plain(value, 0)


def from_plain(form: Any) -> Any:
    """Read what `to_plain` made.

    Raises
    ------
    NotPlain
        `to_plain` did not make it.
    """
    try:
        return _from_plain(form, 0)
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error):
        raise NotPlain("it is no form of a plain value") from None


def _to_plain(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain(f"it is nested deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -_MAX_INT <= value < _MAX_INT else {"int": hex(value)}
    if kind is list:
        return [_to_plain(item, depth + 1) for item in value]
    if kind is dict:
        return {"dict": [[_to_plain(part, depth + 1) for part in item] for item in value.items()]}
    if kind is tuple:
        return {"tuple": [_to_plain(item, depth + 1) for item in value]}
    if kind in (set, frozenset):
        # In an order that does not depend on the hash seed of this process.
        return {kind.__name__: sorted((_to_plain(item, depth + 1) for item in value), key=json.dumps)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is np.ndarray or isinstance(value, np.generic):
        return _array_form(value)
    raise NotPlain(f"it has a value of type {kind.__module__}.{kind.__qualname__}")


def _array_form(value: np.ndarray[Any, Any] | np.generic) -> dict[str, Any]:
    array = np.asarray(value)
    dtype = array.dtype
    if dtype.kind not in _ARRAY_KINDS or dtype.metadata:
        raise NotPlain(f"it has an array of {dtype}")
    name = "array" if isinstance(value, np.ndarray) else "scalar"
    return {name: [dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode("ascii")]}


def _from_plain(form: Any, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise NotPlain("it is nested too deep")
    if form is None or isinstance(form, bool | int | float | str):
        return form
    if isinstance(form, list):
        return [_from_plain(item, depth + 1) for item in form]
    ((name, content),) = form.items()
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](_from_plain(item, depth + 1) for item in content)
    if name == "dict":
        return {_from_plain(key, depth + 1): _from_plain(item, depth + 1) for key, item in content}
    return _LEAVES[name](content)


def _array(content: list[Any]) -> np.ndarray[Any, Any]:
    name, shape, text = content
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise NotPlain(f"it has an array of {dtype}")
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).reshape(shape).copy()


_COLLECTIONS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_LEAVES: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "complex": lambda parts: complex(*parts),
    "array": _array,
    "scalar": lambda content: _array(content)[()],
}
