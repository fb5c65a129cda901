"""Requests to model services: their arguments, checked before anything is sent, and the actions that they are."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from heddle_dask.core.errors import BadInput
from heddle_dask.core.needs import Given, Needs
from heddle_dask.engines.model_services.spec import Answers, Input, ServiceSpec
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.worker.service_requests import score_inputs, token_logprobs


class CallsFunctions(Protocol):
    """`Context.call`, of a program or of a reward."""

    async def __call__(
        self, function: Callable[..., Any], *args: Any, needs: Needs, label: str, timeout_s: float | None
    ) -> Any: ...


async def score(
    call: CallsFunctions,
    pools: Pools,
    service: str,
    inputs: Any,
    *,
    gpus: Given,
    timeout_s: float | None,
) -> list[float]:
    """One number for each input.

    Raises
    ------
    ActionFailed
    BadInput
        The service is not declared, does not score, or an input is neither a text nor token ids.
    """
    scores: list[float] = await call(
        score_inputs,
        checked_inputs(pools.service(service), inputs),
        needs=Needs(gpus=gpus, service=service),
        label=f"score:{service}",
        timeout_s=timeout_s,
    )
    return scores


async def logprobs(
    call: CallsFunctions,
    pools: Pools,
    service: str,
    token_ids: Any,
    *,
    start: int,
    gpus: Given,
    timeout_s: float | None,
) -> list[float]:
    """The logprob of each token from `start` on.

    Raises
    ------
    ActionFailed
    BadInput
        The service is not declared, gives no logprobs, or `start` is no position of a token after the first.
    """
    of_tokens: list[float] = await call(
        token_logprobs,
        checked_tokens(pools.service(service), token_ids, start),
        start,
        needs=Needs(gpus=gpus, service=service),
        label=f"logprobs:{service}",
        timeout_s=timeout_s,
    )
    return of_tokens


def checked_inputs(service: ServiceSpec, inputs: Any) -> list[Input]:
    """The inputs of a request for scores: texts and lists of token ids.

    Raises
    ------
    BadInput
        There is none, one is neither, or the service does not score.
    """
    _check_answers(service, "score")
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Sequence) or not inputs:
        raise BadInput(f"score: inputs is {_short(inputs)}: use a list of texts or of lists of token ids")
    return [each if isinstance(each, str) else _ids("score: an input", each) for each in inputs]


def checked_tokens(service: ServiceSpec, token_ids: Any, start: object) -> list[int]:
    """The tokens of a request for logprobs.

    Raises
    ------
    BadInput
        They are no token ids, `start` is not the position of one after the first, or the service gives no logprobs.
    """
    _check_answers(service, "logprobs")
    ids = _ids("logprobs: token_ids", token_ids)
    if type(start) is not int or not 1 <= start < len(ids):
        raise BadInput(f"logprobs: start is {start!r}: use 1 to {len(ids) - 1}, the position of a token")
    return ids


def _ids(what: str, given: Any) -> list[int]:
    if isinstance(given, np.ndarray) and given.ndim == 1:
        given = given.tolist()
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes) and len(given) > 0
    if listed and all(isinstance(each, numbers.Integral) and not isinstance(each, bool) for each in given):
        return [int(each) for each in given]
    raise BadInput(f"{what} is {_short(given)}: use a text or a list of token ids")


def _check_answers(service: ServiceSpec, asked: Answers) -> None:
    if asked not in service.answers:
        other = "logprobs" if asked == "score" else "score"
        raise BadInput(f"{asked}: service {service.name} has a model for {other}: use ctx.{other}(…)")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
