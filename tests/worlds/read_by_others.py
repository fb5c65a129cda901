"""Reads exported trajectories by the classes of their receivers, in a process of its own: `python FILE KIND EXPORT`.

The wheels lie in build/peers, without what they need: of their packages, modules are loaded that need pydantic only.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

SITE = Path(__file__).parents[2] / "build/peers/site"


def bare(name: str) -> types.ModuleType:
    """A package whose __init__ is not run."""
    module = types.ModuleType(name)
    module.__path__ = [str(SITE / name.replace(".", "/"))]
    sys.modules[name] = module
    return module


def harbor(path: Path) -> list[Any]:
    for name in ("harbor", "harbor.models"):
        bare(name)
    trajectory = importlib.import_module("harbor.models.trajectories").Trajectory
    return [json.loads(trajectory.model_validate_json(each.read_text()).model_dump_json()) for each in path.iterdir()]


def openenv(path: Path) -> list[Any]:
    for name in ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.capture"):
        bare(name)
    trace = importlib.import_module("openenv.core.harness.training").TrainingTrace
    return [trace.model_validate_json(line).model_dump() for line in path.read_text().splitlines()]


def trl(path: Path) -> list[Any]:
    """By TRL's own conversion of OpenEnv's traces into what its asynchronous trainer trains on."""
    # Without its trainer, which takes seconds to import.
    experimental = importlib.import_module("trl.experimental")
    bare("trl.experimental.async_grpo").__path__ = [str(Path(experimental.__path__[0], "async_grpo"))]
    importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
    for name in ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.capture"):
        bare(name)
    # Types alone, of servers that are not needed here.
    for name in ("openenv.core.harness", "openenv.core.harness.capture.upstream", "openenv.core.llm_client"):
        bare(name).__dict__["__getattr__"] = lambda name: type(name, (), {})
    trace = importlib.import_module("openenv.core.harness.training").TrainingTrace
    theirs = importlib.import_module("trl.experimental.async_grpo.openenv_harness")
    found = []
    for line in path.read_text().splitlines():
        turns = theirs._turns_from_training_trace(trace.model_validate_json(line))
        sequences, _ = theirs._chain_to_sequences(turns, "rollout", 0)
        found.append([[list(one.input_ids), list(one.completion_mask), list(one.old_log_probs)] for one in sequences])
    return found


def verifiers(path: Path) -> list[Any]:
    from pydantic import BaseModel

    class Foreign(BaseModel, extra="allow"):
        """Where an agent ran: nothing of it is read."""

    bare("verifiers").__version__ = "0.4.0"  # type: ignore[attr-defined]
    bare("verifiers.v1")
    bare("verifiers.v1.runtimes").__getattr__ = lambda name: Foreign  # type: ignore[attr-defined]
    trace = importlib.import_module("verifiers.v1.trace").WireTrace
    found = [trace.model_validate_json(line) for line in path.read_text().splitlines()]
    return [
        {
            "record": each.to_record(),
            "reward": each.reward,
            "turns": each.num_turns,
            "output_tokens": each.usage.completion_tokens if each.usage else 0,
            "branches": [[one.token_ids, one.sampled_mask, one.logprobs] for one in each.branches],
        }
        for each in found
    ]


if __name__ == "__main__":
    sys.path.append(str(SITE))
    _, kind, export = sys.argv
    print(json.dumps({"harbor": harbor, "openenv": openenv, "trl": trl, "verifiers": verifiers}[kind](Path(export))))
