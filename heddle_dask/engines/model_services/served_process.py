"""The process of a model service or a trainer: started when it is first needed, and found dead when it has died."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from heddle_dask.engines import watchdog
from heddle_dask.engines.address import EngineAddress, socket_address
from heddle_dask.engines.model_services.backend import ServiceFailed
from heddle_dask.engines.model_services.service_client import ServiceClient
from heddle_dask.engines.private_directory import engines_directory, private_directory
from heddle_dask.engines.process import likely_cause
from heddle_dask.engines.supervised_process import SupervisedProcess

_POLL_S = 0.05


class ServedProcess:
    """One process that serves one model, from its launch to its end; it is never started twice.

    Parameters
    ----------
    name
        For messages and its log.
    directory
        Receives its log.
    records
        Directory of its socket and of the record of its processes; None: that of all of this user's engines.
    """

    def __init__(
        self, name: str, directory: Path, records: Path | None = None, *, noun: str = "service"
    ) -> None:
        self.name = name
        self._noun = noun
        self._directory = directory
        self._records = engines_directory() if records is None else private_directory(records)
        self._mark = secrets.token_hex(8)
        self.address: EngineAddress = socket_address(self._records, watchdog.socket_name(self._mark))
        self.client = ServiceClient(name, self.address, noun)
        self._supervised: SupervisedProcess | None = None

    @property
    def process_id(self) -> int:
        """Pid of the program; 0 when it does not run."""
        return 0 if self._supervised is None else self._supervised.program_pid

    @property
    def runs(self) -> bool:
        """Whether it was launched and has not ended."""
        return self._supervised is not None and self._supervised.returncode is None

    @property
    def returncode(self) -> int | None:
        """Exit code; None before its end."""
        return None if self._supervised is None else self._supervised.returncode

    @property
    def last_line(self) -> str:
        """The last line of its log."""
        tail = () if self._supervised is None else self._supervised.log_tail(1)
        return tail[-1] if tail else ""

    async def start(self, argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> None:
        """Launch it, and wait until it answers.

        Raises
        ------
        ServiceFailed
            It ended, or does not answer in time; the message names the cause that its log gives.
        """
        self._supervised = SupervisedProcess(
            argv,
            self._directory,
            f"{self._noun}-{self.name}",
            env=env,
            records=self._records,
            mark=self._mark,
        )
        await self._supervised.clear_stale()
        self._supervised.launch()
        deadline = time.monotonic() + timeout_s
        while not await self.client.healthy():
            if self._supervised.returncode is not None:
                raise ServiceFailed(f"{self._noun} {self.name} ended while it started{self._said()}")
            if time.monotonic() >= deadline:
                raise ServiceFailed(
                    f"{self._noun} {self.name} did not answer within {timeout_s:g} s{self._said()}"
                )
            await asyncio.sleep(_POLL_S)

    async def ended(self) -> str:
        """Wait for its end; returns the cause in one line."""
        assert self._supervised is not None
        code = await self._supervised.wait()
        return f"the process of {self._noun} {self.name} ended (exit code {code}){self._said()}"

    def _said(self) -> str:
        assert self._supervised is not None
        cause = likely_cause(self._supervised.log_tail(200))
        return f": {cause} (log: {self._supervised.log_path})" if cause else ""

    async def stop(self) -> None:
        """End it."""
        await self.client.close()
        if self._supervised is not None:
            await self._supervised.stop()
