"""Further arguments of vLLM's command line that a user gives: their form, and which are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence

from heddle_dask.core.errors import BadInput

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
    """Refuse arguments of vLLM's command line that are set here, and those with secrets.

    Raises
    ------
    BadInput
        There is one.
    """
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
    """``KEY=VALUE`` or ``KEY``, each as vLLM's command line has it.

    Raises
    ------
    BadInput
        One has no key.
    """
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
