"""The port of a gateway for other machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds.certificates import loopback_certificate

from heddle_dask.core.errors import BadInput
from heddle_dask.live.worker.gateway_tls import CERT_VARIABLE, KEY_VARIABLE, PORT_VARIABLE, remote_sockets


def test_no_gateway_listens_for_other_machines_without_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote_sockets("127.0.0.1") == []
    monkeypatch.setenv(PORT_VARIABLE, "0")
    with pytest.raises(BadInput, match="HEDDLE_GATEWAY_PORT is '0', with HEDDLE_GATEWAY_CERT and HEDDLE_GATEWAY_KEY"):
        remote_sockets("127.0.0.1")
    certificate, secret = loopback_certificate(tmp_path)
    monkeypatch.setenv(CERT_VARIABLE, str(certificate))
    monkeypatch.setenv(KEY_VARIABLE, str(secret))
    (found,) = remote_sockets("127.0.0.1")
    with found:
        assert found.getsockname()[1] > 0
    monkeypatch.setenv(PORT_VARIABLE, "https")
    with pytest.raises(BadInput, match="HEDDLE_GATEWAY_PORT is 'https'"):
        remote_sockets("127.0.0.1")
