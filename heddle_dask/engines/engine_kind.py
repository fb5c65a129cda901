"""The interface of an engine kind: everything that is needed to start, address and describe one sort of engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from heddle_dask.core.errors import BadInput

if TYPE_CHECKING:
    from heddle_dask.cost.engine_cost import EngineCost
    from heddle_dask.engines.address import EngineAddress
    from heddle_dask.engines.contract import (
        EngineInfo,
        EngineRefused,
        EngineUnreachable,
        GenerateRequest,
        GenerateResult,
        KvFacts,
    )
    from heddle_dask.engines.spec import EngineSpec


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start an engine: the arguments, and the environment variables to set on top."""

    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that only one engine kind has; each kind derives its own. This class itself: the kind's defaults."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Read the options from parsed JSON or TOML.

        Raises
        ------
        BadInput
            A key is unknown, or a value is impossible.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(mapping) - set(known))
        if unknown:
            raise BadInput(
                f"engine options have unknown key {unknown[0]!r}: use {', '.join(known) or 'none of them'}"
            )
        return cls(**mapping)

    def to_mapping(self) -> dict[str, Any]:
        """A JSON-able mapping from which `from_mapping` makes equal options."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise BadInput(f"engine {name} is {value!r}: use a number above 0")

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadInput(f"engine {name} is {value!r}: use a whole number of at least {least}")


class Dialect(Protocol):
    """The HTTP requests of an engine kind and the meaning of its answers. Pure; a module can be one."""

    GENERATE_PATH: str
    ABORT_PATH: str
    HEALTH_PATH: str
    MODELS_PATH: str
    CONFIGURATION_PATH: str
    COUNTERS_PATH: str

    def generate_body(self, request: GenerateRequest, /) -> bytes:
        """The body of a request for one LLM step."""
        ...

    def result_of_json(self, body: bytes, /) -> GenerateResult:
        """Read an answer that came as one JSON object."""
        ...

    def result_of_stream(self, body: bytes, first_s: float, decode_s: float, /) -> GenerateResult:
        """Read an answer that came as server-sent events; seconds to the first event, and from there to the last."""
        ...

    def abort_body(self, request_ids: Sequence[str], /) -> bytes:
        """The body of a request that ends requests early."""
        ...

    def error_of_answer(self, status: int, body: bytes, /) -> EngineRefused | EngineUnreachable:
        """The error that an answer with another HTTP status than 200 stands for."""
        ...

    def configuration_of_answer(self, body: bytes, /) -> Mapping[str, Any]:
        """The engine's whole configuration, in its own words."""
        ...

    def info_of_answers(self, models: bytes, configuration: Mapping[str, Any], /) -> EngineInfo:
        """The engine's description, from its list of models and its configuration."""
        ...

    def progress_of_answer(self, body: bytes, /) -> tuple[float, ...]:
        """Numbers of which one changes with every iteration on steps, from the answer to `COUNTERS_PATH`.

        Empty for an engine that has no such numbers: then only a one-token request shows that it works.
        """
        ...

    def kv_facts(self, configuration: Mapping[str, Any], /) -> KvFacts | None:
        """What a KV transfer depends on; None when the engine transfers no KV."""
        ...

    def one_token_body(
        self,
        request_id: str,
        token_ids: Sequence[int],
        priority: int,
        kv_transfer_params: Mapping[str, Any] | None,
        /,
    ) -> bytes:
        """The body of a step of one token that computes, exports or imports the KV of a context."""
        ...

    def export_params(self) -> dict[str, Any]:
        """The `kv_transfer_params` that ask an engine to keep a step's KV for another engine."""
        ...

    def transfer_of_json(self, body: bytes, /) -> tuple[GenerateResult, Mapping[str, Any] | None]:
        """Read the answer to a `one_token_body`: its result, and the parameters of the exported KV."""
        ...


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
        ...

    def label_body(self, label: str, /) -> bytes:
        """The body of a request that labels all tokens sampled from now on."""
        ...

    def kv_was_dropped(self, body: bytes, /) -> bool:
        """Whether an engine has dropped all KV, that of its running steps included."""
        ...


