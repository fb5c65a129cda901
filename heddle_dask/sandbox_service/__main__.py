"""``python -m heddle_dask.sandbox_service``: serve sandboxes of this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from aiohttp import web

from heddle_dask.core.errors import HeddleError
from heddle_dask.sandbox.stateful.contract import KINDS
from heddle_dask.sandbox.stateful.local_sandbox import sandboxes_directory
from heddle_dask.sandbox_service.contract import read_token
from heddle_dask.sandbox_service.server import SandboxServer


def main() -> int:
    """Serve until interrupted; 2 for input that is not allowed."""
    parser = argparse.ArgumentParser(prog="python -m heddle_dask.sandbox_service", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8470, help="port to listen on (default: %(default)s)")
    parser.add_argument("--token-file", type=Path, required=True, help="file with the token; made if missing")
    parser.add_argument("--lease-s", type=float, default=60.0, help="seconds of a lease (default: %(default)s)")
    parser.add_argument("--kind", default="", choices=["", *KINDS[:-1]], help="kind of sandbox")
    options = parser.parse_args()
    try:
        server = SandboxServer(
            sandboxes_directory(), read_token(options.token_file), lease_s=options.lease_s, kind=options.kind
        )
    except HeddleError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    web.run_app(server.application, host=options.host, port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
