"""A short journal as a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heddle_dask.records.journal import JournalReader


class JournalRecords(list[tuple[str, dict[str, Any]]]):
    """The complete records of a journal, in order; `dropped_bytes` is the length of its torn tail."""

    dropped_bytes: int = 0


def read_journal(path: str | Path) -> JournalRecords:
    """All complete records of a journal."""
    reader = JournalReader(path)
    records = JournalRecords((record.kind, record.body) for record in reader)
    records.dropped_bytes = reader.dropped_bytes
    return records
