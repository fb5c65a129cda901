"""An engine, described, and the interface of its kind: everything that is needed to start and describe one.

A spec is plain data that travels by pickle and JSON, checked once, on construction. A kind is one object that keeps
`EngineKind`, in one file; it is imported when it is first asked for. How to talk to its engines is its `Dialect`.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from heddle_dask.core.errors import BadInput, check_keys
from heddle_dask.engines.address import LOOPBACK, EngineAddress
from heddle_dask.engines.dialect import Dialect

if TYPE_CHECKING:
    # It needs numpy, which commands that start no engine do without.
    from heddle_dask.cost.engine_cost import EngineCost

ENGINE_KINDS: Mapping[str, str] = {
    "vllm": "heddle_dask.engines.kinds.vllm:VLLM",
    "emulated": "heddle_dask.engines.kinds.emulated:EMULATED",
}
"""Every kind of this package, by the name that `EngineSpec.kind` and ``--engine`` take. A kind of another package is
named ``package.module:object``, which every process of a cluster can import."""

DEFAULT_KIND = next(iter(ENGINE_KINDS))


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start an engine: the arguments, and the environment variables to set on top."""

    argv: tuple[str, ...]
    env: dict[str, str]
    # What its compiled code depends on (`compile_cache.description_of`); empty: it compiles nothing.
    compiled_as: str = ""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that only one engine kind has; each kind derives its own. This class itself: the kind's defaults.

    `VllmOptions.logprobs` says which logprobs a step returns; so may the options of another kind.
    """

    @property
    def cost(self) -> Mapping[str, Any] | None:
        """The cost whose time an engine takes that runs no model; None: its kind's default, or it runs a model."""
        return None

    @property
    def time_scale(self) -> float:
        """Real seconds for each second of the cost."""
        return 1.0

    @property
    def logprobs(self) -> str:
        """``"raw"`` or ``"processed"``: which logprobs a step returns."""
        return "raw"

    @property
    def reads_calls(self) -> bool:
        """Whether the engine reads calls of tools by a parser of its own."""
        return False

    def with_cost(self, cost: Mapping[str, Any]) -> Self:
        """The same options with another cost; unchanged for kinds that take none."""
        return self

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The options that engines of the kind have."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Read the options from parsed JSON or TOML."""
        known = cls.names()
        unknown = sorted(set(mapping) - set(known))
        if unknown:
            raise BadInput(f"engine options have unknown key {unknown[0]!r}: use {', '.join(known) or 'none of them'}")
        return cls(**mapping)

    def to_mapping(self) -> dict[str, Any]:
        """A JSON-able mapping from which `from_mapping` makes equal options."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise BadInput(f"engine {name} is {value!r}: use a number above 0")

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadInput(f"engine {name} is {value!r}: use a whole number of at least {least}")


_DEFAULT_OPTIONS = EngineOptions()
_HARDWARE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_hardware(name: str, value: object) -> None:
    """Refuse a class of hardware that is no plain name; empty: none."""
    if not isinstance(value, str) or (value and _HARDWARE.fullmatch(value) is None):
        raise BadInput(f"{name} is {value!r}: use letters, digits, '.', '-' and '_', such as H800")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, described. Options of one kind only are in `options`.

    Attributes
    ----------
    kind
        A name of `ENGINE_KINDS`, or ``package.module:object`` for a kind of another package.
    model
        A model directory (or, for vLLM, a name it can load). The emulated engine only reads the end
        token from it, where it is a directory.
    slots
        Maximum number of sequences in one batch. None: vLLM's own choice on GPUs, 16 elsewhere. What an engine has, it
        says itself when it answers (`EngineInfo`).
    max_model_len
        Longest context in tokens, prompt and generated tokens together. None: on GPUs the model's limit, or what their
        memory holds if that is less; elsewhere the model's limit, at most 4,096.
    dtype
        Type of the weights, for kinds that run a model.
    seed
        Of what the engine draws for requests without a seed. A rollout worker makes another one of it for each engine:
        with equal ones, engines would sample the same for equal prompts.
    kv_transfer
        True: the engine can export the KV cache of a context to another engine and import one
        (`EngineClient.export_kv` and `import_kv`); vLLM then runs with its NIXL connector.
    kv_host
        With `kv_transfer`: the address of this machine at which other engines fetch KV from this one. A rollout worker
        sets it to its own.
    devices
        Names of the GPUs of a kind that uses GPUs (``CUDA_VISIBLE_DEVICES``), one for each of `tp_degree`. Empty: those
        that its owner sees.
    engines_per_gpu
        Engines of this description that share each of their GPUs, with equal parts of its memory.
    steps_ahead
        How many steps beyond `slots` may wait in the engine's own queue. The next iteration then fills a slot that a
        step leaves; otherwise it would stay empty until the step's end is known here and another step has been sent.
    tcp
        True: the engine listens on a loopback port, which every user of the machine reaches, and not on a Unix socket.
        Only for routers that speak no Unix sockets (``python -m benchmarks live``).
    options
        The kind's own options (`VllmOptions`, `EmulatedOptions`); not given: their defaults.
    hardware
        Class of the GPUs, for affinity (``"H20"``), where the worker does not say it (``--hardware`` of a rollout
        worker, ``hardware`` of a group); empty: all engines are alike.
    """

    kind: str
    model: str
    slots: int | None = None
    max_model_len: int | None = None
    dtype: str = "auto"
    tp_degree: int = 1
    seed: int = 0
    kv_transfer: bool = False
    kv_host: str = LOOPBACK
    devices: tuple[str, ...] = ()
    steps_ahead: int = 6
    tcp: bool = False
    options: EngineOptions = _DEFAULT_OPTIONS
    hardware: str = ""
    engines_per_gpu: int = 1

    def __post_init__(self) -> None:
        options_type = engine_kind(self.kind).options_type
        if type(self.options) is EngineOptions:
            object.__setattr__(self, "options", options_type())
        if not isinstance(self.options, options_type):
            raise BadInput(
                f"engine options are {type(self.options).__name__}: {self.kind} takes {options_type.__name__}"
            )
        if not isinstance(self.model, str) or not self.model:
            raise BadInput("engine model is empty: give a model directory")
        for name, least in (
            ("slots", 1),
            ("steps_ahead", 0),
            ("max_model_len", 2),
            ("tp_degree", 1),
            ("engines_per_gpu", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is None and name in ("slots", "max_model_len"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise BadInput(f"engine {name} is {value!r}: use a whole number of at least {least}")
        if not isinstance(self.dtype, str) or not self.dtype:
            raise BadInput(f"engine dtype is {self.dtype!r}: use a name such as 'auto' or 'bfloat16'")
        check_hardware("engine hardware", self.hardware)
        for name in ("kv_transfer", "tcp"):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(f"engine {name} is {getattr(self, name)!r}: use true or false")
        if self.devices and len(self.devices) != self.tp_degree:
            named = ", ".join(self.devices)
            raise BadInput(f"engine devices are {named}: name {self.tp_degree}, one for each of tp_degree, or none")

    @property
    def named_slots(self) -> int:
        """`slots`, where the spec must name them."""
        if self.slots is None:
            raise BadInput("engine slots are not given: give the number of sequences in one batch")
        return self.slots

    @property
    def named_context_tokens(self) -> int:
        """`max_model_len`, where the spec must name it."""
        if self.max_model_len is None:
            raise BadInput("engine max_model_len is not given: give the longest context in tokens")
        return self.max_model_len

    def to_mapping(self) -> dict[str, Any]:
        """A JSON-able mapping from which `from_mapping` makes an equal spec."""
        mapping = {field.name: getattr(self, field.name) for field in fields(self)}
        # As runs were stored before there were classes, and engines that share a GPU.
        if not self.hardware:
            del mapping["hardware"]
        if self.engines_per_gpu == 1:
            del mapping["engines_per_gpu"]
        return {**mapping, "devices": list(self.devices), "options": self.options.to_mapping()}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> EngineSpec:
        """Read a spec from parsed JSON or TOML."""
        check_keys("engine spec", mapping, [field.name for field in fields(cls)], required=2)
        values = dict(mapping)
        values["devices"] = tuple(mapping.get("devices", ()))
        values["options"] = engine_kind(mapping["kind"]).options_type.from_mapping(mapping.get("options", {}))
        return cls(**values)


class StartsEngines(Protocol):
    """How engines of a kind are checked and started."""

    @property
    def server_module(self) -> str:
        """Start of the module name behind ``-m`` in `command`, by which its processes are recognised."""

    def check_installed(self) -> None:
        """Raise `BadInput` when this Python cannot start such an engine."""

    def check_model(self, model: str, options: EngineOptions) -> None:
        """Raise `BadInput` when the engine cannot load the model for a reason visible from outside."""

    def check_tp_degree(self, model: str, tp_degree: int) -> None:
        """Raise `BadInput` when the model does not run at that TP degree."""

    def check(self, spec: EngineSpec) -> None:
        """Raise `BadInput` when an engine of this spec cannot be started here."""

    def completed(self, spec: EngineSpec) -> EngineSpec:
        """The spec with the `slots` and `max_model_len` of an engine that is started here, where it names none.

        They stay None where only the engine knows.
        """

    def command(self, spec: EngineSpec, address: EngineAddress) -> EngineCommand:
        """The command that serves `spec` at an address, and only there."""

    def uses_gpus(self) -> bool:
        """True: engines of this kind use the GPUs of `EngineSpec.devices`, or all that their owner sees."""


class DescribesEngines(Protocol):
    """What engines of a kind are, without starting one: their memory, their time, and how they are told of."""

    @property
    def default_cost(self) -> Mapping[str, Any] | None:
        """Cost of an engine without a cost in its options; None for kinds with ``takes_cost`` False."""

    @property
    def takes_cost(self) -> bool:
        """True: the engine runs no model and takes the time of the cost in its options. False: it runs a model."""

    @property
    def prefill_includes_queue(self) -> bool:
        """True: `GenerateResult.prefill_s` includes the wait in the engine's own queue."""

    def described(self, spec: EngineSpec) -> str:
        """Name, version and settings of the engine, for the tables of measurements."""

    def kv_bytes_per_token(self, spec: EngineSpec) -> float:
        """Bytes of KV cache of one token over all layers, in the model's own precision; 0.0 when it is not known."""

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

    def effective_cost(self, spec: EngineSpec, cost: EngineCost) -> EngineCost:
        """`cost` in real seconds, with the KV capacity that this engine has."""

    def believed_cost(self, spec: EngineSpec) -> EngineCost | None:
        """What an engine of this spec costs on the hardware of this machine, unmeasured; None: it is not known."""


@runtime_checkable
class EngineKind(StartsEngines, DescribesEngines, Protocol):
    """One sort of engine. Stateless: a spec says what a particular engine is to be."""

    @property
    def name(self) -> str:
        """The kind's name in messages and tables."""

    @property
    def options_type(self) -> type[EngineOptions]:
        """The class of `EngineSpec.options`."""

    @property
    def dialect(self) -> Dialect:
        """How to talk to an engine of this kind."""


@runtime_checkable
class ReceivesBroadcasts(Protocol):
    """What a kind has besides, whose engines can receive weights that a trainer broadcasts."""

    def receiving(self, options: EngineOptions) -> EngineOptions:
        """The same options, of engines that receive broadcasts."""


def engine_kind(name: str) -> EngineKind:
    """The kind of that name, or the object that ``package.module:object`` names."""
    module, separator, attribute = ENGINE_KINDS.get(name, name).partition(":") if isinstance(name, str) else ("",) * 3
    if not separator:
        known = " or ".join(ENGINE_KINDS)
        raise BadInput(f"engine kind {name!r} is unknown: use {known} (or package.module:object)")
    try:
        found = getattr(importlib.import_module(module), attribute)
    # A module may raise anything during its import.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        about_names = isinstance(error, ImportError | AttributeError)
        told = " ".join((f"{error}" if about_names else f"{type(error).__name__}: {error}").split())
        raise BadInput(f"engine kind {name!r} cannot be imported: {told}") from error
    if not isinstance(found, EngineKind):
        raise BadInput(f"engine kind {name!r} is a {type(found).__name__}, and no EngineKind (docs/engines.md)")
    return found
