"""The path of a run: checked before anything is started, and removed if no trajectory begins."""

from __future__ import annotations

import re
import shutil
import tempfile
from datetime import datetime
from pathlib import Path

from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.files.run_writer import WriteMode, journal_path
from heddle_dask.records.reader import RunReader
from heddle_dask.records.schema import is_ours
from heddle_dask.records.store import RunStore

RUNS = Path("runs")
"""Where a run goes that was given no path."""


def default_out(env: str, now: datetime) -> Path:
    """``runs/<env>-<date-time>.zarr``."""
    kind, _, rest = env.partition(":")
    name = kind if kind == "replay" or "." not in kind else rest
    return RUNS / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}-{now:%Y%m%d-%H%M%S}.zarr"


def check_out(out: Path, mode: WriteMode) -> None:
    """Refuse, before the cluster starts, what the run writer would refuse later.

    Raises
    ------
    BadInput
        The path exists, is missing, is no run, or cannot be written, depending on `mode`.
    """
    if not out.name.removesuffix(".zarr"):
        raise BadInput(f"--out {str(out)!r} names no run: give a path such as runs/RUN.zarr")
    try:
        _check_present(out, mode)
    except OSError as error:
        raise BadInput(f"cannot write a run to --out: {error.strerror}") from None
    _check_writable(out)


def _check_present(out: Path, mode: WriteMode) -> None:
    if mode in ("append", "resume"):
        if not out.exists():
            raise BadInput(f"--{mode}: there is no run at {out}")
        RunReader(out)
    elif mode == "create":
        for path in (out, journal_path(out)):
            if path.exists() or path.is_symlink():
                raise BadInput(
                    f"{path} exists: choose another --out, or use --append, --resume or --overwrite"
                )
    elif out.exists() and not is_ours(out) and not (out.is_dir() and not any(out.iterdir())):
        raise BadInput(f"{out} is no run of heddle: it is not overwritten")


def _check_writable(out: Path) -> None:
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise BadInput(f"cannot write a run to {out}: {parent} is not a directory")
    try:
        # Try to write: permission bits do not show root's rights, nor a full or read-only file system.
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise BadInput(f"cannot write a run to {out}: {parent}: {error.strerror}") from None


def remove_if_empty(out: Path) -> bool:
    """Remove a new run in which no trajectory has begun, so that the same command can be given again.

    The run is locked meanwhile: a run that another process writes is left alone.
    """
    try:
        with RunStore.append_to(out) as store:
            if len(store) or StoredRun(out).begun:
                return False
            shutil.rmtree(out)
            journal_path(out).unlink(missing_ok=True)
            return True
    except BadInput:
        return False  # it does not exist, or another process writes it
