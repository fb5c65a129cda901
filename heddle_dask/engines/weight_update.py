"""The client's side of a change of weights: pause, drop the KV, load, label, resume.

An engine is never left paused, and never resumed with weights of which only a part may be loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines.contract import EngineRefused, EngineUnreachable, WeightInstallation, WeightUpdateFailed
from heddle_dask.engines.dialect import Dialect, WeightDialect, WeightTransferDialect

# A pause waits for the iteration in progress, which a long prefill makes long; and vLLM's waits until KV that was
# exported is fetched, or its lease (`KV_LEASE_S`) has ended. Nothing is generated meanwhile: so it is given up in time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 30.0
_PATIENCE_S = 90.0
_FIRST_GAP_S, _LONGEST_GAP_S = 0.1, 2.0
# An engine that is not heard of when it is to resume is started again: where all cores are busy, waiting costs less.
_ANSWER_S = 60.0


# A path, a body and seconds to wait, as of `EngineConnection.ask`.
Ask = Callable[..., Awaitable[bytes]]


class WeightUpdateClient:
    """Changes of weights of one engine, one at a time; see `EngineClient.install_weights` for the promises."""

    def __init__(self, ask: Ask, dialect: Dialect) -> None:
        self._ask = ask
        self._dialect = dialect
        self._one = asyncio.Lock()
        self.version = PolicyVersion()
        self.keeps_kv = False

    @property
    def is_updating(self) -> bool:
        return self._one.locked()

    async def label(self, version: PolicyVersion) -> None:
        body = self._known().label_body(str(version))
        await self._ask(self._known().LABEL_PATH, body, _ANSWER_S)
        self.version = version

    async def install(
        self, directory: str | None, version: PolicyVersion, *, keep_kv: bool, load_timeout_s: float
    ) -> WeightInstallation:
        dialect = self._known()
        loads = self._loads(directory, version)
        async with self._one:
            began_s, attempts = await self._paused(dialect, keep_kv)
            load_began_s = time.monotonic()
            try:
                for path, body in loads:
                    await self._ask(path, body, load_timeout_s)
                load_s = time.monotonic() - load_began_s
                await self.label(version)
                await self._ask(dialect.RESUME_PATH, timeout_s=_ANSWER_S)
            except (EngineUnreachable, EngineRefused) as error:
                raise WeightUpdateFailed(f"weights {version} were not loaded: {error}", True) from error
            self.keeps_kv = keep_kv
            return WeightInstallation(time.monotonic() - began_s, load_s, attempts)

    def _loads(self, directory: str | None, version: PolicyVersion) -> Sequence[tuple[str, bytes]]:
        """Paths and bodies of the requests that load a directory, or what was received."""
        dialect = self._known()
        if directory is not None:
            return [(dialect.LOAD_WEIGHTS_PATH, dialect.load_weights_body(directory))]
        if not isinstance(dialect, WeightTransferDialect):
            raise WeightUpdateFailed("engines of this kind do not receive weights", False)
        return dialect.load_received_requests(str(version))

    async def _paused(self, dialect: WeightDialect, keep_kv: bool) -> tuple[float, int]:
        """Pause the engine with its KV dropped; returns when that began, and the attempts that it took."""
        give_up_s = time.monotonic() + _PATIENCE_S
        gap_s, pause_s, attempts = _FIRST_GAP_S, _FIRST_PAUSE_S, 0
        while True:
            attempts += 1
            began_s = time.monotonic()
            cause = await self._pause_once(dialect, keep_kv, pause_s)
            if not cause:
                return began_s, attempts
            if time.monotonic() >= give_up_s:
                raise WeightUpdateFailed(f"the engine was not paused with its KV dropped: {cause}", False)
            await asyncio.sleep(gap_s)
            gap_s, pause_s = min(2 * gap_s, _LONGEST_GAP_S), min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _pause_once(self, dialect: WeightDialect, keep_kv: bool, pause_s: float) -> str:
        """Pause the engine and drop its KV; otherwise why that failed, and the engine goes on."""
        try:
            await self._ask(dialect.PAUSE_PATH, timeout_s=pause_s)
            if keep_kv or dialect.kv_was_dropped(await self._ask(dialect.DROP_KV_PATH)):
                return ""
            cause = "some of it is in use"
        except (EngineUnreachable, EngineRefused) as error:
            # vLLM answers with an error where requests wait for KV of another engine.
            cause = str(error)
        try:
            await self._ask(dialect.RESUME_PATH, timeout_s=_ANSWER_S)
        except (EngineUnreachable, EngineRefused) as error:
            raise WeightUpdateFailed(f"the engine was not resumed: {error}", True) from error
        return cause

    def _known(self) -> WeightDialect:
        if not isinstance(self._dialect, WeightDialect):
            raise WeightUpdateFailed("engines of this kind do not change their weights", False)
        return self._dialect
