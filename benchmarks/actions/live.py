"""Real test suites as rewards on this machine: elastic actions against one static sandbox per trajectory.

A program alternates LLM steps of an emulated engine and commands, and ends with a suite under pytest, which runs
``pytest -n`` with as many processes as it is granted CPUs (pytest-xdist). Commands and tests use CPU time, not wall
time. Engine, Dask and tests share the cores of the machine. All arms run the same trajectories; their order changes
from round to round.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client

from benchmarks.actions.rows import ActionRow
from benchmarks.emulated_rollouts import completed, emulated
from benchmarks.experiments import Study
from benchmarks.opponents import PER_TRAJECTORY
from benchmarks.tables import ratio_fields
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.strategies.presets import Strategy

COMMAND_S = 0.1
TEST_S = 0.3
"""CPU seconds of a command and of one test."""
_STEP_TOKENS = 40
_TOKEN_S = 0.01


@dataclass(frozen=True, slots=True)
class LiveArm:
    """One way to give CPUs to the calls.

    Attributes
    ----------
    actions
        Strategy of the actions.
    suite_cpus
        CPUs of a suite, least and most; ``(0, 0)``: it takes none, and runs as soon as it is called.
    processes
        Processes of a suite that takes no CPUs.
    """

    actions: str
    suite_cpus: tuple[int, int]
    processes: int = 1


def live_arms(cpus: int) -> Mapping[str, LiveArm]:
    """The arms for a machine with so many CPUs: ours first."""
    return {
        "elastic": LiveArm("elastic", (1, cpus)),
        "one sandbox of 1 CPU per trajectory": LiveArm(f"{PER_TRAJECTORY},cpus=1", (1, cpus)),
        f"one sandbox of {cpus} CPUs per trajectory": LiveArm(f"{PER_TRAJECTORY},cpus={cpus}", (1, cpus)),
        f"all at once, {cpus} processes each": LiveArm("fcfs-minimum", (0, 0), cpus),
    }


def spin(seconds: float) -> None:
    """Use a CPU for so many CPU seconds of this process."""
    began_s = time.process_time()
    while time.process_time() - began_s < seconds:
        pass


def run_suite(tests: int, processes: int) -> int:
    """Run a suite of `tests` tests of `TEST_S` CPU seconds; returns the processes.

    Parameters
    ----------
    processes
        0: as many as the action was granted CPUs.

    Raises
    ------
    RuntimeError
        A test failed, or pytest did.
    """
    used = processes or granted_cpus()
    with tempfile.TemporaryDirectory(prefix="heddle-suite-") as folder:
        lines = ["import time", "import pytest", "", f"@pytest.mark.parametrize('number', range({tests}))"]
        lines += ["def test_spin(number):", "    began_s = time.process_time()"]
        lines += [f"    while time.process_time() - began_s < {TEST_S}:", "        pass", ""]
        (Path(folder) / "test_suite.py").write_text("\n".join(lines))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-n",
            str(used if used > 1 else 0),
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=_plain_environment())
    if done.returncode:
        raise RuntimeError(f"the suite ended with {done.returncode}: {done.stdout[-500:]}")
    return used


def granted_cpus() -> int:
    """CPUs of the action in whose process this runs."""
    return int(os.environ.get("HEDDLE_CPUS", 0)) or len(os.sched_getaffinity(0))


def _plain_environment() -> dict[str, str]:
    """The environment without what would change pytest."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


class SuiteAgent:
    """Steps, commands and a suite; keeps the seconds of every call. Runs in the driver."""

    name = "suites"

    def __init__(self, arm: LiveArm, seed: int) -> None:
        self.acts_s: list[float] = []
        self.suites_s: list[float] = []
        self.processes: list[int] = []
        self._arm = arm
        self._seed = seed

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """Tasks with 1 to 6 commands and a suite of 2 to 24 tests, most of them short."""
        tasks = []
        for number in range(count):
            rng = random.Random(f"suites {self._seed} {number}")
            steps, tests = rng.randint(1, 6), min(24, max(2, round(rng.lognormvariate(1.6, 0.8))))
            tasks.append(
                Task(
                    f"suite-{number}",
                    "Run the tests.",
                    {"steps": steps, "tests": tests},
                    known_tokens=_STEP_TOKENS * (steps + 1),
                    known_tools_s=COMMAND_S * steps + TEST_S * tests,
                    max_steps=steps + 1,
                )
            )
        return tasks

    async def solve(self, task: Task, ctx: Context) -> float | None:
        """Follow the task."""
        ctx.append("user", task.prompt)
        for _ in range(task.payload["steps"]):
            await ctx.generate(max_tokens=_STEP_TOKENS, ignore_eos=True)
            await self._timed(ctx.call(spin, COMMAND_S, cpus=(1, 1)))
            ctx.append("tool", "done")
        await ctx.generate(max_tokens=_STEP_TOKENS, ignore_eos=True)
        began_s = time.perf_counter()
        cpus, processes = self._arm.suite_cpus, 0 if self._arm.suite_cpus[1] else self._arm.processes
        tests = task.payload["tests"]
        call = ctx.call(run_suite, tests, processes, cpus=cpus, kind="reward", timeout_s=600.0)
        self.processes.append(await self._timed(call))
        self.suites_s.append(time.perf_counter() - began_s)
        return 1.0

    async def _timed(self, call: Any) -> Any:
        began_s = time.perf_counter()
        result = await call
        self.acts_s.append(time.perf_counter() - began_s)
        return result


