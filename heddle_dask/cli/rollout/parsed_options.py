"""Options of ``heddle rollout`` from what was typed to what `Rollout` takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from heddle_dask.apis.rewarded import rewarded
from heddle_dask.cli.cluster_choice import LocalShape, affinity_of_file, parsed_hardware
from heddle_dask.cli.engine_option import import_from_here
from heddle_dask.cli.field_options import Asked
from heddle_dask.cli.shared_options import whole_numbers
from heddle_dask.core.errors import BadInput
from heddle_dask.core.toml_table import read_toml
from heddle_dask.cost.engine_cost import profile_names
from heddle_dask.cost.measured import MeasuredTable, table_names
from heddle_dask.cost.published import model_of
from heddle_dask.engines.spec import engine_kind
from heddle_dask.environments.base import Environment
from heddle_dask.environments.loading import load_environment
from heddle_dask.environments.mix import mixed_environment
from heddle_dask.strategies.presets import Strategy


def environment_of(asked: Asked, *, by_value: bool) -> Environment:
    """The environments of ``--env``, with the reward of ``--reward``; `by_value`: their modules are sent to workers."""
    here = import_from_here()
    scales = {"token_scale": asked["token_scale"], "tool_scale": asked["tool_scale"]}
    given = {name: value for name, value in scales.items() if value is not None}
    return mixed_environment(
        asked["env"],
        partial(_loaded, options=given, reward=asked["reward"], here=here if by_value else ""),
    )


def _loaded(spec: str, *, options: dict[str, float], reward: str | None, here: str) -> Environment:
    """One environment, with the reward that was given in place of its own; `here` is sent to workers by value."""
    environment = load_environment(spec, options=options)
    if here:
        for name in spec.split(":"):  # agent:NAME:package.module:TASKS
            _send_by_value(name, here)
    if reward is None:
        return environment
    scored = rewarded(environment, reward)
    if here and not reward.startswith(("http://", "https://")):
        _send_by_value(reward.partition(":")[0], here)
    return scored


def _send_by_value(name: str, here: str) -> None:
    """Pickle a module of this directory by value: workers of another cluster cannot import it."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if module is not None and path is not None and Path(path).parent.is_relative_to(here):
        cloudpickle.register_pickle_by_value(module)


def asked_strategy(asked: Asked) -> Strategy:
    return Strategy(asked["strategy"], asked["overrides"], asked["weight"])


def local_shape(asked: Asked) -> LocalShape:
    """The cluster on this machine that the options ask for; with classes, one engine for each of their numbers."""
    hardware = parsed_hardware(asked["hardware"])
    engines = asked["engines"]
    if hardware is not None:
        if asked["scheduler"] is not None:
            raise BadInput("--hardware is of engines on this machine: with --scheduler workers say it themselves")
        total = sum(hardware.values())
        if "engines" not in asked.by_default and total != engines:
            raise BadInput(f"--hardware {asked['hardware']} is of {total} engines, --engines says {engines}: drop one")
        engines = total
    return LocalShape(
        engines,
        asked["slots"],
        asked["tool_workers"],
        asked["tool_cpus"],
        hardware=hardware,
        engines_per_gpu=asked["engines_per_gpu"],
    )


def with_affinity(strategy: Strategy, cluster: Path | None) -> Strategy:
    """The strategy with the affinity of a cluster file, unless the command line gives another one."""
    said = affinity_of_file(cluster)
    if not said or any(text.startswith("affinity=") for text in strategy.overrides):
        return strategy
    return Strategy(strategy.preset, (*strategy.overrides, *said), strategy.weight)


def check_cost(cost: Mapping[str, Any] | None, model: str, engine: str) -> None:
    """Refuse, before anything starts, a measured table that cannot be read or is of another model than the engines'.

    An engine that takes the cost it is given may have that of any model.
    """
    if cost is None or "table" not in cost:
        return
    table = MeasuredTable.load(str(cost["table"]))
    if not engine_kind(engine).takes_cost:
        table.check(model_of(model), table.degree)


def check_gpus(engines: int, per_gpu: int, trainer_gpus: int, gpus: Sequence[str]) -> None:
    """Refuse more engines and ranks of a trainer than this machine has GPUs for.

    Where no TP degrees are given an engine takes one, or shares it with others; each rank takes one.
    """
    needed = -(-engines // per_gpu) + trainer_gpus
    if needed <= len(gpus):
        return
    asked = f"--engines {engines}" + (f" with {per_gpu} on each GPU" if per_gpu > 1 else "")
    cures = ["use fewer engines"]
    if trainer_gpus:
        asked += f" and {trainer_gpus} rank(s) of the trainer"
        cures.append("--trainer shares_gpus=true with a --gpu-memory-utilization that leaves room for the trainer")
    seen = f" ({', '.join(gpus)})" if gpus else ""
    raise BadInput(
        f"{asked} need {needed} GPUs, this process sees {len(gpus)}{seen}: {', '.join(cures)}, or set "
        "CUDA_VISIBLE_DEVICES"
    )


def parsed_degrees(text: str | None) -> Literal["auto"] | tuple[int, ...] | None:
    """``auto``, or whole numbers separated by commas."""
    if text is None:
        return None
    return "auto" if text == "auto" else tuple(whole_numbers("--tp", text, "2,1,1, or use auto"))


def parsed_template_kwargs(text: str | None) -> dict[str, Any]:
    """Variables of the chat template from a JSON object."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(f"--chat-template-kwargs {text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInput(f"--chat-template-kwargs {text!r}: give a JSON object of names and values")
    return value


def parsed_cost(text: str | None) -> dict[str, Any] | None:
    """A cost in a form of `cost_from_mapping`: a shipped profile, a measured table, or the content of a TOML file."""
    if text is None:
        return None
    if text in profile_names():
        return {"profile": text}
    if text in table_names() or text.endswith(".json"):
        return {"table": text if text in table_names() else str(Path(text).resolve())}
    if text.endswith(".toml"):
        return read_toml(Path(text), "--cost")
    raise BadInput(
        f"--cost {text!r} is unknown: give a profile ({', '.join(profile_names())}), a table "
        f"({', '.join(table_names()) or 'FILE.json'}) or a TOML file"
    )
