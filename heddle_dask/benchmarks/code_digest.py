"""Which code was measured: a digest of this package's files, for every row that is kept."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

DECIDING = ("core", "cost", "predictors", "strategies", "workloads", "sim")
"""The folders that decide a simulated rollout."""


@cache
def code_digest(folders: tuple[str, ...] = ("",)) -> str:
    """Twelve digits that change with any Python or JSON file of these folders of the package [default: all of it].

    As they were when this process asked first.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((package / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    # Of a checkout: which commit a kept row was made with is found by trying.
    print(code_digest(), "decides:", code_digest(DECIDING))
