"""TLS credentials of a local cluster: made for it, in files that only its owner can read."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from distributed.security import Security


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key and its self-signed certificate, which is its own authority: whoever has it belongs to the cluster.

    Attributes
    ----------
    security
        For clients in this process.
    certificate, key
        Files for the processes of the cluster.
    """

    security: Security
    certificate: Path
    key: Path

    @classmethod
    def temporary(cls, directory: Path) -> Credentials:
        """Make new ones, valid for a year, in a new directory of mode 0700 in this one."""
        security = Security.temporary()
        place = Path(tempfile.mkdtemp(prefix="tls-", dir=directory))
        certificate, key = place / "certificate.pem", place / "key.pem"
        for path, content in ((certificate, security.tls_scheduler_cert), (key, security.tls_scheduler_key)):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(content)
        return cls(security, certificate, key)

    def remove(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.key.parent, ignore_errors=True)

    @property
    def options(self) -> list[str]:
        """Options of ``dask scheduler`` and ``dask worker``."""
        files = {"--tls-ca-file": self.certificate, "--tls-cert": self.certificate, "--tls-key": self.key}
        return [part for name, path in files.items() for part in (name, str(path))]
