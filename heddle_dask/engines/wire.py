"""vLLM's HTTP dialect: the bytes of requests and the meaning of answers. This module is a `Dialect`.

Pure. A step has two forms of answer: a stream of server-sent events (vLLM is asked to send the first token at once and
all others at the end, so that the time to the first token can be measured), or one JSON object (the emulated engine,
which states its times in `metrics`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.engines.contract import (
    VERSION_UNKNOWN,
    EngineInfo,
    EngineRefused,
    EngineUnreachable,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    KvFacts,
    VersionSpan,
)

ENGINE_ID_PREFIX = "generate-tokens-"
"""vLLM keeps a request under this prefix plus the caller's id."""

GENERATE_PATH = "/inference/v1/generate"
ABORT_PATH = "/abort_requests"
HEALTH_PATH = "/health"
MODELS_PATH = "/v1/models"
# Of `vllm_worker_extension`: vLLM's own ``/server_info`` inspects the whole machine first, which takes about 10 s.
CONFIGURATION_PATH = "/collective_rpc"
CONFIGURATION_METHOD = "configuration"
CONFIGURATION_BODY: bytes | None = b'{"method":"configuration"}'
COUNTERS_PATH = "/metrics"
READ_PATH = "/v1/chat/completions/derender"

# Running steps are frozen, not ended. Without clear_cache vLLM drops KV here, and does not say whether it could.
PAUSE_PATH = "/pause?mode=keep&clear_cache=false"
RESUME_PATH = "/resume"
# Running steps are put back into the queue and prefilled again.
DROP_KV_PATH = "/reset_prefix_cache?reset_running_requests=true"
LOAD_WEIGHTS_PATH = "/collective_rpc"
# Of `vllm_worker_extension`: vLLM's own `reload_weights` leaves tied output layers as they were.
LOAD_WEIGHTS_METHOD = "reload_every_layer"
LABEL_PATH = "/update_weight_version"
# With the backend of `vllm_weight_transfer`.
RECEIVE_WEIGHTS_PATH = "/init_weight_transfer_engine"
RECEIVED_WEIGHTS_PATH = "/collective_rpc"

GENERATED_TOKENS = "vllm:generation_tokens_total"
KV_USE = "vllm:kv_cache_usage_perc"

# Of vLLM, where its command line names none.
_DEFAULT_LEASE_S = 30

_ONE_CHUNK_TOKENS = 1 << 30
STREAMED_TOKENS = 4
"""Tokens in each event of a step whose tokens come while it runs: each costs the engine's front end a message."""
_FINISH_REASONS = ("stop", "length", "abort")
_compact = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def generate_body(request: GenerateRequest) -> bytes:
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": 0,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
        "stream_interval": STREAMED_TOKENS if request.streams else _ONE_CHUNK_TOKENS,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    # vLLM's ignore_eos ignores only the model's own end tokens; `SamplingParams.ignore_eos` promises the full length.
    if sampling.stop_token_ids and not sampling.ignore_eos:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.top_k:
        params["top_k"] = sampling.top_k
    if sampling.min_p:
        params["min_p"] = sampling.min_p
    if sampling.stop:
        # vLLM looks for them in the text, and keeps the tokens up to the one that completes the text.
        params |= {"stop": sampling.stop, "detokenize": True, "skip_special_tokens": False}
    if sampling.structured is not None:
        params["structured_outputs"] = _structured_outputs(sampling.structured)
    # The token record gives numpy arrays; JSON needs plain integers.
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


def _structured_outputs(form: StructuredOutput) -> dict[str, Any]:
    named = {"json": form.json_schema, "regex": form.regex, "choice": form.choice, "grammar": form.grammar}
    return {name: value for name, value in named.items() if value is not None}


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


