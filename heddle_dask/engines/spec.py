"""The description of an engine: plain data that travels by pickle and JSON, checked once, on construction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from heddle_dask.core.errors import BadInput, check_keys
from heddle_dask.engines.engine_kind import EngineOptions
from heddle_dask.engines.kinds import engine_kind
from heddle_dask.engines.ports import LOOPBACK

_DEFAULT_OPTIONS = EngineOptions()
_HARDWARE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_hardware(name: str, value: object) -> None:
    """Refuse a class of hardware that is no plain name; empty: none.

    Raises
    ------
    BadInput
    """
    if not isinstance(value, str) or (value and _HARDWARE.fullmatch(value) is None):
        raise BadInput(f"{name} is {value!r}: use letters, digits, '.', '-' and '_', such as H800")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, described. Options of one kind only are in `options`.

    Attributes
    ----------
    kind
        A name of `heddle_dask.engines.kinds.ENGINE_KINDS`, or ``package.module:object`` for a kind of another package.
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

    Raises
    ------
    BadInput
        A value that no engine can have.
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
            raise BadInput(
                f"engine devices are {named}: name {self.tp_degree}, one for each of tp_degree, or none"
            )

    @property
    def named_slots(self) -> int:
        """`slots`, where the spec must name them.

        Raises
        ------
        BadInput
            It names none.
        """
        if self.slots is None:
            raise BadInput("engine slots are not given: give the number of sequences in one batch")
        return self.slots

    @property
    def named_context_tokens(self) -> int:
        """`max_model_len`, where the spec must name it.

        Raises
        ------
        BadInput
            It names none.
        """
        if self.max_model_len is None:
            raise BadInput("engine max_model_len is not given: give the longest context in tokens")
        return self.max_model_len

    def to_mapping(self) -> dict[str, Any]:
        """A JSON-able mapping from which `from_mapping` makes an equal spec."""
        mapping = {field.name: getattr(self, field.name) for field in fields(self)}
        if not self.hardware:  # as runs were stored before there were classes
            del mapping["hardware"]
        return {**mapping, "devices": list(self.devices), "options": self.options.to_mapping()}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> EngineSpec:
        """Read a spec from parsed JSON or TOML.

        Raises
        ------
        BadInput
            A key is unknown or missing, or a value is impossible.
        """
        check_keys("engine spec", mapping, [field.name for field in fields(cls)], required=2)
        values = dict(mapping)
        values["devices"] = tuple(mapping.get("devices", ()))
        values["options"] = engine_kind(mapping["kind"]).options_type.from_mapping(mapping.get("options", {}))
        return cls(**values)
