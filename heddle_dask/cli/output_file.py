"""Files that a command writes for people: refused before the work, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from heddle_dask.core.errors import BadInput


def check_writable(option: str, path: Path) -> None:
    """Refuse a path that cannot be written before minutes of work, not after.

    Raises
    ------
    BadInput
    """
    try:
        # The target of a link: a link to nowhere would otherwise leave an empty file there.
        target = Path(os.path.realpath(path))
        is_new = not target.exists()
        with target.open("a", encoding="utf-8"):
            pass
        if is_new:
            target.unlink()
    except OSError as error:
        raise BadInput(f"{option} {path}: {error.strerror}; give a file that can be written") from None


def write_file(option: str, path: Path, content: str | bytes) -> None:
    """Write the file beside its place and rename it: a reader never sees half of it.

    Raises
    ------
    BadInput
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise BadInput(f"{option} {path}: {error.strerror}; give a file that can be written") from None
