"""The token with which requests to a sandbox service prove that they may make them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from heddle_dask.core.errors import HeddleError


def read_token(path: Path, *, make: bool = True) -> str:
    """The token in a file that only this user can read; made if it is missing and `make`.

    Raises
    ------
    HeddleError
        Others can read it, it is empty, or it cannot be read.
    """
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
        raise HeddleError(
            f"token file {path}: it must hold a token and be readable by its owner alone (chmod 600)"
        )
    return token
