"""Requests to model services: their arguments, checked before anything is sent, and the actions that they are."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from heddle_dask.apis.remote_model import RemoteModel, ask_remote
from heddle_dask.core.errors import BadInput, encodable_text
from heddle_dask.core.needs import Needs
from heddle_dask.engines.model_services.spec import Answers, Input
from heddle_dask.environments.actions import FunctionCall, ServiceCall
from heddle_dask.live.driver.inputs.pools import Pools, Service
from heddle_dask.live.worker.service_requests import judge_reply, score_inputs, token_logprobs


def service_call(asked: ServiceCall, pools: Pools, own_tokens: Any) -> FunctionCall:
    """The action that asks a model service.

    Parameters
    ----------
    own_tokens
        Those of the context, where the request names none.

    Raises
    ------
    BadInput
        The service is not declared, does not answer that, or the inputs are not what it answers to.
    """
    service = pools.service(asked.service)
    function: Any
    args: tuple[Any, ...]
    needs = Needs(gpus=asked.gpus, service=asked.service)
    if asked.asked == "judge":
        _check_answers(service, "judge")
        function, args = judge_reply, (asked.inputs, asked.max_tokens, asked.temperature)
        if isinstance(service, RemoteModel):
            function, args = ask_remote, (service, *args)
            needs = service.needs(asked.inputs, asked.max_tokens)
    elif asked.asked == "score":
        own = None if own_tokens is None else [own_tokens]
        function, args = (
            score_inputs,
            (checked_inputs(service, own if asked.inputs is None else asked.inputs),),
        )
    else:
        tokens = checked_tokens(service, own_tokens if asked.inputs is None else asked.inputs, asked.start)
        function, args = token_logprobs, (tokens, asked.start)
    label = f"{asked.asked}:{asked.service}"
    return FunctionCall(function, args, needs=needs, kind=asked.kind, label=label, timeout_s=asked.timeout_s)


def checked_inputs(service: Service, inputs: Any) -> list[Input]:
    """The inputs of a request for scores: texts and lists of token ids.

    Raises
    ------
    BadInput
        There is none, one is neither, or the service does not score.
    """
    _check_answers(service, "score")
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Sequence) or not inputs:
        raise BadInput(f"score: inputs is {_short(inputs)}: use a list of texts or of lists of token ids")
    return [encodable_text(each) if isinstance(each, str) else _ids("score: an input", each) for each in inputs]


def checked_tokens(service: Service, token_ids: Any, start: object) -> list[int]:
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


def _check_answers(service: Service, asked: Answers) -> None:
    if asked not in service.answers:
        others = [each for each in get_args(Answers) if each in service.answers]
        use = " or ".join(f"ctx.{each}(…)" for each in others)
        raise BadInput(f"{asked}: service {service.name} has a model for {' and '.join(others)}: use {use}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
