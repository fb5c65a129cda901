"""Requests to a model service, as they run on its host: what `Context.score` and `Context.logprobs` call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heddle_dask.engines.model_services.spec import Input, ModelServer, Reply


@dataclass(frozen=True, slots=True)
class ServiceHandle:
    """The resident copy of the service that an action was granted; what ``async def f(…, service)`` is given.

    Attributes
    ----------
    process_id
        Pid of the process that serves it, on the host of the action.
    """

    server: ModelServer
    process_id: int

    async def score(self, inputs: Sequence[Input]) -> list[float]:
        """One number for each text or list of token ids.

        Raises
        ------
        ServiceFailed
            The copy has died: an action that ends by this is tried again on another one.
        ServiceRefused
            The service does not take these inputs.
        """
        return await self.server.score(inputs)

    async def logprobs(self, token_ids: Sequence[int], start: int = 1) -> list[float]:
        """The logprob of each token from position `start` on, given all tokens before it.

        Raises
        ------
        ServiceFailed, ServiceRefused
            As `score`.
        """
        return await self.server.logprobs(token_ids, start)

    async def judge(self, messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float) -> Reply:
        """The reply of its language model to a chat.

        Raises
        ------
        ServiceFailed, ServiceRefused
            As `score`.
        """
        return await self.server.judge(messages, max_tokens, temperature)


async def score_inputs(inputs: Sequence[Input], *, service: ServiceHandle) -> list[float]:
    return await service.score(inputs)


async def token_logprobs(token_ids: Sequence[int], start: int, *, service: ServiceHandle) -> list[float]:
    return await service.logprobs(token_ids, start)


async def judge_reply(
    messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float, *, service: ServiceHandle
) -> Reply:
    return await service.judge(messages, max_tokens, temperature)
