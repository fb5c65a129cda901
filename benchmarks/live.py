"""Strategies side by side on real engines: makespan, throughput and the share of a lower bound reached.

All arms of a repeat share engines and take turns, so that a drift of the machine affects all equally; synthetic
tokens differ between runs, so that no arm finds another's prefixes cached. The work is a replayed trace: each step
generates exactly the trace's tokens and each tool takes its seconds. Learned predictors start warm, from the trace's
trajectories of other groups, as in a training run from its earlier steps; with ``warm=False`` they start cold.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from distributed import Client

from benchmarks.emulated_rollouts import completed
from benchmarks.live_engines import running_engines
from benchmarks.live_setup import ARM_PREFIX, Fleet, LiveRow, Workload, lower_bound_s
from benchmarks.process_usage import cpu_by_kind, cpu_since
from benchmarks.router import route
from heddle_dask.live.driver.batch import Batch
from heddle_dask.live.driver.options import Budget, Engines, Sampling
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.worker.rollout_worker import PLUGIN_NAME as ENGINE_PLUGIN
from heddle_dask.sim.rollout import Arm
from heddle_dask.strategies.presets import Strategy, build_strategies
from heddle_dask.workloads.planned import (
    PlannedTrajectory,
)

_TOOL_CPUS = 4096  # recorded tools only wait


async def measure_live(
    workloads: Sequence[Workload],
    fleet: Fleet,
    arms: Sequence[Arm],
    *,
    repeats: int,
    warm: bool = True,
    on_row: Callable[[LiveRow], None] = lambda row: None,
    has: Callable[[str, str, int], bool] = lambda workload, arm, repeat: False,
) -> None:
    """Run every arm on every workload `repeats` times, arms in turn.

    Parameters
    ----------
    on_row
        Takes the row of each run as it ends.
    has
        Whether the row of a workload, an arm and a repeat is there already, and not to be run again.

    Raises
    ------
    BadInput
        A trace lacks a required field, or a preset or part is unknown.
    """
    if any(arm.preset.startswith(ARM_PREFIX) for arm in arms):
        # The router speaks TCP only, and all arms share the engines.
        fleet = replace(fleet, spec=replace(fleet.spec, tcp=True))
    # All first: a bad trace is refused before the first run.
    plans = [workload.planned(fleet.spec.named_context_tokens) for workload in workloads]
    for workload, (planned, others) in zip(workloads, plans, strict=True):
        bound_s, steps = lower_bound_s(planned, fleet), sum(len(plan.steps) for plan in planned)
        with tempfile.TemporaryDirectory(prefix="heddle-bench-") as directory:
            learnt = _learn(others, Path(directory) / "predictor") if warm else None
            for repeat in range(repeats):
                turn = repeat % len(arms)
                missing = [arm for arm in (*arms[turn:], *arms[:turn]) if not has(workload.name, arm.name, repeat)]
                if not missing:
                    continue
                async with running_engines(fleet.engines, fleet.spec, _TOOL_CPUS) as client:
                    for arm in missing:
                        row = await _run(client, workload, fleet, arm, repeat, bound_s, learnt)
                        on_row(replace(row, steps=steps))


def _learn(others: Sequence[PlannedTrajectory], path: Path) -> Path | None:
    """A predictor that has learnt from `others`, saved; None when there are none."""
    if not others:
        return None
    from heddle_dask.predictors.from_steps import finished_from_steps, past_of
    from heddle_dask.predictors.learned import LearnedPredictor
    from heddle_dask.predictors.stored import save_predictor

    predictor = LearnedPredictor()
    predictor.warm_start(finished_from_steps(past_of(plan)) for plan in others)
    save_predictor(predictor, path)
    return path


async def _run(
    client: Client,
    workload: Workload,
    fleet: Fleet,
    arm: Arm,
    repeat: int,
    bound_s: float,
    learnt: Path | None,
) -> LiveRow:
    if arm.preset.startswith(ARM_PREFIX):
        policy = arm.preset.removeprefix(ARM_PREFIX)
        urls = [url for url in (await client.run(_engine_url)).values() if url]
        return await route(workload, fleet, urls, policy, repeat, bound_s, arm.overrides)
    rollout = Rollout(
        client,
        env=workload.environment(salt=f"{arm.name} {repeat} ", max_context_tokens=fleet.spec.named_context_tokens),
        model=fleet.spec.model,
        engines=Engines(
            spec=fleet.spec,
            count=fleet.engines,
            cost=fleet.spec.options.cost or fleet.cost.to_mapping(),
        ),
        strategy=Strategy(arm.preset, _overrides(arm, learnt)),
        # As the client of the routers asks (`router_client`).
        sampling=Sampling(seeded=True),
        budget=Budget(
            max_steps=100_000,
            max_context_tokens=fleet.spec.named_context_tokens,
            max_step_tokens=fleet.spec.named_context_tokens,
        ),
        seed=workload.seed,
    )
    before_s = cpu_by_kind()
    batch = await rollout.run(workload.tasks)
    return replace(_row(workload, arm, repeat, bound_s, batch), cpu_s=cpu_since(before_s))


def _engine_url(dask_worker: Any) -> str:
    """Runs on a worker: the URL of its engine; empty without an engine."""
    plugin = dask_worker.plugins.get(ENGINE_PLUGIN)
    return "" if plugin is None or plugin.client is None else str(plugin.client.address.url)


def _overrides(arm: Arm, learnt: Path | None) -> tuple[str, ...]:
    """The arm's overrides, with `learnt` as the warm start of its learned predictor unless it names another."""
    choice = build_strategies(arm.preset, overrides=arm.overrides).predictor
    if learnt is None or choice is None or choice.name != "xgboost" or choice.options["warm"]:
        return arm.overrides
    return (*arm.overrides, f"predictor=xgboost,warm={learnt}")


