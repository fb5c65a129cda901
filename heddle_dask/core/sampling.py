"""What a step may be asked for beside its context: the values that are accepted, and structured output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle_dask.core.errors import BadInput, is_finite

_MOST_STOPS = 16


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A form that the text of a step must have; exactly one of the attributes.

    Attributes
    ----------
    json_schema
        A JSON schema, as a mapping or as text.
    regex
        A regular expression that the whole text matches.
    choice
        The texts to choose from.
    grammar
        A context-free grammar in EBNF.

    Raises
    ------
    BadInput
        None or several of them, or a value of another type.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise BadInput(f"structured: give exactly one of {', '.join(self.__slots__)}, not {named}")
        ((name, value),) = given.items()
        if name == "json_schema":
            object.__setattr__(self, name, _schema_text(value))
        elif name == "choice":
            texts = () if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
            if not texts or not all(isinstance(text, str) and text for text in texts):
                raise BadInput(f"structured: choice is {value!r}: use a list of texts that are not empty")
            object.__setattr__(self, name, texts)
        elif not isinstance(value, str) or not value:
            raise BadInput(f"structured: {name} is {value!r}: use a text that is not empty")


def _schema_text(schema: Mapping[str, Any] | str) -> str:
    """The schema as JSON text: a frozen value, and the same on every wire."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(value, Mapping):
            return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise BadInput(f"structured: json_schema is no JSON: {error}") from None
    raise BadInput(f"structured: json_schema is {schema!r}: use a mapping, or its JSON text")


def check_sampling(where: str, temperature: object, top_p: object, top_k: object, min_p: object) -> None:
    """Refuse values with which no engine samples; `where` begins the message."""
    if not is_finite(temperature) or temperature < 0:
        raise BadInput(f"{where}: temperature is {temperature!r}: use a finite number of at least 0")
    if not is_finite(top_p) or not 0 < top_p <= 1:
        raise BadInput(f"{where}: top_p is {top_p!r}: use a number above 0 and at most 1")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 0 <= top_k < 2**31:
        raise BadInput(f"{where}: top_k is {top_k!r}: use a whole number of at least 1, or 0 for no limit")
    if not is_finite(min_p) or not 0 <= min_p <= 1:
        raise BadInput(f"{where}: min_p is {min_p!r}: use a number from 0 to 1")


def checked_stop(where: str, stop: object) -> tuple[str, ...]:
    """The stop strings of a step: none, one text, or a list of them."""
    if stop is None:
        return ()
    texts = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    if len(texts) > _MOST_STOPS or not all(isinstance(text, str) and text for text in texts):
        raise BadInput(f"{where}: stop is {stop!r}: use a text or a list of at most {_MOST_STOPS}, none of them empty")
    return tuple(str(text) for text in texts)


def check_seed(where: str, seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise BadInput(f"{where}: seed is {seed!r}: use a whole number of at least 0 and below 2**63")
