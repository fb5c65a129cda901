"""A digest of this package's files, which identifies the measured code in every stored row."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

DECIDING = ("core", "cost", "predictors", "strategies", "workloads", "sim")
"""The folders on which the decisions of a simulated rollout depend."""


@cache
def code_digest(folders: tuple[str, ...] = ("",)) -> str:
    """Twelve digits that change with any Python or JSON file of these folders of the package [default: all of it].

    The files are read at the first call of this process.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((package / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    # Prints the digest of a checkout, to find the commit of a stored row.
    print(code_digest(), "decides:", code_digest(DECIDING))
