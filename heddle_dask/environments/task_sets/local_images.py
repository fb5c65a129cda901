"""Images of containers on this cluster, by the names that tasks have for them.

A file `images.toml` beside the tasks maps the names, or a folder has the images in files of their names::

    "python:3.13-slim" = "images/python.tar"     # relative to the file
    "swebench/*" = "/shared/images/{name}.tar"   # {name}: the name with _ for / and :
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.core.toml_table import read_toml

TABLE = "images.toml"
_ENDINGS = ("", ".tar")


class LocalImages:
    """Where the images are: a table, a folder, or nothing.

    Parameters
    ----------
    source
        A TOML file, a folder of images, or a mapping; None: `images.toml` in the folder `beside`, where it is.
    """

    def __init__(self, source: str | Path | Mapping[str, str] | None, beside: Path) -> None:
        self._table: dict[str, str] = {}
        self._folder: Path | None = None
        base = Path()
        if isinstance(source, Mapping):
            self._table = dict(source)
        elif source is None or Path(source).is_file():
            path = beside / TABLE if source is None else Path(source)
            base = path.parent
            self._table = _checked(read_toml(path, "images"), path) if source is not None or path.is_file() else {}
        elif Path(source).is_dir():
            self._folder = Path(source)
        else:
            raise BadInput(f"images {str(source)!r}: there is no such file or folder")
        self._base = base.absolute()

    def path_of(self, name: str) -> str | None:
        """The image of a name, with or without its tag ``:latest``; None: it is not here."""
        for each in dict.fromkeys((name, name.removesuffix(":latest"), f"{name}:latest")):
            found = self._in_table(each) or self._in_folder(each)
            if found is not None:
                return found
        return None

    def _in_table(self, name: str) -> str | None:
        exact = [self._table[name]] if name in self._table else []
        for place in exact or [place for key, place in self._table.items() if fnmatchcase(name, key)]:
            path = self._base / place.replace("{name}", file_name(name))
            return str(path)
        return None

    def _in_folder(self, name: str) -> str | None:
        if self._folder is None:
            return None
        paths = (self._folder / f"{file_name(name)}{ending}" for ending in _ENDINGS)
        return next((str(path.absolute()) for path in paths if path.exists()), None)


def file_name(name: str) -> str:
    """The name of an image as that of a file."""
    return name.replace("/", "_").replace(":", "_")


def _checked(table: Mapping[str, Any], path: Path) -> dict[str, str]:
    for name, place in table.items():
        if not isinstance(place, str) or not place:
            raise BadInput(f"images {path}: {name!r} is {place!r}: use the path of an image")
    return dict(table)
