"""The URI of a weight store that keeps only manifests: the weights themselves are broadcast by the trainer.

``collective://HOST:PORT/DIRECTORY``: engines ask the trainer, at that address; it shares the directory with the driver.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from heddle_dask.core.errors import BadInput

_SCHEME: Final = "collective://"


def is_collective(uri: str) -> bool:
    return uri.startswith(_SCHEME)


@dataclass(frozen=True, slots=True)
class CollectiveUri:
    """A store, or something in it.

    Attributes
    ----------
    host, port
        Where the trainer listens: an address of its machine that the machines of engines reach.
    path
        The directory of manifests, or a path in it; empty: not known yet.
    """

    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Read ``collective://HOST:PORT[/DIRECTORY]``.

        Raises
        ------
        BadInput
            It names no address that another machine can connect to.
        """
        network, slash, path = uri.removeprefix(_SCHEME).partition("/")
        try:
            parts = urlsplit(f"//{network}")
            host, port = parts.hostname or "", parts.port or 0
        except ValueError:
            host, port = "", 0
        if not is_collective(uri) or not host or not port or "@" in network:
            raise BadInput(
                f"weight store {uri}: name the trainer's network address, {_SCHEME}HOST:PORT, such as "
                f"{_SCHEME}10.0.0.7:29600"
            )
        if _is_unspecified(host):
            raise BadInput(
                f"weight store {uri}: engines cannot connect to {host}; name one address of the trainer's machine"
            )
        return cls(host, port, slash + path)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.network}{self.path}"

    @property
    def network(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.network}"


def store_uri(given: str | None, directory: Path) -> str:
    """The store that a user names; `directory` where none is named, and for the manifests of a broadcast.

    Raises
    ------
    BadInput
        See `CollectiveUri.parse`.
    """
    if given is None or not is_collective(given):
        return given or str(directory)
    found = CollectiveUri.parse(given)
    return str(found if found.path else CollectiveUri(found.host, found.port, str(directory.absolute())))


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name