def _row(workload: Workload, arm: Arm, repeat: int, bound_s: float, batch: Batch) -> LiveRow:
    completed(batch)
    first_s = min(record.started_s for record in batch)
    makespan_s = max(record.finished_s for record in batch) - first_s
    return LiveRow(
        workload=workload.name,
        arm=arm.name,
        repeat=repeat,
        tokens_per_s=round(batch.generated_tokens / makespan_s, 1),
        makespan_s=round(makespan_s, 3),
        bound_share=round(bound_s / makespan_s, 4),
        preemptions=sum(step.preemptions for record in batch for step in record.steps),
        moves=dict(batch.moves),
    )


def summary(rows: Sequence[LiveRow]) -> list[tuple[str, str, float, float, float, float]]:
    """Workload, arm, median tokens/s, least, most, median share of the bound; best arm of a workload first."""
    out = []
    for workload in dict.fromkeys(row.workload for row in rows):
        mine = [row for row in rows if row.workload == workload]
        table = []
        for arm in dict.fromkeys(row.arm for row in mine):
            rates = [row.tokens_per_s for row in mine if row.arm == arm]
            shares = [row.bound_share for row in mine if row.arm == arm]
            table.append((workload, arm, median(rates), min(rates), max(rates), median(shares)))
        out += sorted(table, key=lambda line: -line[2])
    return out


def cpu_per_step_ms(rows: Sequence[LiveRow]) -> list[tuple[str, str, dict[str, float]]]:
    """Workload, arm, and CPU milliseconds for each LLM step and the tool call after it, by kind of process."""
    out = []
    for workload, arm in dict.fromkeys((row.workload, row.arm) for row in rows if row.cpu_s):
        mine = [row for row in rows if (row.workload, row.arm) == (workload, arm) and row.cpu_s]
        steps = sum(row.steps for row in mine)
        kinds = sorted({kind for row in mine for kind in row.cpu_s})
        used_s = {kind: sum(row.cpu_s.get(kind, 0.0) for row in mine) for kind in kinds}
        out.append((workload, arm, {kind: 1000 * used_s[kind] / max(1, steps) for kind in kinds}))
    return out


def outlasted_moves(rows: Sequence[LiveRow]) -> list[tuple[str, str, int, int, int]]:
    """Workload, arm, moves, moves shorter than their tool call, and how many of these a step waited for."""
    out = []
    for workload, arm in dict.fromkeys((row.workload, row.arm) for row in rows):
        kinds = [kind for row in rows if (row.workload, row.arm) == (workload, arm) for kind in row.moves.values()]
        started, exposed, late = (sum(kind[name] for kind in kinds) for name in ("started", "exposed", "late"))
        if started:
            out.append((workload, arm, started, started - (exposed - late), late))
    return out
