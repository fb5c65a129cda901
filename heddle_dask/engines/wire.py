"""The bytes of the engine protocol: what a step looks like going out and coming back.

Pure. Two forms of answer exist for one step: a stream of server-sent events (vLLM, asked to send the
first token at once and all others at the end, so that the time to the first token can be seen) and
one JSON object (the emulated engine, which states its times itself in `metrics`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from heddle_dask.engines.contract import (
    VERSION_UNKNOWN,
    EngineRefused,
    EngineUnreachable,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    VersionSpan,
)

ENGINE_ID_PREFIX = "generate-tokens-"
"""vLLM keeps a request under this prefix plus the id that the caller gave."""

EMULATED_OWNER = "heddle-emulated"
"""By this `owned_by` the emulated engine's model can be told from vLLM's."""

_ONE_CHUNK_TOKENS = 1 << 30
_FINISH_REASONS = ("stop", "length", "abort")
_compact = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def generate_body(request: GenerateRequest) -> bytes:
    """The request body of ``POST /inference/v1/generate``."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": 0,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
        "stream_interval": _ONE_CHUNK_TOKENS,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    # vLLM's ignore_eos spares only the model's own end tokens; ours promises the full length.
    if sampling.stop_token_ids and not sampling.ignore_eos:
        params["stop_token_ids"] = sampling.stop_token_ids
    # numpy arrays come from the token record; JSON wants plain integers.
    to_list = getattr(request.token_ids, "tolist", None)
    body = {
        "request_id": request.request_id,
        "token_ids": to_list() if to_list is not None else list(request.token_ids),
        "sampling_params": params,
        "priority": request.priority,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return _compact(body).encode()


def one_token_body(
    request_id: str,
    token_ids: Sequence[int],
    priority: int,
    kv_transfer_params: Mapping[str, Any] | None,
) -> bytes:
    """The request body of a step of one token, greedy, answered as one JSON object."""
    to_list = getattr(token_ids, "tolist", None)
    body: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": to_list() if to_list is not None else list(token_ids),
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
        },
        "priority": priority,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return _compact(body).encode()


def export_params() -> dict[str, Any]:
    """The words by which an engine is asked to keep a step's KV for another engine."""
    remote = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    return {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(remote)}


def abort_body(request_ids: Sequence[str]) -> bytes:
    """The request body of ``POST /abort_requests``."""
    return _compact({"request_ids": [ENGINE_ID_PREFIX + name for name in request_ids]}).encode()


def error_message(body: bytes) -> str:
    """The engine's own words in an error answer, on one line, however it wraps them."""
    try:
        value = json.loads(body)
    except ValueError:
        value = body.decode(errors="replace")
    for key in ("error", "detail", "message"):
        while isinstance(value, dict) and key in value:
            value = value[key]
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())[:500]


def error_of_status(status: int, message: str) -> EngineRefused | EngineUnreachable:
    """The error that an HTTP status (or the code in a streamed error) stands for."""
    if 400 <= status < 500:
        return EngineRefused(f"engine refused (HTTP {status}): {message}")
    return EngineUnreachable(f"engine failed (HTTP {status}): {message}")


@dataclass(slots=True)
class _Gathered:
    """One answer, put together from its chunks."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    versions: list[Mapping[str, Any]] | None = None
    cached_tokens: int = 0
    metrics: Mapping[str, Any] | None = None
    kv_transfer_params: Mapping[str, Any] | None = None

    def add(self, chunk: Mapping[str, Any]) -> None:
        if "error" in chunk:
            error = chunk["error"]
            code = error.get("code") if isinstance(error, Mapping) else None
            raise error_of_status(
                code if isinstance(code, int) else 500, error_message(json.dumps(chunk).encode())
            )
        for choice in chunk.get("choices") or ():
            self.token_ids += choice.get("token_ids") or ()
            content = (choice.get("logprobs") or {}).get("content") or ()
            self.logprobs += [entry["logprob"] for entry in content]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.versions = choice.get("weight_versions") or self.versions
        usage = chunk.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens") or 0
        self.metrics = chunk.get("metrics") or self.metrics
        self.kv_transfer_params = chunk.get("kv_transfer_params") or self.kv_transfer_params

    def result(self, first_s: float, decode_s: float) -> GenerateResult:
        if self.finish_reason not in _FINISH_REASONS:
            raise EngineUnreachable(f"engine broke off its answer (finish reason {self.finish_reason!r})")
        if len(self.logprobs) != len(self.token_ids):
            raise EngineUnreachable(
                f"engine returned {len(self.token_ids)} tokens with {len(self.logprobs)} logprobs"
            )
        queue_s, prefill_s = math.nan, first_s
        if self.metrics and "queue_time_ms" in self.metrics:
            queue_s = _seconds(self.metrics.get("queue_time_ms"))
            prefill_s = _seconds(self.metrics.get("time_to_first_token_ms"))
            decode_s = _seconds(self.metrics.get("generation_time_ms"))
        elif not self.token_ids:
            prefill_s = decode_s = math.nan
        spans = _spans(self.versions)
        return GenerateResult(
            token_ids=tuple(self.token_ids),
            # Rounding can put the logprob of a sure token a hair above 0.
            logprobs=tuple([value if value < 0.0 else 0.0 for value in self.logprobs]),
            finish_reason=cast(FinishReason, self.finish_reason),
            cached_tokens=self.cached_tokens,
            policy_version=spans[0].policy_version if spans else VERSION_UNKNOWN,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            version_spans=spans,
        )


def _seconds(milliseconds: float | None) -> float:
    return math.nan if milliseconds is None else milliseconds / 1000.0


def _spans(versions: Sequence[Mapping[str, Any]] | None) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(_policy_version(str(span["version"])), span["start"], span["end"])
        for span in versions or ()
    )


def _policy_version(label: str) -> int:
    # An engine whose weights were never updated calls them "default": our version 0.
    if label == "default":
        return 0
    try:
        return int(label)
    except ValueError:
        return VERSION_UNKNOWN


def result_of_json(body: bytes) -> GenerateResult:
    """Read an answer that came as one JSON object, with the engine's own times if it states them.

    Raises
    ------
    EngineUnreachable
        The answer is cut short or contradicts itself.
    """
    return transfer_of_json(body)[0]


def transfer_of_json(body: bytes) -> tuple[GenerateResult, Mapping[str, Any] | None]:
    """Read the answer to a `one_token_body`, and what it says of the KV kept for another engine.

    Raises
    ------
    EngineUnreachable
        The answer is cut short or contradicts itself.
    """
    gathered = _Gathered()
    gathered.add(_parsed(body))
    return gathered.result(math.nan, math.nan), gathered.kv_transfer_params


def result_of_stream(body: bytes, first_s: float, decode_s: float) -> GenerateResult:
    """Read an answer that came as server-sent events.

    Parameters
    ----------
    first_s, decode_s
        Seconds from submission to the first event, and from there to the last.

    Raises
    ------
    EngineUnreachable
        The stream is cut short, contradicts itself, or reports a failure of the engine.
    EngineRefused
        The stream reports that the request was not acceptable.
    """
    gathered = _Gathered()
    for event in body.split(b"\n\n"):
        if event.startswith(b"data: ") and not event.startswith(b"data: [DONE]"):
            gathered.add(_parsed(event[6:]))
    return gathered.result(first_s, decode_s)


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise EngineUnreachable(f"engine's answer is no JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise EngineUnreachable("engine's answer is no JSON object")
    return value
