"""Typed access to the JSON of logs; every error is one line that names file, place and field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from heddle_dask.core.errors import BadInput


def json_object(text: bytes, where: str) -> dict[str, Any]:
    """The object that a file or a line is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{where}: no JSON object")
    return value


def part(data: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """A field of this type; an empty value of it where the field is missing or null."""
    value = data.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise BadInput(f"{where}: field {name!r} is {value!r:.60}, not a {kind.__name__}")
    return value


def objects(data: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """A list of objects; empty where it is missing."""
    values = part(data, name, list, where)
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise BadInput(f"{where}: {name} {number} is {value!r:.60}, not a JSON object")
    return list(values)


def count(data: Mapping[str, Any], name: str) -> int | None:
    """A count from 0 up; None for anything else, which the log then does not know."""
    value = data.get(name)
    return value if type(value) is int and value >= 0 else None


def number(data: Mapping[str, Any], name: str) -> float | None:
    """A finite number; None for anything else."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def seconds(data: Mapping[str, Any], name: str) -> float | None:
    """A time from 0 up; None for anything else."""
    value = number(data, name)
    return value if value is not None and value >= 0 else None


def text_of(content: Any) -> str:
    """The text of a message's content: a text, or a list of parts with texts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(each["text"]) for each in content if isinstance(each, dict) and "text" in each)
    return ""