def read_body(tools: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> bytes:
    choice = {"index": 0, "token_ids": list(token_ids), "finish_reason": "stop"}
    response = {"request_id": "read", "prompt_token_ids": list(prompt_ids), "choices": [choice]}
    # vLLM renders no message of it; its parsers look at the tools.
    asked = {"messages": [{"role": "user", "content": ""}], "tools": json.loads(tools)}
    return _compact({"generate_response": response, "chat_request": asked}).encode()


def message_of_answer(body: bytes) -> Mapping[str, Any]:
    message: Mapping[str, Any] = json.loads(body)["choices"][0]["message"]
    return message


def export_params() -> dict[str, Any]:
    remote = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    return {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(remote)}


def configuration_of_answer(body: bytes) -> Mapping[str, Any]:
    # Each process of the engine has answered.
    configuration: Mapping[str, Any] = json.loads(body)["results"][0]
    return configuration


def info_of_answers(models: bytes, configuration: Mapping[str, Any]) -> EngineInfo:
    model = json.loads(models)["data"][0]
    cache = configuration.get("cache_config") or {}
    blocks, block_tokens = cache.get("num_gpu_blocks"), cache.get("block_size")
    return EngineInfo(
        model=model["id"],
        max_model_len=int(model["max_model_len"]),
        slots=int(configuration["scheduler_config"]["max_num_seqs"]),
        tp_degree=int(configuration["parallel_config"]["tensor_parallel_size"]),
        kv_capacity_tokens=int(blocks) * int(block_tokens) if blocks and block_tokens else 0,
    )


def progress_of_answer(body: bytes) -> tuple[float, ...]:
    """Generated tokens and use of the KV cache, which grows while a prompt is prefilled, from Prometheus' text."""
    lines = body.decode(errors="replace").splitlines()
    return tuple(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((GENERATED_TOKENS, KV_USE)))


def kv_facts(configuration: Mapping[str, Any]) -> KvFacts | None:
    transfer = configuration.get("kv_transfer_config")
    if transfer is None:
        return None
    extra = transfer.get("kv_connector_extra_config") or {}
    return KvFacts(
        lease_s=float(extra.get("kv_lease_duration", _DEFAULT_LEASE_S)),
        block_tokens=int(configuration["cache_config"]["block_size"]),
        tp_degree=int(configuration["parallel_config"]["tensor_parallel_size"]),
    )


def load_weights_body(directory: str) -> bytes:
    """The request body that loads a model directory into the running model, in every process of the engine."""
    return _compact({"method": LOAD_WEIGHTS_METHOD, "kwargs": {"weights_path": directory}}).encode()


def receive_weights_body(info: Mapping[str, Any]) -> bytes:
    return _compact({"init_info": info}).encode()


def received_weights_body() -> bytes:
    return _compact({"method": "received_weights"}).encode()


def received_weights(body: bytes) -> list[Mapping[str, Any]]:
    """Read the answer to `received_weights_body`: of each process ``device``, and ``version``, ``ended``, ``cause``."""
    found: list[Mapping[str, Any]] = json.loads(body)["results"]
    return found


def load_received_requests(label: str) -> Sequence[tuple[str, bytes]]:
    return (
        ("/start_weight_update", b"{}"),
        ("/update_weights", _compact({"update_info": {"version": label}}).encode()),
        ("/finish_weight_update", b"{}"),
    )


def label_body(label: str) -> bytes:
    return _compact({"new_version": label}).encode()


def kv_was_dropped(body: bytes) -> bool:
    answer = json.loads(body)
    return isinstance(answer, Mapping) and answer.get("success") is True


def abort_body(request_ids: Sequence[str]) -> bytes:
    return _compact({"request_ids": [ENGINE_ID_PREFIX + name for name in request_ids]}).encode()


def error_message(body: bytes) -> str:
    """The message of an error answer, on one line, from any of the forms in which it is wrapped."""
    try:
        value = json.loads(body)
    except ValueError:
        value = body.decode(errors="replace")
    for key in ("error", "detail", "message"):
        while isinstance(value, dict) and key in value:
            value = value[key]
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())[:500]


def error_of_answer(status: int, body: bytes) -> EngineRefused | EngineUnreachable:
    return error_of_status(status, error_message(body))


def error_of_status(status: int, message: str) -> EngineRefused | EngineUnreachable:
    """The error that an HTTP status (or the code in a streamed error) stands for."""
    if 400 <= status < 500:
        return EngineRefused(f"engine refused (HTTP {status}): {message}")
    return EngineUnreachable(f"engine failed (HTTP {status}): {message}")


@dataclass(slots=True)
class _Gathered:
    """One answer, assembled from its chunks."""

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
            raise error_of_status(code if isinstance(code, int) else 500, error_message(json.dumps(chunk).encode()))
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
            raise EngineUnreachable(f"engine cut its answer short (finish reason {self.finish_reason!r})")
        if len(self.logprobs) != len(self.token_ids):
            raise EngineUnreachable(f"engine returned {len(self.token_ids)} tokens with {len(self.logprobs)} logprobs")
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
            # Rounding can put the logprob of a certain token slightly above 0.
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
    return tuple(_span(span) for span in versions or ())


def _span(span: Mapping[str, Any]) -> VersionSpan:
    version = _version_of_label(str(span["version"]))
    return VersionSpan(version.number, span["start"], span["end"], version.lineage)


def _version_of_label(label: str) -> PolicyVersion:
    # vLLM calls weights that were never updated "default": version 0.
    if label == "default":
        return PolicyVersion()
    try:
        return PolicyVersion.parse(label)
    except ValueError:
        return PolicyVersion(number=VERSION_UNKNOWN)


def result_of_json(body: bytes) -> GenerateResult:
    """Read an answer that came as one JSON object; its times are those that the engine states, else NaN."""
    return transfer_of_json(body)[0]


def transfer_of_json(body: bytes) -> tuple[GenerateResult, Mapping[str, Any] | None]:
    """Read the answer to a `one_token_body`: its result, and the parameters of the KV kept for another engine."""
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


def tokens_of_events(body: bytes) -> list[int]:
    """The tokens in some whole server-sent events, each of which ends with an empty line."""
    found: list[int] = []
    for event in body.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in _parsed(event[6:]).get("choices") or ():
                found += choice.get("token_ids") or ()
    return found


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise EngineUnreachable(f"engine's answer is no JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise EngineUnreachable("engine's answer is no JSON object")
    return value
