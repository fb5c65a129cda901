"""Requests to a model service, as they run on its host: what `Context.score` and `Context.logprobs` call."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.engines.model_services.host import ModelHost
from heddle_dask.engines.model_services.spec import Input, ServiceFailed
from heddle_dask.live.wire.messages import ActionPlacement


class ServiceHandle:
    """The resident copy of the service that an action was granted; what ``async def f(…, service)`` is given."""

    def __init__(self, host: ModelHost, placement: ActionPlacement) -> None:
        self._host = host
        self._service = placement.service
        self._chunk = GpuChunk(placement.first_gpu, placement.gpus)

    @property
    def process_id(self) -> int:
        """Pid of the process that serves it, on the host of the action.

        Raises
        ------
        ServiceFailed
            The copy has died.
        """
        return self._host.resident(self._service, self._chunk).process_id

    async def score(self, inputs: Sequence[Input]) -> list[float]:
        """One number for each text or list of token ids.

        Raises
        ------
        ServiceFailed
            The copy has died: the action is tried again on another one.
        ServiceRefused
            The service does not take these inputs.
        """
        async with self._failure_told():
            return await self._host.resident(self._service, self._chunk).score(inputs)

    async def logprobs(self, token_ids: Sequence[int], start: int = 1) -> list[float]:
        """The logprob of each token from position `start` on, given all tokens before it.

        Raises
        ------
        ServiceFailed, ServiceRefused
            As `score`.
        """
        async with self._failure_told():
            return await self._host.resident(self._service, self._chunk).logprobs(token_ids, start)

    @contextlib.asynccontextmanager
    async def _failure_told(self) -> AsyncIterator[None]:
        try:
            yield
        except ServiceFailed:
            await self._host.after_failure(self._service, self._chunk)
            raise


async def score_inputs(inputs: Sequence[Input], *, service: ServiceHandle) -> list[float]:
    return await service.score(inputs)


async def token_logprobs(token_ids: Sequence[int], start: int, *, service: ServiceHandle) -> list[float]:
    return await service.logprobs(token_ids, start)
