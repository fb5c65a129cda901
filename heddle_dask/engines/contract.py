"""The contract of all engine kinds.

Token ids in, token ids out. Priorities have the engine's sign: **smaller runs first**.
A request ends in one of three ways: `stop` (an end token was sampled and is kept, since it was
sampled), `length` (the token limit), `abort` (interrupted; all tokens so far are returned).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from heddle_dask.core.errors import HeddleError
from heddle_dask.core.sampling import StructuredOutput

FinishReason = Literal["stop", "length", "abort"]

WARM_UP_REQUEST_ID = "warm-up"
"""Id of the first step of every engine; it belongs to no trajectory."""

CANARY_REQUEST_ID = "canary"
"""Id of the one-token request that asks whether an engine still works; it belongs to no trajectory."""

VERSION_UNKNOWN = -1
"""Policy version of a result that holds no token, or for which the engine reported none."""


class EngineUnreachable(HeddleError):
    """No answer: no process listens, the connection broke, or the engine failed internally (HTTP 5xx).

    The request may be sent again, to this engine once it is healthy or to another one.
    """


class EngineRefused(HeddleError):
    """The engine rejected the request (HTTP 4xx) and would reject it again."""


KvTransferCause = Literal["unsupported", "mismatch", "version", "used", "expired", "source", "target"]


class KvTransferFailed(HeddleError):
    """KV was not transferred. The alternatives are `EngineClient.warm` on the target, or not moving.

    Attributes
    ----------
    cause
        ``unsupported``: the engine runs without `EngineSpec.kv_transfer`; ``mismatch``: the tokens are not those that
        were exported, or the engines' KV blocks or TP degrees differ; ``version``: it was computed under other weights
        than the target's; ``used``: the handle was imported before;
        ``expired``: the source no longer pins the blocks, or would free them during the transfer; ``source``: they
        could not be read, since the source is dead or incompatible; ``target``: the target is dead.
    """

    def __init__(self, message: str, cause: KvTransferCause) -> None:
        super().__init__(message)
        self.cause: KvTransferCause = cause

    def __reduce__(self) -> tuple[type[KvTransferFailed], tuple[str, KvTransferCause]]:
        return type(self), (str(self), self.cause)


class WeightUpdateFailed(HeddleError):
    """An engine did not go over to other weights.

    Attributes
    ----------
    must_restart
        True: it may hold a part of them and is paused: end it. False: it serves its current ones as before.
    """

    def __init__(self, message: str, must_restart: bool) -> None:
        super().__init__(message)
        self.must_restart = must_restart

    def __reduce__(self) -> tuple[type[WeightUpdateFailed], tuple[str, bool]]:
        return type(self), (str(self), self.must_restart)


@dataclass(frozen=True, slots=True)
class WeightInstallation:
    """One change of weights, measured by the client.

    Attributes
    ----------
    paused_s
        From the request that pauses the engine to the answer of the one that resumes it: an upper bound of the time in
        which it generated nothing.
    load_s
        The part of it in which the weights were loaded.
    attempts
        Pauses that it took: KV that another engine still fetches cannot be dropped, and the engine goes on meanwhile.
    """

    paused_s: float
    load_s: float
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes
    ----------
    max_tokens
        Maximum number of tokens to generate, at least 1.
    temperature
        0 means greedy.
    seed
        None: the engine chooses.
    ignore_eos
        True: exactly `max_tokens` tokens, whatever is sampled.
    stop_token_ids
        Ids that end the step, besides the model's own end tokens.
    top_k
        Number of most likely tokens to draw from; 0: all.
    min_p
        Smallest probability of a token relative to that of the most likely one; 0: no limit.
    stop
        Texts that end the step; the tokens that complete one are kept, since they were sampled. An engine may ignore
        them: the driver cuts what follows.
    structured
        A form that the text must have. An engine that cannot ensure it refuses the request.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    structured: StructuredOutput | None = None


@dataclass(frozen=True, slots=True)
class ReplyReading:
    """Asks an engine to read a reply by its own parsers, when it has ended.

    Attributes
    ----------
    tools
        JSON text of a list of schemas: the tools that the model was told of.
    sampled_tokens
        Tokens of the reply at the end of the context: earlier parts of the step sampled them.
    thinking_end
        Token ids of what ends the thinking: from there on the reply is read.
    """

    tools: str
    sampled_tokens: int = 0
    thinking_end: tuple[int, ...] = ()

    def part_to_read(self, reply: Sequence[int], end_ids: Sequence[int]) -> list[int]:
        """The tokens from the end of the thinking on, all where there is none, without a last one of `end_ids`."""
        ids, end = list(reply), list(self.thinking_end)
        if ids and ids[-1] in end_ids:
            ids.pop()
        found = (start for start in range(len(ids)) if end and ids[start : start + len(end)] == end)
        return ids[next(found, 0) :]


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
    streams
        Whether its tokens are to come while it runs, a few at a time.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0
    streams: bool = False


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` (included) to `stop` (excluded) of a result were sampled by `policy_version` of `lineage`."""

    policy_version: int
    start: int
    stop: int
    lineage: str = ""


