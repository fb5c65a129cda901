"""A third kind of engine in one file: every step is answered with the prompt's last token, over HTTP of its own.

The server is this module too (``python -m worlds.echo_engine SOCKET ABOUT``).
"""

from __future__ import annotations

import json
import socketserver
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.contract import (
    EngineInfo,
    EngineRefused,
    EngineUnreachable,
    GenerateRequest,
    GenerateResult,
)
from heddle_dask.engines.dialect import Dialect
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.kinds.emulated import EmulatedKind
from heddle_dask.engines.spec import EngineCommand, EngineOptions, EngineSpec


class EchoDialect:
    """Other paths and other words than vLLM's."""

    GENERATE_PATH = "/echo"
    ABORT_PATH = "/stop"
    HEALTH_PATH = "/alive"
    MODELS_PATH = CONFIGURATION_PATH = COUNTERS_PATH = "/about"
    CONFIGURATION_BODY = None

    def generate_body(self, request: GenerateRequest) -> bytes:
        return json.dumps({"last": int(request.token_ids[-1]), "count": request.sampling.max_tokens}).encode()

    def result_of_json(self, body: bytes) -> GenerateResult:
        tokens = tuple(json.loads(body)["echoed"])
        return GenerateResult(tokens, (0.0,) * len(tokens), "length", 0, 0, 0.0, 0.0, 0.0)

    def result_of_stream(self, body: bytes, first_s: float, decode_s: float) -> GenerateResult:
        raise EngineUnreachable("echo engines do not stream")

    def abort_body(self, request_ids: Sequence[str]) -> bytes:
        return json.dumps(list(request_ids)).encode()

    def error_of_answer(self, status: int, body: bytes) -> EngineRefused | EngineUnreachable:
        return EngineRefused(body.decode())

    def configuration_of_answer(self, body: bytes) -> Mapping[str, Any]:
        about: Mapping[str, Any] = json.loads(body)
        return about

    def info_of_answers(self, models: bytes, configuration: Mapping[str, Any]) -> EngineInfo:
        about = json.loads(models)
        return EngineInfo("echo", about["max_model_len"], about["slots"], 1, 1 << 20)

    def progress_of_answer(self, body: bytes) -> tuple[float, ...]:
        return ()

    def one_token_body(
        self,
        request_id: str,
        token_ids: Sequence[int],
        priority: int,
        kv_transfer_params: Mapping[str, Any] | None,
    ) -> bytes:
        return json.dumps({"last": int(token_ids[-1]), "count": 1}).encode()

    def transfer_of_json(self, body: bytes) -> tuple[GenerateResult, Mapping[str, Any] | None]:
        return self.result_of_json(body), None


@dataclass(frozen=True, slots=True)
class EchoOptions(EmulatedOptions):
    """An option that no other kind has."""

    times: int = 1


@dataclass(frozen=True, slots=True)
class EchoKind(EmulatedKind):
    """What it does not say itself is as in the emulated engine."""

    name: str = "echo"
    options_type: type[EngineOptions] = EchoOptions
    server_module: str = "worlds.echo_engine"

    @property
    def dialect(self) -> Dialect:
        return EchoDialect()

    def command(self, spec: EngineSpec, address: EngineAddress) -> EngineCommand:
        about = json.dumps({"slots": spec.slots, "max_model_len": spec.max_model_len})
        argv = (sys.executable, "-m", self.server_module, address.socket, about)
        return EngineCommand(argv, {"PYTHONPATH": str(Path(__file__).parent.parent)})


ECHO = EchoKind()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(sys.argv[2].encode() if self.path == "/about" else b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(
            json.dumps({"echoed": [asked["last"]] * asked["count"]}).encode() if self.path == "/echo" else b"{}"
        )

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silence."""


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


if __name__ == "__main__":
    _UnixServer(sys.argv[1], _Handler).serve_forever()
