"""One engine as a process of its own: started, watched and ended here, the same for every kind.

The process hangs on a leash (`leash.py`), so that it cannot outlive its owner. Everything the engine
prints goes to `engine.log` in its directory; when a start fails, the error carries the end of that log
and the one line of it that names the cause.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import time
from pathlib import Path

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import (
    WARM_UP_REQUEST_ID,
    EngineRefused,
    EngineUnreachable,
    GenerateRequest,
    SamplingParams,
)
from heddle_dask.engines.emulated.traits import traits_of
from heddle_dask.engines.leashed import LeashedProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import (
    EngineCommand,
    check_kv_transfer,
    check_model,
    installed_vllm_build,
    vllm_command,
)

_LOG_NAME = "engine"
_POLL_S = 0.05
_TAIL_LINES = 20
_LOG_PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)?((ERROR|CRITICAL)\s+[\d:. -]+\[[^]]*\]\s*)?")
_CAUSE = re.compile(r"^([A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b|leash: |error: )")
_NOT_THE_CAUSE = ("See root cause above", "Engine core initialization failed", "SystemExit")


class EngineStartError(HeddleError):
    """An engine did not come up. The message is one line; `log_tail` has the last lines of its log."""

    def __init__(self, message: str, log_tail: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log_tail = log_tail

    def __reduce__(self) -> tuple[type[EngineStartError], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.log_tail)


class EngineProcess:
    """An engine that this process owns: it ends when `stop` is called or this process dies.

    Parameters
    ----------
    directory
        Made when absent; gets `engine.log` and, unless `records` names another place, the record by
        which a later start finds what an owner that died has left behind. Give every owner on a
        machine the same `records`, and call `start` there: it clears away what is stale.
    port
        None: a free loopback port.
    grace_s
        Time that `stop` leaves the engine to end by itself.

    Raises
    ------
    BadInput
        No vLLM is installed, the model is none, or the port is in use.
    """

    def __init__(
        self,
        spec: EngineSpec,
        directory: Path,
        port: int | None = None,
        *,
        records: Path | None = None,
        grace_s: float = 5.0,
    ) -> None:
        self.spec = spec
        if port is not None:
            _check_port(port)
        self._port = port if port is not None else 0
        if spec.kind == "vllm":
            check_model(spec.model)
            self._build = installed_vllm_build()
            if spec.kv_transfer:
                check_kv_transfer()
        else:
            traits_of(spec)
        self._directory = Path(directory)
        self._records = Path(records) if records is not None else self._directory
        self._grace_s = grace_s
        self._leashed: LeashedProcess | None = None

    @property
    def base_url(self) -> str:
        """Where the engine listens, once `start` was called."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        """The engine's port, once `start` was called."""
        return self._port

    @property
    def log_path(self) -> Path:
        """Where everything that the engine prints goes."""
        return self._directory / f"{_LOG_NAME}.log"

    @property
    def pid(self) -> int:
        """Pid of the guard in front of the engine; SIGKILL to it ends the engine. 0 before `start`."""
        return self._leashed.pid if self._leashed is not None else 0

    @property
    def engine_pid(self) -> int:
        """Pid of the engine itself; 0 when it is not running."""
        return self._leashed.program_pid if self._leashed is not None else 0

    @property
    def returncode(self) -> int | None:
        """Exit code, None while the engine runs (and before `start`)."""
        return self._leashed.returncode if self._leashed is not None else None

    async def start(self, timeout_s: float) -> str:
        """Start the engine; returns its base URL once it is healthy and has run a first step.

        On failure (and on cancellation) nothing of it is left running.

        Raises
        ------
        EngineStartError
            It ended early, or was not ready within `timeout_s`.
        """
        if self._leashed is not None:
            raise HeddleError("this engine was started before: make a new EngineProcess")
        if not self._port:
            self._port = free_port()
        command = self._command()
        self._leashed = LeashedProcess(
            command.argv,
            self._directory,
            _LOG_NAME,
            env=command.env,
            records=self._records,
            grace_s=self._grace_s,
        )
        await self._leashed.clear_stale()
        self._leashed.launch()
        deadline = time.monotonic() + timeout_s
        try:
            async with EngineClient(self.base_url, question_timeout_s=2.0) as client:
                await self._until_ready(client, deadline, timeout_s)
            if self.spec.kv_transfer:
                await self._until_described(deadline, timeout_s)
        except BaseException:
            await self.stop(grace_s=0.0)
            raise
        return self.base_url

    async def wait(self) -> int:
        """Wait for the engine's end; returns its exit code (128 + n when signal n ended it)."""
        assert self._leashed is not None, "start the engine first"
        return await self._leashed.wait()

    async def stop(self, grace_s: float | None = None) -> None:
        """End the engine: SIGTERM, then SIGKILL of everything it started. Harmless when it is gone."""
        if self._leashed is not None:
            await self._leashed.stop(grace_s)

    def log_tail(self, lines: int = _TAIL_LINES) -> tuple[str, ...]:
        """The last lines that the engine printed since its start."""
        return self._leashed.log_tail(lines) if self._leashed is not None else ()

    # ------------------------------------------------------------------ inside

    def _command(self) -> EngineCommand:
        if self.spec.kind == "vllm":
            side_channel_port = free_port() if self.spec.kv_transfer else None
            return vllm_command(self.spec, self._port, self._build, side_channel_port)
        spec_json = json.dumps(self.spec.to_mapping())
        argv = (sys.executable, "-m", "heddle_dask.engines.emulated")
        return EngineCommand((*argv, "--port", str(self._port), "--spec", spec_json), {})

    async def _until_ready(self, client: EngineClient, deadline: float, timeout_s: float) -> None:
        while not await client.healthy():
            self._raise_if_ended()
            if time.monotonic() >= deadline:
                raise self._start_error(f"did not answer within {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)
        # The first step of a process compiles and allocates: seconds that no trajectory should pay.
        sampling = SamplingParams(max_tokens=min(4, self.spec.max_model_len - 1), ignore_eos=True)
        room = max(1, min(16, self.spec.max_model_len - sampling.max_tokens))
        request = GenerateRequest(WARM_UP_REQUEST_ID, [1] * room, sampling)
        step = asyncio.ensure_future(client.generate(request))
        try:
            while not step.done():
                await asyncio.wait((step,), timeout=0.2)
                if not step.done():
                    self._raise_if_ended()
                    if time.monotonic() >= deadline:
                        message = f"is healthy but ran no step within {timeout_s:g} s"
                        raise self._start_error(message)
            await step
        except (EngineUnreachable, EngineRefused) as error:
            if self._leashed is not None:
                await self._leashed.ended_within(1.0)
            self._raise_if_ended()
            raise self._start_error(f"failed its first step: {error}") from error
        finally:
            step.cancel()

    async def _until_described(self, deadline: float, timeout_s: float) -> None:
        # vLLM inspects the whole machine before it answers this for the first time: 10 s that no transfer should pay.
        left_s = max(1.0, deadline - time.monotonic())
        try:
            async with EngineClient(self.base_url, question_timeout_s=left_s) as client:
                await client.configuration()
        except (EngineUnreachable, EngineRefused) as error:
            self._raise_if_ended()
            raise self._start_error(f"did not describe itself within {timeout_s:g} s: {error}") from error

    def _raise_if_ended(self) -> None:
        code = self.returncode
        if code is not None:
            raise self._start_error(f"ended during start-up (exit code {code})")

    def _start_error(self, what: str) -> EngineStartError:
        tail = self.log_tail()
        cause = likely_cause(self.log_tail(400))
        message = f"{self.spec.kind} engine for {self.spec.model} {what}"
        message += f": {cause}" if cause else ""
        return EngineStartError(f"{message} (log: {self.log_path})", tail)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def likely_cause(lines: tuple[str, ...]) -> str:
    """The line of an engine's log that names why it ended; the last line where none stands out."""
    texts = [_LOG_PREFIX.sub("", line, count=1) for line in lines]
    for index in range(len(texts) - 1, -1, -1):
        text = texts[index].strip()
        if _CAUSE.match(text) and not any(phrase in text for phrase in _NOT_THE_CAUSE):
            # Pydantic says what is wrong only in the line below.
            if "validation error" in text and index + 1 < len(texts):
                text = texts[index + 1].strip()
            return text[:300]
    return texts[-1].strip()[:300] if texts else ""


def _check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise BadInput(f"port {port} is none: use 1 to 65535")
    with socket.socket() as probe:
        # As servers do: a port whose last connections are just closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise BadInput(
                f"port {port} is in use or not allowed ({error.strerror}): choose another"
            ) from error
