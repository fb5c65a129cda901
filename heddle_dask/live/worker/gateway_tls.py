"""The port on which the gateway of a tool worker listens for other machines: with TLS, or not at all."""

from __future__ import annotations

import os
import socket
import ssl

from heddle_dask.core.errors import BadInput

PORT_VARIABLE = "HEDDLE_GATEWAY_PORT"
"""Of a tool worker: the port on which its gateway also listens for other machines, with TLS; 0: any."""
CERT_VARIABLE, KEY_VARIABLE = "HEDDLE_GATEWAY_CERT", "HEDDLE_GATEWAY_KEY"
"""Files with its certificate (PEM), and with the private key of that."""


def remote_sockets(host: str) -> list[socket.socket]:
    """The socket for other machines, where the environment of the worker asks for one.

    Raises
    ------
    BadInput
        There is no such port, or TLS cannot be used on it: keys would be readable on the network.
    """
    port = os.environ.get(PORT_VARIABLE, "")
    if not port:
        return []
    try:
        tls_context()
        return [socket.create_server((host, int(port)))]
    except (OSError, ValueError) as error:
        raise BadInput(
            f"gateway(): {PORT_VARIABLE} is {port!r}, with {CERT_VARIABLE} and {KEY_VARIABLE}, at {host}: {error}"
        ) from None


def tls_context() -> ssl.SSLContext:
    """TLS with the certificate that the environment names."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(os.environ.get(CERT_VARIABLE, ""), os.environ.get(KEY_VARIABLE, ""))
    return context
