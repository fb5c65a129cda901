"""What an engine promises over HTTP, whichever engine it is.

Token ids in, token ids out. The engine's own sign of priority is used here: **smaller runs first**.
A request ends in one of three ways: `stop` (an end token was sampled and is kept, since it was
sampled), `length` (the token limit), `abort` (interrupted; all tokens so far are returned).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from heddle_dask.core.errors import HeddleError

FinishReason = Literal["stop", "length", "abort"]

WARM_UP_REQUEST_ID = "warm-up"
"""Id of the first step of every engine; it counts as nobody's."""

VERSION_UNKNOWN = -1
"""Policy version of a result whose engine did not say (or that holds no token)."""


class EngineUnreachable(HeddleError):
    """No answer: nobody listens, the connection broke, or the engine failed inside (HTTP 5xx).

    The request may be sent again, to this engine once it lives or to another one.
    """


class EngineRefused(HeddleError):
    """The engine understood and declined (HTTP 4xx): the same request would be refused again."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes
    ----------
    max_tokens
        Most tokens to generate, at least 1.
    temperature
        0 means greedy.
    seed
        None: the engine draws as it likes.
    ignore_eos
        True: exactly `max_tokens` tokens, whatever is sampled.
    stop_token_ids
        Ids that end the step, besides the model's own end tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One LLM step.

    Attributes
    ----------
    request_id
        Unique among the requests in flight on the engine; `abort` names it.
    token_ids
        The whole context.
    priority
        The engine's sign: smaller runs first.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` (included) to `stop` (excluded) of a result were sampled by `policy_version`."""

    policy_version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What one LLM step sampled.

    Attributes
    ----------
    token_ids, logprobs
        As sampled, same length, an end token included. Logprobs are those of the model's raw
        distribution, natural logarithm.
    cached_tokens
        Context tokens whose KV was found in the prefix cache.
    policy_version
        The version that sampled the *first* token (the oldest one, hence the safe bound for
        staleness); `VERSION_UNKNOWN` without tokens or when the engine does not say.
    queue_s, prefill_s, decode_s
        Waiting for admission; admission to first token; first to last token. NaN: not known.
        vLLM tells no queue time: there `queue_s` is NaN and `prefill_s`, measured from the client,
        is the whole time to the first token.
    version_spans
        The policy version of every token; more than one span when weights changed on the way.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    cached_tokens: int
    policy_version: int
    queue_s: float
    prefill_s: float
    decode_s: float
    version_spans: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself.

    Attributes
    ----------
    model
        The name under which the model is served.
    max_model_len
        Longest context, prompt and generated tokens together.
    slots
        Most sequences in one batch.
    kind
        ``"vllm"`` or ``"emulated"``.
    """

    model: str
    max_model_len: int
    slots: int
    kind: str
    tp_degree: int
