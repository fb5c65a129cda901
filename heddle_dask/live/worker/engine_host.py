"""Keeps one engine process alive beside a Dask worker: start, watch, restart with back-off, stop.

Knows nothing of Dask: it calls three callbacks, in order, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import EngineInfo
from heddle_dask.engines.gpus import named_gpus
from heddle_dask.engines.health import USUAL, HealthLimits, Tell, until_silent
from heddle_dask.engines.node_weights import NodeWeights
from heddle_dask.engines.process import EngineProcess, EngineStartError
from heddle_dask.engines.progress import ProgressWatch
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.engines.weight_staging import StagedWeights, stage_weights

_LOG = logging.getLogger(__name__)
# The end of a process is noticed this late at most, after its connections have broken.
EXIT_NOTICED_S = 1.0
_LEAST_ANSWER_S = 10.0  # an engine that became ready in the last moment has this long to describe itself


@dataclass(frozen=True, slots=True)
class Watch:
    """Time limits of the host."""

    start_timeout_s: float = 600.0  # longest wait for the first healthy answer
    health: HealthLimits = USUAL  # an engine that is silent is killed and started again
    # `stall_s`, `canary_s`: an engine that has steps in flight and generates no token for `stall_s`, and then answers
    # no one-token request within `canary_s`, is killed and started again. The longest known pause of a working engine
    # is an import of KV of 30 s (docs/engines.md).
    stall_s: float = 60.0
    canary_s: float = 30.0
    # `backoff_s`, `max_backoff_s`: pause before a restart: doubles with each failure in a row, up to the maximum.
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0

    @classmethod
    def for_start(cls, patience_s: float) -> Watch:
        """The usual limits, with a start that may take as long as its driver waits."""
        usual = cls()
        return replace(usual, start_timeout_s=max(usual.start_timeout_s, patience_s))


class EngineHost:
    def __init__(
        self,
        spec: EngineSpec,
        directory: Path,
        *,
        # Called with a client and the engine's description when a new incarnation answers.
        on_ready: Callable[[EngineClient, EngineInfo], None],
        on_lost: Callable[[str], None],  # called with a reason when an incarnation that was ready is gone
        # Called with one line when a start failed; the host tries again after its back-off.
        on_start_failed: Callable[[str], None],
        on_phase: Callable[[str], None] = lambda phase: None,  # called with what an engine that starts is doing
        on_silence: Tell = lambda line: None,  # called when one that was ready is silent for a while
        name: Callable[[], str] = lambda: "the engine",  # what it is called then
        records: Path | None = None,  # see `EngineProcess`
        watch: Watch | None = None,
        # Directory on the node's own disk: the engine loads its model from a copy there. None: from the model's path.
        weights: Path | None = None,
    ) -> None:
        self.spec = spec
        self.watch = watch or Watch()
        self._weights = weights
        self._directory = directory
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_start_failed = on_start_failed
        self._on_phase = on_phase
        self._on_silence = on_silence
        self._name = name
        self._records = records
        self._task: asyncio.Task[None] | None = None
        self._process: EngineProcess | None = None
        self._is_ready = False
        self._condemned: asyncio.Future[str] | None = None
        self.start_s = 0.0  # seconds that the latest start took, until the engine answered
        # The weights that the engine went over to: from the next start on it begins with them. None: with its model's.
        self.installed: NodeWeights | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine's leader while there is one."""
        return self._process.pid if self._process is not None else None

    def end_incarnation(self, reason: str) -> None:
        """End the engine that runs now, and start it again; a second call, or one without an engine, does nothing."""
        if self._condemned is not None and not self._condemned.done():
            self._condemned.set_result(reason)

    def start(self) -> None:
        """Begin supervising in the background; returns at once."""
        self._task = asyncio.create_task(self._supervise(), name=f"engine-{self.spec.kind}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _supervise(self) -> None:
        failures = 0
        incarnation = 0
        while True:
            incarnation += 1
            self._is_ready = False
            try:
                await self._one_incarnation(self._directory / f"engine-{incarnation}")
            except Exception:
                _LOG.exception("an engine's supervision failed; the engine is started again")
            failures = 0 if self._is_ready else failures + 1
            await asyncio.sleep(min(self.watch.max_backoff_s, self.watch.backoff_s * 2 ** min(failures, 10)))

    async def _one_incarnation(self, directory: Path) -> None:
        """Run one engine process to its end, and tell why it ended before its last processes are gone."""
        process: EngineProcess | None = None
        staged: StagedWeights | None = None
        try:
            try:
                installed = self.installed
                staged = await self._staged() if installed is None else None
                model = str(installed.path) if installed is not None else staged.path if staged else self.spec.model
                spec = replace(self.spec, model=model)
                # In a thread: on GPUs the check of the spec asks nvidia-smi.
                process = await asyncio.to_thread(
                    EngineProcess, spec, directory, records=self._records, on_phase=self._on_phase
                )
                self._process = process
                reason = await self._live_once(process, installed)
            except (BadInput, EngineStartError) as error:
                reason = str(error)
            except Exception as error:
                # Unforeseen: without a word and a new start the engine would be lost for good.
                _LOG.exception("an engine's supervision failed; the engine is started again")
                reason = f"{type(error).__name__}: {error}".replace("\n", " ")
            (self._on_lost if self._is_ready else self._on_start_failed)(reason)
        finally:
            try:
                if process is not None:
                    await self._ended(process)
            finally:
                if staged is not None:
                    staged.release()
            self._process = None

    async def _staged(self) -> StagedWeights | None:
        """The node's copy of the weights. The time limit of a start does not run: another job may be copying."""
        if self._weights is None:
            return None
        stop = threading.Event()
        try:
            return await asyncio.to_thread(stage_weights, self.spec.model, self._weights, stop)
        except asyncio.CancelledError:
            stop.set()  # a thread cannot be cancelled
            raise

    async def _ended(self, process: EngineProcess) -> None:
        """End the engine, and wait for that also when the supervision is cancelled meanwhile."""
        stopping = asyncio.ensure_future(process.stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping
            raise

    async def _live_once(self, process: EngineProcess, installed: NodeWeights | None) -> str:
        """Run one incarnation to its end; returns why it ended."""
        began_s = time.monotonic()
        address = await process.start(self.watch.start_timeout_s)
        self.start_s = time.monotonic() - began_s
        dialect = engine_kind(self.spec.kind).dialect
        # The limit of a start holds for its first answer too: on a busy machine that takes longer than later ones may.
        left_s = max(_LEAST_ANSWER_S, self.watch.start_timeout_s - self.start_s)
        client = EngineClient(address, dialect)
        try:
            info = await client.describe(left_s)
            if installed is not None:
                await client.label_weights(installed.version)
            self._condemned = asyncio.get_running_loop().create_future()
            self._is_ready = True
            self._on_ready(client, info)
            return await self._watch_until_lost(process, client)
        finally:
            self._condemned = None
            await client.close()

    async def _watch_until_lost(self, process: EngineProcess, client: EngineClient) -> str:
        condemned = self._condemned
        assert condemned is not None
        exited = asyncio.ensure_future(process.wait())
        progress = ProgressWatch(client, stall_s=self.watch.stall_s, canary_s=self.watch.canary_s)
        stuck = asyncio.ensure_future(progress.until_stuck())
        silence = until_silent(self._name(), client.healthy, process.is_stopped, self.watch.health, self._on_silence)
        silent = asyncio.ensure_future(silence)
        watches: list[asyncio.Future[Any]] = [exited, stuck, silent]
        try:
            await asyncio.wait([condemned, *watches], return_when=asyncio.FIRST_COMPLETED)
            if condemned.done():
                return condemned.result()
            # A request also fails because the process has just ended, which says more.
            await asyncio.wait([exited], timeout=EXIT_NOTICED_S)
            if exited.done():
                return f"its process ended with {_exit(exited.result())}{process.last_words()}"
            return (stuck if stuck.done() else silent).result() + process.last_words()
        finally:
            for each in watches:
                each.cancel()


def _exit(code: int) -> str:
    """An exit code in words; one above 128 stands for the signal that ended the process."""
    with contextlib.suppress(ValueError):
        if code > 128:
            return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


def visible_gpus(spec: EngineSpec, environ: Mapping[str, str]) -> Sequence[str]:
    """The GPUs that a rollout worker tells the scheduler of: those that this process sees, by name.

    None where it does not name them, or where the engine uses none.
    """
    if not engine_kind(spec.kind).uses_gpus():
        return []
    return list(named_gpus(environ) or ())
