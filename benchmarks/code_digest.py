"""A digest of the measured code, which identifies it in every stored row."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import heddle_dask

DECIDING = ("core", "cost", "predictors", "strategies", "workloads", "sim")
"""The folders of the package on which the decisions of a simulated rollout depend."""


@cache
def code_digest(folders: tuple[str, ...] = ("",), studies: tuple[str, ...] = ()) -> str:
    """Twelve digits that change with any Python or JSON file of these folders.

    The files are read at the first call of this process.

    Parameters
    ----------
    folders
        Of the package [default: all of it].
    studies
        Of this folder, where what is simulated is here.
    """
    package = Path(heddle_dask.__file__).parent
    digest = hashlib.sha256()
    places = [(package, folder) for folder in folders] + [(Path(__file__).parent, each) for each in studies]
    for root, folder in places:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    # Prints the digest of a checkout, to find the commit of a stored row.
    print(code_digest(), "decides:", code_digest(DECIDING))