@dataclass(slots=True)
class _Measured:
    """Figures of one arm, by round."""

    act_s: list[float] = field(default_factory=list)
    p99_s: list[float] = field(default_factory=list)
    suite_s: list[float] = field(default_factory=list)
    makespan_s: list[float] = field(default_factory=list)
    processes: list[float] = field(default_factory=list)


async def measure_live(
    model: str | Path,
    *,
    trajectories: int = 16,
    rounds: int = 3,
    cpus: int = 2,
    seed: int = 0,
    arms: Mapping[str, LiveArm] | None = None,
    on_progress: Callable[[str], None] = lambda message: None,
) -> list[ActionRow]:
    """A row per arm: medians over the rounds; the ratio is that of the makespans to ours, round by round."""
    chosen = dict(arms or live_arms(cpus))
    measured = {name: _Measured() for name in chosen}
    order = random.Random(seed)
    for number in range(rounds):
        for name in order.sample(list(chosen), len(chosen)):
            on_progress(f"round {number + 1} of {rounds}: {name}")
            await _roll(model, chosen[name], trajectories, cpus, seed + number, measured[name])
    ours = measured[next(iter(chosen))]
    return [_row(name, one, ours, trajectories, cpus) for name, one in measured.items()]


async def _roll(model: str | Path, arm: LiveArm, trajectories: int, cpus: int, seed: int, measured: _Measured) -> None:
    agent = SuiteAgent(arm, seed)
    spec = emulated(str(model), _TOKEN_S, slots=trajectories, max_model_len=4_096, seed=seed)
    async with (
        LocalRolloutCluster(engines=1, tool_cpus=cpus, dashboard=False, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        strategy = Strategy("heddle", ("predictor=oracle", f"actions={arm.actions}"))
        budget = Budget(max_context_tokens=4_096)
        rollout = Rollout(client, env=agent, model=model, engines=spec, strategy=strategy, budget=budget, seed=seed)
        async with rollout:
            began_s = time.perf_counter()
            batch = await rollout.run(trajectories)
            makespan_s = time.perf_counter() - began_s
    completed(batch)
    measured.act_s.append(statistics.fmean(agent.acts_s))
    measured.p99_s.append(sorted(agent.acts_s)[int(0.99 * (len(agent.acts_s) - 1))])
    measured.suite_s.append(statistics.fmean(agent.suites_s))
    measured.processes.append(statistics.fmean(agent.processes))
    measured.makespan_s.append(makespan_s)


def _row(name: str, one: _Measured, ours: _Measured, trajectories: int, cpus: int) -> ActionRow:
    ratios = [act / own for act, own in zip(one.act_s, ours.act_s, strict=True)]
    spans = [span / own for span, own in zip(one.makespan_s, ours.makespan_s, strict=True)]
    return ActionRow(
        "live",
        name,
        trajectories,
        act_mean_s=statistics.median(one.act_s),
        act_p99_s=statistics.median(one.p99_s),
        step_s=statistics.median(one.makespan_s),
        cores=cpus,
        **{**ratio_fields(ratios), "ratio": statistics.median(ratios)},
        seeds=len(one.act_s),
        note=f"makespan times {statistics.median(spans):.2f}; {statistics.fmean(one.processes):.2f} processes a suite",
    )


def live_rows(study: Study) -> list[ActionRow]:
    """The rows of ``python -m benchmarks actions --experiment live``: a round for each seed."""
    rounds, seed = len(study.seeds), study.seeds[0]
    return asyncio.run(measure_live(study.model, rounds=rounds, seed=seed, on_progress=study.runner.say))
