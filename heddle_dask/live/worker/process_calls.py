"""Calls in the processes of a tool worker: frames on their sockets, what functions are given, errors in a line."""

from __future__ import annotations

import inspect
import socket
import struct
import traceback
from collections.abc import Callable
from typing import Any

from heddle_dask.engines.model_services.spec import ServiceFailed
from heddle_dask.environments.api_errors import refusal_of

# A frame on the socket of a process: a tag, the length of the body, the body.
FRAME = struct.Struct("!cQ")
PATH, JOIN, CALL, VALUE, RAISED = b"P", b"J", b"C", b"V", b"R"
# Answers of a process that is not used again: its call has left processes or threads behind.
LAST_VALUE, LAST_RAISED = b"v", b"r"


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
        return str(error), "", "lost", None
    cause, retry_after_s = refusal_of(error)
    return one_line(error), traceback.format_exc(), cause, retry_after_s


def one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
