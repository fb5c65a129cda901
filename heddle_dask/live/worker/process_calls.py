"""Calls in the processes of a tool worker: frames on their sockets, what functions are given, errors in a line."""

from __future__ import annotations

import inspect
import pickle
import re
import socket
import struct
import traceback
from collections.abc import Callable
from typing import Any

from heddle_dask.core.errors import LINE_CHARACTERS, cut_text, text_of
from heddle_dask.engines.model_services.spec import ServiceFailed
from heddle_dask.environments.api_errors import refusal_of

# A frame on the socket of a process: a tag, the length of the body, the body.
FRAME = struct.Struct("!cQ")
PATH, JOIN, CALL, VALUE, RAISED = b"P", b"J", b"C", b"V", b"R"
# Answers of a process that is not used again: its call has left processes or threads behind.
LAST_VALUE, LAST_RAISED = b"v", b"r"
# Before the answer: tokens and cost that the call of an API has used, as `Granted.use` takes them.
USED = b"u"
USE = struct.Struct("!qd")


def receive(calls: socket.socket) -> tuple[bytes, bytes] | None:
    """Tag and body of the next frame; None when the other end has closed."""
    head = _read(calls, FRAME.size)
    if head is None:
        return None
    tag, length = FRAME.unpack(head)
    body = _read(calls, length)
    return None if body is None else (tag, body)


def _read(calls: socket.socket, length: int) -> bytes | None:
    body = bytearray(length)
    view, at = memoryview(body), 0
    while at < length:
        taken = calls.recv_into(view[at:])
        if taken == 0:
            return None
        at += taken
    return bytes(body)


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that the function has a parameter for."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}  # a builtin without a signature takes none
    return {name: value for name, value in offered.items() if name in names}


def failure_of(error: BaseException) -> tuple[str, str, str, float | None]:
    """What `ToolRaised` says of an error that is handled: its line, its traceback, its cause, when to try again."""
    if isinstance(error, ServiceFailed):
        return cut_text(str(error), LINE_CHARACTERS), "", "lost", None
    cause, retry_after_s = refusal_of(error)
    return one_line(error), cut_text(traceback.format_exc()), cause, retry_after_s


def one_line(error: BaseException) -> str:
    """Type and first line of an error, cut where it is long."""
    name, text = type(error).__name__, text_of(error)
    if isinstance(error, pickle.PicklingError | AttributeError) and (found := _OF_MAIN.search(text[:LINE_CHARACTERS])):
        return (
            f"{name}: {found[found.lastindex or 0]} of __main__ is sent to tools by value, and what a tool starts "
            "finds it by name alone: put it into a module that workers can import"
        )
    first = "".join(text.lstrip().partition("\n")[0].splitlines()[:1])
    return cut_text(f"{name}: {first}" if first else name, LINE_CHARACTERS)


# As pickle says it in the process of a tool, and in what it has started, where it looks a name up in `__main__`.
_OF_MAIN = re.compile(
    r"attribute lookup (\S+) on __main__ failed"
    r"|not (?:found|the same object) as __main__\.(\S+)"
    r"|Can't get attribute '([^']+)' on <module '__main__'"
)
