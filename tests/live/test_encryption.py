"""Which connections to a scheduler are open to others."""

from __future__ import annotations

import pytest

from heddle_dask.live.driver.encryption import unencrypted


@pytest.mark.parametrize("address", ["tcp://10.0.0.5:8786", "ws://head.example:8786", "head.example:8786"])
def test_an_unencrypted_address_of_another_machine_is_named(address: str) -> None:
    line = unencrypted(address)
    assert f"the connection to {address} is not encrypted" in line and "\n" not in line


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
