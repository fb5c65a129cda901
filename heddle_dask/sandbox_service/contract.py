"""What both ends of a sandbox service agree on: a sandbox described in JSON, and the token of requests."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.sandbox.stateful.contract import Command, SandboxSpec


def command_from_json(form: Mapping[str, Any]) -> Command:
    """A command for the server's machine; the cores of the client's mean nothing here."""
    command = Command(**{**form, "cores": ()})
    limit_s, names = command.timeout_s, (command.text, command.service)
    if type(command.cpus) is not int or type(limit_s) not in (int, float) or not 0 < limit_s < math.inf:
        raise BadInput("sandbox command: cpus is a whole number, timeout_s a number above 0")
    if not all(isinstance(name, str) for name in names):
        raise BadInput("sandbox command: text and service are strings")
    return command


_LIMITS = ("memory_bytes", "disk_bytes", "max_files", "max_processes", "output_bytes", "network")


def limits_from_json(form: Any) -> SandboxSpec:
    """The limits of a spec and its network; all else of it is not the client's to say."""
    if not isinstance(form, dict):
        raise BadInput("sandbox: the spec is no JSON object")
    spec = SandboxSpec(**{name: form[name] for name in _LIMITS if name in form})
    if type(spec.network) is not bool:
        raise BadInput("sandbox: network is true or false")
    return spec


def read_token(path: Path, *, make: bool = True) -> str:
    """The token in a file that only this user can read; made if it is missing and `make`."""
    try:
        if make and not path.exists():
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32))
        facts = path.stat()
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise HeddleError(f"token file {path}: {error}") from error
    if facts.st_mode & 0o077 or not token:
        raise HeddleError(f"token file {path}: it must hold a token and be readable by its owner alone (chmod 600)")
    return token
