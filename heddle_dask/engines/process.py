"""One engine as a separate process: started, supervised and ended here, the same way for every kind.

A watchdog (`watchdog.py`) ends the engine when its owner dies. Everything the engine prints goes to `engine.log` in its
directory; when a start fails, the error carries the end of that log and the line of it that names the cause.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from heddle_dask.core.errors import HeddleError
from heddle_dask.engines import watchdog
from heddle_dask.engines.address import (
    LONGEST_SOCKET_PATH_BYTES,
    EngineAddress,
    engines_directory,
    free_port,
    private_directory,
    socket_address,
)
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.compile_cache import WAIT_S, CompileTurn
from heddle_dask.engines.contract import (
    WARM_UP_REQUEST_ID,
    EngineRefused,
    EngineUnreachable,
    GenerateRequest,
    SamplingParams,
)
from heddle_dask.engines.kept_logs import kept_log
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.engines.start_phase import has_compiled, start_phase
from heddle_dask.engines.supervised_process import SupervisedProcess

_LOG_NAME = "engine"
_VLLM_SOCKET_BYTES = len("/") + 36  # a UUID
_POLL_S = 0.05
_LOG_READ_S = 0.5
_TAIL_LINES = 20
# A cause may stand far before the end of a log: other processes of the engine end after it, each with a traceback.
_CAUSE_LINES = 400
_QUOTED_LINES, _QUOTED_CHARACTERS = 3, 200
_WARM_UP_CONTEXT_TOKENS = 20
_LOG_PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)?((ERROR|CRITICAL)\s+[\d:. -]+\[[^]]*\]\s*)?")
_CAUSE = re.compile(r"^([A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b|watchdog: |error: )")
_NOT_THE_CAUSE = ("See root cause above", "Engine core initialization failed", "SystemExit")


class EngineStartError(HeddleError):
    """An engine did not start. The message is one line; `log_tail` has the last lines of its log."""

    def __init__(self, message: str, log_tail: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log_tail = log_tail

    def __reduce__(self) -> tuple[type[EngineStartError], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.log_tail)


class EngineProcess:
    """An engine that this process owns: the engine ends when `stop` is called or this process dies.

    Parameters
    ----------
    directory
        Made when absent; receives `engine.log`.
    records
        Directory of the engine's socket, and of the record by which a later start finds the processes that a dead owner
        has left behind; None: the directory of all of this user's engines. Made with mode 0700 when absent. Give every
        owner on a machine the same one: `start` ends what is stale there.
    grace_s
        Seconds between the SIGTERM and the SIGKILL of `stop`.
    on_phase
        Takes what the engine is doing whenever that changes during its start.

    Raises
    ------
    BadInput
        The engine's kind refuses the spec (not installed, no such model), or `records` is not this user's alone or too
        long a path for a socket.
    """

    def __init__(
        self,
        spec: EngineSpec,
        directory: Path,
        *,
        records: Path | None = None,
        grace_s: float = 5.0,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._kind = engine_kind(spec.kind)
        self.spec = spec = self._kind.completed(spec)
        self._kind.check(spec)
        self._directory = Path(directory)
        self._records = engines_directory() if records is None else private_directory(Path(records))
        self._mark = secrets.token_hex(8)
        self._address = (
            EngineAddress(port=free_port())
            if spec.tcp
            else socket_address(self._records, watchdog.socket_name(self._mark))
        )
        self._grace_s = grace_s
        self._on_phase = on_phase
        self._phase = ""
        self._log_read_s = 0.0
        self._supervised: SupervisedProcess | None = None

    @property
    def address(self) -> EngineAddress:
        """Where the engine listens after `start`."""
        return self._address

    @property
    def log_path(self) -> Path:
        """The file that receives everything the engine prints."""
        return self._directory / f"{_LOG_NAME}.log"

    @property
    def pid(self) -> int:
        """Pid of the engine's guard process; SIGKILL to it ends the engine. 0 before `start`."""
        return self._supervised.pid if self._supervised is not None else 0

    @property
    def engine_pid(self) -> int:
        """Pid of the engine itself; 0 when it is not running."""
        return self._supervised.program_pid if self._supervised is not None else 0

    @property
    def returncode(self) -> int | None:
        """Exit code, None while the engine runs (and before `start`)."""
        return self._supervised.returncode if self._supervised is not None else None

    async def start(self, timeout_s: float) -> EngineAddress:
        """Start the engine; returns its address once it is healthy and has run a first step.

        On failure and on cancellation every process of the engine is ended.

        Raises
        ------
        EngineStartError
            The engine ended early, or was not ready within `timeout_s`.
        """
        if self._supervised is not None:
            raise HeddleError("this engine was started before: make a new EngineProcess")
        # In a thread: on GPUs it asks nvidia-smi.
        command = await asyncio.to_thread(self._kind.command, self.spec, self._address)
        self._supervised = SupervisedProcess(
            command.argv,
            self._directory,
            _LOG_NAME,
            env={**command.env, **self._temporary()},
            records=self._records,
            mark=self._mark,
            grace_s=self._grace_s,
        )
        await self._supervised.clear_stale()
        deadline = time.monotonic() + timeout_s
        turn = CompileTurn(command.compiled_as)
        try:
            await turn.begin(min(WAIT_S, timeout_s / 2), lambda: self._tell("waiting for another engine to compile"))
            if self._phase:  # it waits no longer, and its log says nothing yet
                self._tell("starting")
            self._supervised.launch()
            async with EngineClient(self._address, self._kind.dialect, question_timeout_s=2.0) as client:
                await self._until_ready(client, deadline, timeout_s, turn)
        except BaseException:
            await self.stop(grace_s=0.0)
            raise
        finally:
            turn.end()
        return self._address

    def _tell(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self._on_phase(phase)

    def is_stopped(self) -> bool:
        """Whether one of its processes is stopped (SIGSTOP)."""
        return self._supervised is not None and self._supervised.is_stopped()

    async def wait(self) -> int:
        """Wait for the engine's end; returns its exit code (128 + n when signal n ended it)."""
        assert self._supervised is not None, "start the engine first"
        return await self._supervised.wait()

    async def stop(self, grace_s: float | None = None) -> None:
        """End the engine: SIGTERM, then SIGKILL of everything it started. Does nothing when it has ended."""
        if self._supervised is not None:
            await self._supervised.stop(grace_s)

    def log_tail(self, lines: int = _TAIL_LINES) -> tuple[str, ...]:
        """The last lines that the engine printed since its start."""
        return self._supervised.log_tail(lines) if self._supervised is not None else ()

    def last_words(self) -> str:
        """The cause that the engine's log names, the log's path and its last lines, in one line of bounded length."""
        cause = _named_cause(self.log_tail(_CAUSE_LINES))
        said = " | ".join(line.strip()[:_QUOTED_CHARACTERS] for line in self.log_tail(_QUOTED_LINES))
        quoted = f"; its last lines: {said}" if said else ", which is empty"
        return (f": {cause}" if cause else "") + f" (log: {self.log_path}{quoted})"

    # ------------------------------------------------------------------ inside

    def _temporary(self) -> dict[str, str]:
        """Where it has its temporary files, and vLLM its sockets; what PyTorch has compiled stays for the next one."""
        path = self._records / watchdog.temporary_name(self._mark)
        if len(os.fsencode(path)) + _VLLM_SOCKET_BYTES > LONGEST_SOCKET_PATH_BYTES:
            return {}
        private_directory(path)
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(engines_directory() / "torchinductor")
        return {"TMPDIR": str(path), "VLLM_RPC_BASE_PATH": str(path), "TORCHINDUCTOR_CACHE_DIR": compiled}

    def _look_into_log(self, turn: CompileTurn) -> None:
        if time.monotonic() - self._log_read_s < _LOG_READ_S:
            return
        self._log_read_s = time.monotonic()
        self._tell(start_phase(self.log_tail(_CAUSE_LINES), before="starting" if not self._phase else self._phase))
        if has_compiled(self._phase):
            turn.compiled()

    async def _until_ready(self, client: EngineClient, deadline: float, timeout_s: float, turn: CompileTurn) -> None:
        while not await client.healthy():
            self._raise_if_ended()
            self._look_into_log(turn)
            if time.monotonic() >= deadline:
                raise self._start_error(f"did not answer within {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)
        turn.compiled()
        # The first step of a process compiles and allocates, which takes seconds; no trajectory should wait for that.
        longest = self.spec.max_model_len or _WARM_UP_CONTEXT_TOKENS
        sampling = SamplingParams(max_tokens=min(4, longest - 1), ignore_eos=True)
        room = max(1, min(_WARM_UP_CONTEXT_TOKENS - 4, longest - sampling.max_tokens))
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
            if self._supervised is not None:
                await self._supervised.ended_within(1.0)
            self._raise_if_ended()
            raise self._start_error(f"failed its first step: {error}") from error
        finally:
            step.cancel()

    def _raise_if_ended(self) -> None:
        code = self.returncode
        if code is not None:
            raise self._start_error(f"ended during start-up (exit code {code})")

    def _start_error(self, what: str) -> EngineStartError:
        tail = self.log_tail()
        cause = likely_cause(self.log_tail(_CAUSE_LINES))
        message = f"{self.spec.kind} engine for {self.spec.model} {what}"
        message += f": {cause}" if cause else ""
        return EngineStartError(f"{message} (log: {kept_log(self.log_path, self._mark)})", tail)


def likely_cause(lines: tuple[str, ...]) -> str:
    """The line of an engine's log that names the cause of its end; the last line when no line does."""
    return _named_cause(lines) or (_LOG_PREFIX.sub("", lines[-1], count=1).strip()[:300] if lines else "")


def _named_cause(lines: tuple[str, ...]) -> str:
    texts = [_LOG_PREFIX.sub("", line, count=1) for line in lines]
    for index in range(len(texts) - 1, -1, -1):
        text = texts[index].strip()
        if _CAUSE.match(text) and not any(phrase in text for phrase in _NOT_THE_CAUSE):
            # Pydantic names the error only in the next line.
            if "validation error" in text and index + 1 < len(texts):
                text = texts[index + 1].strip()
            return text[:300]
    return ""
