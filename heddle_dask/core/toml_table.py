"""TOML files of the user: read whole, and refused in one line."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.core.plain_files import read_plain

MOST_TOML_BYTES = 4 << 20


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Parse a TOML file.

    Raises
    ------
    BadInput
        The file is missing, unreadable, no plain file or no TOML; `what` names the option.
    """
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f"{what} {str(path)!r} is no file")
        return tomllib.loads(read_plain(path, MOST_TOML_BYTES).decode())
    except OSError as error:
        raise BadInput(f"{what} {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # bad syntax or coding
        raise BadInput(f"{what} {path} is no TOML: {error}") from None


def unknown_key(key: str, allowed: Sequence[str], where: str) -> BadInput:
    """An error for an unknown key, with the nearest allowed key and the whole list."""
    close = get_close_matches(key, allowed, n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    return BadInput(f"{where} has unknown key {key!r}{hint}; allowed: {', '.join(allowed)}")