@runtime_checkable
class WeightTransferDialect(WeightDialect, Protocol):
    """The part of a `Dialect` for weights that a trainer broadcasts."""

    RECEIVE_WEIGHTS_PATH: str
    RECEIVED_WEIGHTS_PATH: str

    def receive_weights_body(self, info: Mapping[str, Any], /) -> bytes:
        """The body of a request that begins to receive: ``manifest``, ``meeting``, and the engine's first ``rank``."""
        ...

    def received_weights_body(self) -> bytes:
        """The body of a request that asks how far every process has received."""
        ...

    def received_weights(self, body: bytes, /) -> list[Mapping[str, Any]]:
        """Of each process its ``device``, and of its latest reception ``version``, ``ended`` and ``cause``."""
        ...

    def load_received_requests(self, label: str, /) -> Sequence[tuple[str, bytes]]:
        """Paths and bodies of the requests that load received weights, in order."""
        ...


@runtime_checkable
class EngineKind(Protocol):
    """One sort of engine. Stateless: a spec says what a particular engine is to be."""

    @property
    def name(self) -> str:
        """The kind's name in messages and tables."""
        ...

    @property
    def options_type(self) -> type[EngineOptions]:
        """The class of `EngineSpec.options`."""
        ...

    @property
    def dialect(self) -> Dialect:
        """How to talk to an engine of this kind."""
        ...

    @property
    def server_module(self) -> str:
        """Start of the module name behind ``-m`` in `command`, by which its processes are recognised."""
        ...

    @property
    def default_cost(self) -> Mapping[str, Any] | None:
        """Cost of an engine without a cost in its options; None for kinds with ``takes_cost`` False."""
        ...

    @property
    def takes_cost(self) -> bool:
        """True: the engine runs no model and takes the time of the cost in its options. False: it runs a model."""
        ...

    @property
    def prefill_includes_queue(self) -> bool:
        """True: `GenerateResult.prefill_s` includes the wait in the engine's own queue."""
        ...

    # ------------------------------------------------------------------ validation

    def check_installed(self) -> None:
        """Raise `BadInput` when this Python cannot start such an engine."""
        ...

    def check_model(self, model: str) -> None:
        """Raise `BadInput` when the engine cannot load the model for a reason visible from outside."""
        ...

    def check_tp_degree(self, model: str, tp_degree: int) -> None:
        """Raise `BadInput` when the model does not run at that TP degree."""
        ...

    def check(self, spec: EngineSpec) -> None:
        """Raise `BadInput` when an engine of this spec cannot be started here."""
        ...

    def completed(self, spec: EngineSpec) -> EngineSpec:
        """The spec with the `slots` and `max_model_len` of an engine that is started here, where it names none.

        They stay None where only the engine knows.
        """
        ...

    # ------------------------------------------------------------------ the process

    def command(self, spec: EngineSpec, address: EngineAddress) -> EngineCommand:
        """The command that serves `spec` at an address, and only there."""
        ...

    def uses_gpus(self) -> bool:
        """True: engines of this kind use the GPUs of `EngineSpec.devices`, or all that their owner sees."""
        ...

    def described(self, spec: EngineSpec) -> str:
        """Name, version and settings of the engine, for the tables of measurements."""
        ...

    # ------------------------------------------------------------------ memory and time

    def kv_bytes_per_token(self, spec: EngineSpec) -> float:
        """Bytes of KV cache of one token over all layers, in the model's own precision; 0.0 when it is not known."""
        ...

    def options_for(
        self,
        cost: Mapping[str, Any] | None = None,
        *,
        time_scale: float = 1.0,
        max_positions: int | None = None,
    ) -> EngineOptions:
        """Options of an engine, in terms that all kinds share; a kind ignores what does not apply to it.

        Parameters
        ----------
        cost, time_scale
            For kinds that take a cost: the cost, in a form of `cost_from_mapping`, and real seconds for each of its
            seconds.
        max_positions
            For kinds that run a model: accept contexts of that many tokens, beyond what the model was trained on.
        """
        ...

    def logprobs(self, options: EngineOptions) -> str:
        """``"raw"`` or ``"processed"``: which logprobs a step returns."""
        ...

    def cost_of(self, options: EngineOptions) -> Mapping[str, Any] | None:
        """The cost that the options name; None: they name none."""
        ...

    def with_cost(self, options: EngineOptions, cost: Mapping[str, Any]) -> EngineOptions:
        """The same options with another cost; unchanged for kinds that take none."""
        ...

    def time_scale(self, options: EngineOptions) -> float:
        """Real seconds for each second of the cost; 1.0 for kinds that take none."""
        ...

    def effective_cost(self, spec: EngineSpec, cost: EngineCost) -> EngineCost:
        """`cost` in real seconds, with the KV capacity that this engine has."""
        ...
