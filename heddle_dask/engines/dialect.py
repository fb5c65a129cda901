"""How to talk to an engine: the HTTP requests of an engine kind, and the meaning of its answers.

Every dialect has `Dialect`. What only some engines can do stands apart, and a dialect is asked whether it has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from heddle_dask.engines.contract import (
    EngineInfo,
    EngineRefused,
    EngineUnreachable,
    GenerateRequest,
    GenerateResult,
    KvFacts,
)


class Dialect(Protocol):
    """The HTTP requests of an engine kind and the meaning of its answers. Pure; a module can be one."""

    GENERATE_PATH: str
    ABORT_PATH: str
    HEALTH_PATH: str
    MODELS_PATH: str
    CONFIGURATION_PATH: str
    CONFIGURATION_BODY: bytes | None  # None: a GET request
    COUNTERS_PATH: str

    def generate_body(self, request: GenerateRequest, /) -> bytes:
        """The body of a request for one LLM step."""

    def result_of_json(self, body: bytes, /) -> GenerateResult:
        """Read an answer that came as one JSON object."""

    def result_of_stream(self, body: bytes, first_s: float, decode_s: float, /) -> GenerateResult:
        """Read an answer that came as server-sent events; seconds to the first event, and from there to the last."""

    def abort_body(self, request_ids: Sequence[str], /) -> bytes:
        """The body of a request that ends requests early."""

    def error_of_answer(self, status: int, body: bytes, /) -> EngineRefused | EngineUnreachable:
        """The error that an answer with another HTTP status than 200 stands for."""

    def configuration_of_answer(self, body: bytes, /) -> Mapping[str, Any]:
        """The engine's configuration, in its own words: what the other methods read of it."""

    def info_of_answers(self, models: bytes, configuration: Mapping[str, Any], /) -> EngineInfo:
        """The engine's description, from its list of models and its configuration."""

    def progress_of_answer(self, body: bytes, /) -> tuple[float, ...]:
        """Numbers of which one changes with every iteration on steps, from the answer to `COUNTERS_PATH`.

        Empty for an engine that has no such numbers: then only a one-token request shows that it works.
        """

    def one_token_body(
        self,
        request_id: str,
        token_ids: Sequence[int],
        priority: int,
        kv_transfer_params: Mapping[str, Any] | None,
        /,
    ) -> bytes:
        """The body of a step of one token that computes, exports or imports the KV of a context."""

    def transfer_of_json(self, body: bytes, /) -> tuple[GenerateResult, Mapping[str, Any] | None]:
        """Read the answer to a `one_token_body`: its result, and the parameters of the exported KV."""


@runtime_checkable
class ReadingDialect(Dialect, Protocol):
    """The part of a `Dialect` for engines that read replies by parsers of their own."""

    READ_PATH: str

    def read_body(self, tools: str, prompt_ids: Sequence[int], token_ids: Sequence[int], /) -> bytes:
        """The body of a request that reads a reply: JSON text of schemas, the end of its prompt, its tokens."""

    def message_of_answer(self, body: bytes, /) -> Mapping[str, Any]:
        """The reply as an assistant's message: ``content`` and ``tool_calls``."""


@runtime_checkable
class StreamingDialect(Dialect, Protocol):
    """The part of a `Dialect` for engines that send tokens while a step runs (`GenerateRequest.streams`)."""

    def tokens_of_events(self, body: bytes, /) -> list[int]:
        """The tokens in some whole server-sent events."""


@runtime_checkable
class KvDialect(Dialect, Protocol):
    """The part of a `Dialect` for moves of KV between engines. An engine whose dialect lacks it moves none."""

    def kv_facts(self, configuration: Mapping[str, Any], /) -> KvFacts | None:
        """What a KV transfer depends on; None when this engine transfers no KV."""

    def export_params(self) -> dict[str, Any]:
        """The `kv_transfer_params` that ask an engine to keep a step's KV for another engine."""


@runtime_checkable
class WeightDialect(Protocol):
    """The part of a `Dialect` for changes of weights. An engine whose dialect lacks it keeps its first weights."""

    PAUSE_PATH: str
    RESUME_PATH: str
    DROP_KV_PATH: str
    LOAD_WEIGHTS_PATH: str
    LABEL_PATH: str

    def load_weights_body(self, directory: str, /) -> bytes:
        """The body of a request that loads the weights of a model directory into the running model."""

    def label_body(self, label: str, /) -> bytes:
        """The body of a request that labels all tokens sampled from now on."""

    def kv_was_dropped(self, body: bytes, /) -> bool:
        """Whether an engine has dropped all KV, that of its running steps included."""


@runtime_checkable
class WeightTransferDialect(WeightDialect, Protocol):
    """The part of a `Dialect` for weights that a trainer broadcasts."""

    RECEIVE_WEIGHTS_PATH: str
    RECEIVED_WEIGHTS_PATH: str

    def receive_weights_body(self, info: Mapping[str, Any], /) -> bytes:
        """The body of a request that begins to receive: ``manifest``, ``meeting``, and the engine's first ``rank``."""

    def received_weights_body(self) -> bytes:
        """The body of a request that asks how far every process has received."""

    def received_weights(self, body: bytes, /) -> list[Mapping[str, Any]]:
        """Of each process its ``device``, and of its latest reception ``version``, ``ended`` and ``cause``."""

    def load_received_requests(self, label: str, /) -> Sequence[tuple[str, bytes]]:
        """Paths and bodies of the requests that load received weights, in order."""
