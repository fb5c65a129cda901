"""Which connections to a scheduler are open to others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import dask.config
import pytest

from heddle_dask.cli.cluster_choice import TlsFiles, remote_client
from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.credentials import Credentials
from heddle_dask.live.driver.connection.encryption import (
    UnencryptedConnection,
    unencrypted,
    warn_if_unencrypted,
)


@pytest.mark.parametrize("address", ["tcp://10.0.0.5:8786", "ws://head.example:8786", "head.example:8786"])
def test_an_unencrypted_address_of_another_machine_is_named(address: str) -> None:
    line = unencrypted(address)
    assert f"the connection to {address} is not encrypted" in line and "\n" not in line
    with pytest.warns(UnencryptedConnection, match="is not encrypted"):
        warn_if_unencrypted(address)


@pytest.mark.parametrize(
    "address",
    [
        "tls://10.0.0.5:8786",
        "wss://head.example:443",
        "tcp://127.0.0.1:8786",
        "tcp://[::1]:8786",
        "tcp://localhost:8786",
        "inproc://10.0.0.5/1/2",
    ],
)
def test_an_encrypted_address_and_one_of_this_machine_are_not(address: str) -> None:
    assert unencrypted(address) == ""
    warn_if_unencrypted(address)


def connect(address: str) -> None:
    async def body() -> None:
        async with remote_client(address, 0.1):
            raise AssertionError("nothing listens there")

    asyncio.run(body())


def test_the_command_line_warns_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="no Dask scheduler answers"):
        connect("tcp://0.0.0.0:1")
    assert capsys.readouterr().err.startswith("heddle: warning: the connection to tcp://0.0.0.0:1 is not")
    with pytest.raises(BadInput, match="no Dask scheduler answers"):
        connect("tcp://127.0.0.1:1")
    assert capsys.readouterr().err == ""


def test_an_encrypted_address_without_credentials_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"^tls://127.0.0.1:1 needs TLS credentials: give --tls-ca-file"):
        connect("tls://127.0.0.1:1")


def test_credentials_for_an_address_without_encryption_are_refused_in_one_line(tmp_path: Path) -> None:
    made = Credentials.temporary(tmp_path)
    tls = TlsFiles(made.certificate, made.certificate, made.key)
    for address in ("tcp://127.0.0.1:1", "127.0.0.1:1"):
        with pytest.raises(BadInput, match="is not encrypted, and TLS credentials were given: use tls://"):
            tls.security(address)
        with (
            dask.config.set({"distributed.comm.require-encryption": True}),
            pytest.raises(BadInput, match="and Dask's configuration requires encryption: use tls://"),
        ):
            connect(address)
    assert tls.security("tls://127.0.0.1:1").require_encryption
