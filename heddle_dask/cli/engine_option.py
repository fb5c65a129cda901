"""``--engine``: a kind of the registry, or one of the user's own modules; ``--model``; and options of vLLM engines."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from heddle_dask.cli.shared_options import COUNT, POSITIVE, F, in_order
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.defaults import SMALL_CONTEXT_TOKENS, TINY_AGENT, model_context_tokens, shipped_model
from heddle_dask.engines.spec import DEFAULT_KIND, ENGINE_KINDS, EngineOptions, engine_kind
from heddle_dask.engines.vllm_command import Logprobs, extra_arguments

_HUB = re.compile(r"[\w.-]+/[\w.-]+\Z")  # OWNER/NAME
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")


def engine_option(default: str = DEFAULT_KIND, *others: str) -> Callable[[F], F]:
    """The option, checked when the command line is read."""
    named = ", ".join((*ENGINE_KINDS, *others, "package.module:object"))

    def checked(context: click.Context, parameter: click.Parameter, value: str) -> str:
        if value in others or value in ENGINE_KINDS:
            return value
        if ":" not in value:
            raise BadInput(f"--engine {value}: use {named}")
        import_from_here()
        engine_kind(value)
        return value

    return click.option(
        "--engine", default=default, show_default=True, callback=checked, help=f"Kind of engine: {named}."
    )


T = TypeVar("T", str, tuple[str, ...])


def gpu_options(function: F) -> F:
    """How engines use GPUs; the same for every command that starts engines."""
    options = [
        click.option("--engines-per-gpu", type=COUNT, default=None, help="Engines that share each GPU [default: 1]."),
        click.option(
            "--gpu-memory-utilization",
            type=click.FloatRange(min=0, min_open=True, max=1),
            default=None,
            help="Share of a GPU's memory for one engine of vLLM [default: vLLM's own, divided by its engines].",
        ),
        click.option(
            "--kv-cache-gib",
            type=POSITIVE,
            default=None,
            help="KV cache of an engine on each GPU [default: what its share of the memory leaves; on CPUs 1].",
        ),
        click.option("--quantization", default=None, help="vLLM's name of a method [default: the model's own]."),
        click.option(
            "--engine-arg",
            "engine_args",
            multiple=True,
            help="KEY=VALUE or KEY: further argument of vLLM; stored with the run, so no secrets. Of an emulated "
            "engine: script=FILE.",
        ),
    ]
    add: Callable[[F], F] = in_order(options)
    return add(function)


LOGPROBS = click.option(
    "--logprobs",
    type=click.Choice(get_args(Logprobs)),
    default=None,
    help="raw: the model's; processed: of what was sampled from [default: raw].",
)


def parsed_vllm_options(
    engine: str, asked: Mapping[str, Any], base: EngineOptions | None = None
) -> EngineOptions | None:
    """The options of `gpu_options` and `LOGPROBS` as a vLLM engine takes them, on top of `base`; `base` without any.

    Parameters
    ----------
    asked
        Values of the command's options, by name.
    """
    names = ("gpu_memory_utilization", "kv_cache_gib", "quantization", "logprobs")
    given = {name: asked[name] for name in names if asked.get(name) is not None}
    script = _asked_script(engine, asked["engine_args"])
    extra_args = () if script else extra_arguments(asked["engine_args"])
    if script:
        given["script"] = script
    if extra_args:
        given["extra_args"] = (*getattr(base, "extra_args", ()), *extra_args)
    if not given:
        return base
    kind = engine_kind(engine)
    lacking = [name for name in given if name not in kind.options_type.names()]
    if lacking:
        option = lacking[0].replace("extra_args", "engine_arg").replace("_", "-")
        raise BadInput(f"--{option} is an option of vLLM engines, not of {kind.name} ones: leave it out")
    return kind.options_type.from_mapping(given) if base is None else replace(base, **given)


def _asked_script(engine: str, arguments: Sequence[str]) -> str:
    """The path in ``script=FILE`` where engines of the kind take a script; empty: none is asked for."""
    if len(arguments) != 1 or "script" not in engine_kind(engine).options_type.names():
        return ""
    name, _, path = arguments[0].partition("=")
    # Engines have other working directories.
    return os.path.abspath(path) if name == "script" and path else ""


def import_from_here() -> str:
    """Let modules of the working directory be imported, as ``python -m`` does; returns the directory."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    return here


def strategies_from_here(context: click.Context, parameter: click.Parameter, value: T) -> T:
    """Callback of an option that names strategies: those of the working directory can be imported.

    A colon stands before a class (``package.module:Class``), or before the parts of a preset, where it does no harm.
    """
    if any(":" in text for text in ([value] if isinstance(value, str) else value or ())):
        import_from_here()
    return value


def chosen_model(model: str | None, engine: str, options: EngineOptions | None = None) -> str:
    """The model directory asked for, checked, or the shipped one.

    The path is made absolute: workers and later readers of the run have other working directories. The emulated
    engine needs no weights, but a directory for the tokenizer; so do `options` of vLLM that make weights up.
    """
    if model is None or (model == TINY_AGENT and not Path(model).exists()):
        return str(shipped_model())
    kind = engine_kind(engine)
    kind.check_model(model, options or kind.options_type())
    if not Path(model).is_dir():
        hint = "give a directory with a tokenizer"
        if _HUB.match(model):
            hint += f"; download a model of a hub first: hf download {model} --local-dir DIR"
        raise BadInput(f"model directory {model} does not exist: {hint}")
    if not any(next(Path(model).glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise BadInput(f"model directory {model} is no model: it has no tokenizer (tokenizer.json)")
    return str(Path(model).resolve())


def context_limit(model: str, asked: int | None) -> int:
    """Longest context: as asked, else what the model's configuration takes, at most `SMALL_CONTEXT_TOKENS`."""
    if asked is not None:
        return asked
    return min(SMALL_CONTEXT_TOKENS, model_context_tokens(model) or SMALL_CONTEXT_TOKENS)
