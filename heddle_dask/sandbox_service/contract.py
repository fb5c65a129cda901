"""What both ends of a sandbox service agree on: a sandbox described in JSON, and the token of requests."""

from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import HeddleError
from heddle_dask.sandbox.stateful.contract import SandboxSpec


def spec_to_json(spec: SandboxSpec) -> dict[str, Any]:
    plain = spec.to_plain()
    return {**plain, "files": {k: base64.b64encode(v).decode() for k, v in plain["files"].items()}}


def spec_from_json(form: dict[str, Any]) -> SandboxSpec:
    files = {path: base64.b64decode(text) for path, text in form["files"].items()}
    return SandboxSpec.from_plain({**form, "files": files})


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
