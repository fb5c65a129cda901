"""Quotas of APIs in a cluster file: a table ``[quotas.NAME]`` for each API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.core.resources import ApiQuota, QuotaWindow
from heddle_dask.core.toml_table import read_toml, unknown_key

QUOTAS = "quotas"
_FIELDS = {
    "concurrency": "concurrency",
    "windows": "windows",
    "begins-within": "begins_within_s",
    "backoff": "backoff_s",
    "max-backoff": "max_backoff_s",
    "failures-to-open": "failures_to_open",
    "open": "open_s",
}


def quotas_of_file(path: Path | None) -> tuple[ApiQuota, ...]:
    """The quotas in a cluster file; none without a file.

    Raises
    ------
    BadInput
        No TOML, an unknown key, or a value that is not allowed.
    """
    if path is None:
        return ()
    tables = read_toml(path, "--cluster").get(QUOTAS, {})
    if not isinstance(tables, Mapping):
        raise BadInput(f"--cluster {path}: {QUOTAS} is {tables!r}: give tables [{QUOTAS}.NAME]")
    return tuple(_quota(name, table, f"--cluster {path}: [{QUOTAS}.{name}]") for name, table in tables.items())


def _quota(name: str, table: Any, where: str) -> ApiQuota:
    if not isinstance(table, Mapping):
        raise BadInput(f"{where} is {table!r}: use a table")
    for key in table:
        if key not in _FIELDS:
            raise unknown_key(key, list(_FIELDS), where)
    values = {_FIELDS[key]: value for key, value in table.items()}
    windows = values.pop("windows", [])
    pairs = isinstance(windows, list) and all(isinstance(one, list) and len(one) in (2, 3) for one in windows)
    if not pairs:
        raise BadInput(f"{where} windows is {windows!r}: use a list of [most, seconds] or [most, seconds, unit]")
    try:
        return ApiQuota(name, windows=tuple(QuotaWindow(*one) for one in windows), **values)
    except BadInput as error:
        raise BadInput(f"{where} {error}") from None