@dataclass(frozen=True, slots=True)
class Packed:
    """Says of a field with numbers that it crosses processes as the bytes of an array of this type code."""

    typecode: str


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What one LLM step sampled.

    Attributes
    ----------
    token_ids, logprobs
        As sampled, same length, an end token included. Logprobs are those of the model's raw
        distribution, natural logarithm. Arrays once it is `packed`.
    cached_tokens
        Context tokens found in the prefix cache.
    policy_version
        The version that sampled the *first* token (the oldest one, hence the safe bound for
        staleness); `VERSION_UNKNOWN` without tokens or when the engine does not say.
    queue_s, prefill_s, decode_s
        Waiting for admission; admission to first token; first to last token. NaN: not known.
        vLLM reports no queue time: then `queue_s` is NaN and `prefill_s`, measured by the client, is the whole time to
        the first token.
    version_spans
        The policy version of every token; more than one span when weights changed during the step.
    """

    token_ids: Annotated[Sequence[int], Packed("i")]
    logprobs: Annotated[Sequence[float], Packed("f")]
    finish_reason: FinishReason
    cached_tokens: int
    policy_version: int
    queue_s: float
    prefill_s: float
    decode_s: float
    version_spans: tuple[VersionSpan, ...] = ()

    def packed(self) -> GenerateResult:
        """The same with arrays: they take an eighth of the memory, and are sent as they are."""
        return replace(self, token_ids=array("i", self.token_ids), logprobs=array("f", self.logprobs))


NOTHING_GENERATED = GenerateResult((), (), "abort", 0, VERSION_UNKNOWN, math.nan, math.nan, math.nan)
"""The result of a step that no engine has answered."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The description that an engine gives of itself.

    Attributes
    ----------
    model
        The name under which the model is served.
    max_model_len
        Longest context, prompt and generated tokens together.
    slots
        Maximum number of sequences in one batch.
    kv_capacity_tokens
        KV capacity of the engine in tokens; 0 when not known.
    """

    model: str
    max_model_len: int
    slots: int
    tp_degree: int
    kv_capacity_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KvFacts:
    """The properties of an engine on which a KV transfer depends.

    Attributes
    ----------
    lease_s
        Seconds that the engine keeps exported blocks.
    """

    lease_s: float
    block_tokens: int
    tp_degree: int


@dataclass(frozen=True, slots=True)
class KvHandle:
    """The KV of one context, pinned on the engine that computed it until it is read, once.

    Attributes
    ----------
    source_engine_id
        The source's own id; it changes when the engine is restarted.
    tokens
        Length of the context.
    digest
        Digest of the context's token ids: an engine would accept KV imported for other tokens.
    block_tokens
        Size of the source's KV blocks; an engine with another size would misread them.
    tp_degree
        TP degree of the source: each GPU of an engine holds its share of the heads.
    params
        The engine's own parameters, passed on unchanged.
    valid_s
        Seconds after the export was asked for during which the handle may be used. The source pins the blocks longer.
    version
        The weights that it was computed under (a policy version as text).
    asked_s
        `time.monotonic` of this process when the export was asked for, or earlier. It does not travel: each process
        has its own.
    """

    source_engine_id: str
    tokens: int
    digest: str
    block_tokens: int
    tp_degree: int
    params: Mapping[str, Any]
    valid_s: float
    asked_s: float
    version: str = "0"

    @property
    def expires_s(self) -> float:
        """`time.monotonic` of this process after which the handle must not be used."""
        return self.asked_s + self.valid_s

    def to_mapping(self) -> dict[str, Any]:
        """A JSON-able mapping for `from_mapping`, in another process or on another machine."""
        mapping = asdict(self)
        del mapping["asked_s"]
        return mapping

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], asked_s: float) -> KvHandle:
        """Read a handle from parsed JSON.

        Parameters
        ----------
        asked_s
            `time.monotonic` of this process before it asked for the handle. All the time under way then counts against
            the lease, on one clock.
        """
        return cls(**mapping, asked_s=asked_s)


@dataclass(frozen=True, slots=True)
class KvImport:
    """The KV that a target engine holds of a context after an import or a warm-up.

    Attributes
    ----------
    cached_tokens
        Context tokens that the engine did not have to compute. After an import all of them, since a partial import
        fails; after a warm-up those found in the prefix cache, in whole KV blocks.
    seconds
        From the call to its end.
    """

    cached_tokens: int
    seconds: float


def context_digest(token_ids: Sequence[int]) -> str:
    """A short digest that distinguishes contexts."""
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=8).hexdigest()


# vLLM keeps priorities as Python ints, but other engines parse 32 bits; larger values are clipped.
_LIMIT = 2**31 - 1

# Precedes every step: a migration that queued behind the steps of a full engine would delay its trajectory.
FIRST = -_LIMIT


def engine_priority(number: float) -> int:
    """The integer that the engine takes for our `Priority.number` (larger runs first); never `FIRST`."""
    return max(FIRST + 1, min(_LIMIT, -round(number)))
