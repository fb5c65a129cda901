"""TLS credentials of a local cluster, and the file that says how to reach the cluster of a run.

Both can be read by their owner only, and go with the cluster. The connection file, for ``heddle top RUN.zarr``, holds
the address of the scheduler and the paths of the TLS files, not the key itself.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed.security import Security

from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.owned_directory import OwnedDirectory

CONNECTION_FILE = "connection.json"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key and its self-signed certificate, which is its own authority: whoever has it belongs to the cluster."""

    security: Security  # for clients in this process
    # `certificate`, `key`: files for the processes of the cluster.
    certificate: Path
    key: Path
    owned: OwnedDirectory | None = None  # what holds them; None: they are not ours

    @classmethod
    def temporary(cls, directory: Path) -> Credentials:
        """Make new ones, valid for a year, in a new directory of mode 0700 in this one; those of dead owners go."""
        security = Security.temporary()
        owned = OwnedDirectory("tls-", directory, is_shared=True)
        certificate, key = owned.path / "certificate.pem", owned.path / "key.pem"
        for path, content in ((certificate, security.tls_scheduler_cert), (key, security.tls_scheduler_key)):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(content)
        return cls(security, certificate, key, owned)

    def remove(self) -> None:
        if self.owned is not None:
            self.owned.remove()

    @property
    def options(self) -> list[str]:
        """Options of ``dask scheduler`` and ``dask worker``."""
        files = {"--tls-ca-file": self.certificate, "--tls-cert": self.certificate, "--tls-key": self.key}
        return [part for name, path in files.items() for part in (name, str(path))]


@dataclass(frozen=True, slots=True)
class Connection:
    """Address of a scheduler, and PEM files of a client; empty paths without TLS."""

    address: str
    tls_ca_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""


@contextlib.contextmanager
def connection_file(directory: Path, cluster: Any) -> Iterator[None]:
    """Keep the file in the directory while the block runs; a disk that refuses it does not stop a run.

    Parameters
    ----------
    cluster
        A started Dask cluster; its attribute `credentials`, if it has them, names the files.
    """
    path = directory / CONNECTION_FILE
    credentials: Credentials | None = getattr(cluster, "credentials", None)
    files = {}
    if credentials is not None:
        certificate = str(credentials.certificate)
        files = {"tls_ca_file": certificate, "tls_cert": certificate, "tls_key": str(credentials.key)}
    partial = path.with_name(path.name + ".partial")
    with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(Connection(cluster.scheduler_address, **files)), file)
        os.replace(partial, path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_connection(path: Path) -> Connection:
    """Read a file of `connection_file`, or one of ``dask scheduler --scheduler-file``.

    Raises
    ------
    BadInput
        It cannot be read, or names no address.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise BadInput(f"cannot read the scheduler's address from {path}: {reason}") from None
    address = content.get("address") if isinstance(content, dict) else None
    if not isinstance(address, str):
        raise BadInput(f"{path} names no address: give the file of `dask scheduler --scheduler-file`")
    own = {name: str(content.get(name, "")) for name in ("tls_ca_file", "tls_cert", "tls_key")}
    return Connection(address, **own)
