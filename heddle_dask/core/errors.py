"""Errors by boundary.

`BadInput` is an error of the user: one line that says what is wrong, where, and what to do; the command line turns it
into exit code 2. `WriteFailed` is one line too, with exit code 1. `InvalidTransition` and `GuardViolation` are bugs of
this package: they carry the history or the reason, and are raised at once. Failures of agents, tools and engines are
neither: they are data (a `cause` in events and records).
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard


class HeddleError(Exception):
    """Base of all errors raised on purpose by this package."""


class BadInput(HeddleError, ValueError):
    """The user's input is invalid; the message is one line that says what to do.

    A handler of `ValueError` around code that may raise it lets it pass.
    """


class MissingRun(BadInput, FileNotFoundError):
    """There is no run at a path."""


class WriteFailed(HeddleError):
    """A file of a run cannot be written (a full disk); the message is one line. What was written before is whole."""

    @classmethod
    def of(cls, path: object, error: OSError) -> WriteFailed:
        """The failure to write one file of a run."""
        # ESTALE: another process has become the writer (`records/locks.py`).
        room = "" if error.errno == errno.ESTALE else "make room there, then "
        return cls(
            f"cannot write {path}: {error.strerror or error}: {room}finish the run with the same command and --resume"
        )


class InvalidTransition(HeddleError):
    """An event is impossible in the current state of a state machine. A bug; of a trajectory, with its history."""


class GuardViolation(HeddleError):
    """A strategy proposed an invalid command. A bug; the message has the reason."""


def one_line_of(error: BaseException) -> str:
    """The message of an error, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no whole number from `least` to 2**31 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise BadInput(f"{name} is {value!r}: use a whole number of at least {least} and below 2**31")


def check_seconds(name: str, value: object) -> None:
    """Refuse what is no finite number above 0."""
    if not is_finite(value) or not value > 0:
        raise BadInput(f"{name} is {value!r}: use a finite number of seconds above 0")


def check_keys(where: str, given: Iterable[str], known: Sequence[str], required: int = 0) -> None:
    """Refuse a mapping with an unknown key, or without one of the first `required` known ones."""
    names = set(given)
    unknown = sorted(names.difference(known))
    if unknown:
        raise BadInput(f"{where} has unknown key {unknown[0]!r}: use {', '.join(known)}")
    missing = [name for name in known[:required] if name not in names]
    if missing:
        raise BadInput(f"{where} lacks {', '.join(missing)}")


def is_finite(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float, and neither nan nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def encodable_text(text: str) -> str:
    """The text with its lone surrogates as escapes: file names and outputs that are no UTF-8 have some."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encodable_value(value: Any) -> Any:
    """A JSON value with lone surrogates of its texts as escapes: JSON may hold them, and tools and files cannot."""
    if isinstance(value, str):
        return encodable_text(value)
    if isinstance(value, list):
        return [encodable_value(each) for each in value]
    if isinstance(value, dict):
        return {encodable_text(name): encodable_value(each) for name, each in value.items()}
    return value


LINE_CHARACTERS = 8_000
STORY_CHARACTERS = 64_000
"""Most of the text of an exception: of its line, and of its traceback."""


def cut_text(text: str, most: int = STORY_CHARACTERS) -> str:
    """The text with its middle cut out where it is longer; it says so."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [… cut: {len(text) - 2 * half:,} of {len(text):,} characters …] {text[-half:]}"


def text_of(error: BaseException) -> str:
    """What the error says, however it is made."""
    try:
        return str(error)
    except Exception:
        return "its text cannot be made"


def is_encodable(text: str) -> bool:
    """Whether messages and files can hold the text: a lone surrogate has no form in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# All but tab and newline; marks that turn the direction of text; and surrogates, which no terminal takes.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """The text with escapes, such as ``\\x1b``, in place of its control characters."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
