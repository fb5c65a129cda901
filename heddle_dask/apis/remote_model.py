"""A model behind an endpoint in OpenAI's form, asked as a model service: each request is an action under a quota."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from heddle_dask.apis.http_calls import HttpRefused, http_call
from heddle_dask.core.errors import BadInput, check_seconds, is_finite
from heddle_dask.core.needs import Needs
from heddle_dask.environments.api_errors import Retry
from heddle_dask.isolation.granted import report_use

_TOKENS_OF_MESSAGE = 16
_BYTES_OF_TOKEN = 2


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model service that others run: any endpoint with ``/chat/completions``, such as a vLLM server or a vendor's.

    Its quota is the `ApiQuota` of the same name among `Pools.quotas`; without one it has no limit, but back-off,
    pauses and a circuit breaker. A request declares half of its prompt's bytes and the longest reply as tokens, and
    the replies say what was used.

    Attributes
    ----------
    name
        As programs name it: ``ctx.judge("judge", …)``.
    url
        Where the paths of OpenAI's form begin, such as ``https://api.example/v1``.
    model
        As the endpoint names it.
    key_variable
        Environment variable of the tool workers that has the key; empty: none is sent. The key itself is in no message,
        journal or log.
    prompt_price, reply_price
        Cost of a million tokens, for windows of the quota in cost.
    call_timeout_s
        Seconds of one HTTP call.
    """

    name: str
    url: str
    model: str
    key_variable: str = ""
    prompt_price: float = 0.0
    reply_price: float = 0.0
    call_timeout_s: float = 120.0

    answers = frozenset({"judge"})

    def __post_init__(self) -> None:
        for name in ("name", "url", "model", "key_variable"):
            value = getattr(self, name)
            if not isinstance(value, str) or not (value or name == "key_variable"):
                raise BadInput(f"remote model: {name} is {value!r}: use a text")
        where = f"remote model {self.name}:"
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise BadInput(f"{where} url is no http://… or https://… without query and password")
        if "#" in self.name:
            raise BadInput(f"{where} a name has no '#'")
        for name in ("prompt_price", "reply_price"):
            if not (is_finite(getattr(self, name)) and getattr(self, name) >= 0):
                raise BadInput(f"{where} {name} is {getattr(self, name)!r}: use a number from 0 on")
        check_seconds(f"{where} call_timeout_s", self.call_timeout_s)

    def needs(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Needs:
        """What a request takes of its quota until the reply says what it has used."""
        prompt = sum(_TOKENS_OF_MESSAGE + len(each["content"].encode()) // _BYTES_OF_TOKEN for each in messages)
        return Needs(api={self.name: 1}, tokens=prompt + max_tokens, cost=self.cost(prompt, max_tokens))

    def cost(self, prompt_tokens: int, reply_tokens: int) -> float:
        """What so many tokens cost."""
        return (prompt_tokens * self.prompt_price + reply_tokens * self.reply_price) / 1_000_000

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able facts, for the store."""
        return asdict(self)


async def ask_remote(
    remote: RemoteModel,
    messages: Sequence[Mapping[str, str]],
    max_tokens: int,
    temperature: float,
    *,
    idempotency_key: str = "",
) -> dict[str, str]:
    """The text of its reply, and why that ended (``"stop"``, ``"length"``): what a `RemoteModel` is asked for."""
    key = _key_of(remote)
    try:
        answer = await http_call(
            "POST",
            f"{remote.url.rstrip('/')}/chat/completions",
            json_body={
                "model": remote.model,
                "messages": list(messages),
                "max_tokens": max_tokens,
                "temperature": temperature,
            },
            headers={"Authorization": f"Bearer {key}"} if key else {},
            answer_within_s=remote.call_timeout_s,
            idempotency_key=idempotency_key,
        )
    except (HttpRefused, Retry) as error:
        if key and key in str(error):  # the endpoint has sent it back
            error.args = (str(error).replace(key, "…"),)
        raise
    try:
        body = answer.json()
        choice = body["choices"][0]
        reply = {"content": str(choice["message"]["content"] or ""), "finish_reason": str(choice["finish_reason"])}
    except (LookupError, TypeError, ValueError) as error:
        raise HttpRefused(f"{remote.name}: the reply is not in OpenAI's form: {type(error).__name__} {error}") from None
    usage = body.get("usage") or {}
    prompt, completion = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
    if type(prompt) is int and type(completion) is int:
        report_use(cost=max(0.0, remote.cost(prompt, completion)))
    return reply


def _key_of(remote: RemoteModel) -> str:
    if not remote.key_variable:
        return ""
    key = os.environ.get(remote.key_variable, "").strip()
    if not key:
        raise BadInput(f"{remote.name}: {remote.key_variable} is not set in the environment of {os.uname().nodename}")
    return key
