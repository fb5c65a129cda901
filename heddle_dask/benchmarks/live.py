"""Strategies side by side on real engines: makespan, throughput and the share of a lower bound reached.

All arms of a repeat share engines and take turns, so that a drifting machine meets all alike; made-up tokens differ
from run to run, so that no arm finds another's prefixes cached. The work is a replayed trace: each step generates
exactly the trace's tokens and each tool takes its seconds. Learned predictors start warm, from the trace's trajectories
of other groups, as those of a training run do from its earlier steps; ``warm=False`` starts them with nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.cost.engine_cost import EngineCost, load_profile
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.replay import ReplayEnvironment
from heddle_dask.live.batch import Batch
from heddle_dask.live.capacity import Patience, wait_for_capacity
from heddle_dask.live.local_cluster import LocalRolloutCluster
from heddle_dask.live.rollout import Rollout
from heddle_dask.live.rollout_worker import PLUGIN_NAME as ENGINE_PLUGIN
from heddle_dask.live.rollout_worker import RolloutWorker
from heddle_dask.live.scheduler_plugin import HeddleScheduler
from heddle_dask.live.services import Budget
from heddle_dask.live.tool_worker import ToolWorker
from heddle_dask.sim.bound import makespan_bound
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.rollout import Arm
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.workloads.planned import (
    PlannedTrajectory,
    TraceDoesNotFit,
    is_replayable,
    planned_trace,
)
from heddle_dask.workloads.traces import read_traces

ARM_PREFIX = "vllm-router/"
"""What the names of arms of that router start with; its policy follows."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Trajectories of one trace file, scaled."""

    trace: Path
    tasks: int
    token_scale: float
    tool_scale: float
    seed: int

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.trace.name.removesuffix(".gz").removesuffix(".jsonl")

    def environment(self, salt: str = "") -> ReplayEnvironment:
        """A fresh environment over the file; another salt makes up other tokens."""
        return ReplayEnvironment(
            self.trace, token_scale=self.token_scale, tool_scale=self.tool_scale, salt=salt
        )

    def planned(self, max_context_tokens: int) -> tuple[list[PlannedTrajectory], list[PlannedTrajectory]]:
        """What is replayed, and the file's trajectories of all other groups, from which a predictor may learn."""
        environment = self.environment()
        chosen = {task.task_id for task in environment.tasks(self.tasks, self.seed)}
        traces = [trace for trace in read_traces(self.trace) if is_replayable(trace)]
        groups = {trace.group_id for trace in traces if trace.trajectory_id in chosen}
        drawn: list[PlannedTrajectory] = []
        others: list[PlannedTrajectory] = []
        plan = functools.partial(
            planned_trace,
            domain=environment.name,
            token_scale=self.token_scale,
            tool_scale=self.tool_scale,
            max_context_tokens=max_context_tokens,
        )
        for trace in traces:
            if trace.trajectory_id in chosen:
                drawn.append(plan(trace))
            elif trace.group_id not in groups:
                with contextlib.suppress(TraceDoesNotFit):
                    others.append(plan(trace))
        return drawn, others


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines: how many, and what each is.

    Attributes
    ----------
    cost
        What one engine is believed to cost; exact for emulated ones.
    """

    engines: int
    spec: EngineSpec
    cost: EngineCost


@dataclass(frozen=True, slots=True)
class LiveRow:
    """One run."""

    workload: str
    arm: str
    repeat: int
    tokens_per_s: float
    makespan_s: float
    bound_share: float
    preemptions: int
    moves: Mapping[str, Any]


def lower_bound_s(planned: Sequence[PlannedTrajectory], fleet: Fleet) -> float:
    """Seconds that no strategy can go below, if the engines cost what is believed of them (`sim.bound`)."""
    capacity = fleet.cost.capacity_tokens
    spec = EngineDescription(
        EngineId("any"), fleet.spec.slots, fleet.spec.max_model_len, kv_capacity_tokens=capacity
    )
    bound = makespan_bound(planned, SimulatedFleet(((spec, fleet.cost),) * fleet.engines))
    return bound.seconds * (fleet.spec.time_scale if fleet.spec.kind == "emulated" else 1.0)


async def measure_live(
    workloads: Sequence[Workload],
    fleet: Fleet,
    arms: Sequence[Arm],
    *,
    repeats: int,
    warm: bool = True,
    on_row: Callable[[LiveRow], None] = lambda row: None,
) -> list[LiveRow]:
    """Run every arm on every workload `repeats` times, arms in turn.

    Raises
    ------
    BadInput
        A trace without the fields it needs, an unknown preset or part.
    """
    rows = []
    for workload in workloads:
        planned, others = workload.planned(fleet.spec.max_model_len)
        bound_s = lower_bound_s(planned, fleet)
        with tempfile.TemporaryDirectory(prefix="heddle-bench-") as directory:
            learnt = _learn(others, Path(directory) / "predictor") if warm else None
            for repeat in range(repeats):
                turn = repeat % len(arms)
                async with _engines(fleet) as client:
                    for arm in (*arms[turn:], *arms[:turn]):
                        row = await _run(client, workload, fleet, arm, repeat, bound_s, learnt)
                        rows.append(row)
                        on_row(row)
    return rows


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


@asynccontextmanager
async def _engines(fleet: Fleet) -> AsyncIterator[Client]:
    """A cluster whose engines outlive the sessions on it."""
    async with (
        LocalRolloutCluster(
            engines=fleet.engines, tool_cpus=4096, dashboard=False, asynchronous=True
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.register_plugin(HeddleScheduler())
        await client.register_plugin(ToolWorker())
        await client.register_plugin(RolloutWorker(fleet.spec))
        # Engines that do not answer yet would be taken for missing, and belong to the first session then.
        await wait_for_capacity(client, fleet.engines, Patience())
        yield client


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
        from heddle_dask.benchmarks.router import route

        policy = arm.preset.removeprefix(ARM_PREFIX)
        urls = [url for url in (await client.run(_engine_url)).values() if url]
        return await route(workload, fleet, urls, policy, repeat, bound_s, arm.overrides)
    rollout = Rollout(
        client,
        env=workload.environment(salt=f"{arm.name} {repeat} "),
        model=fleet.spec.model,
        engine=fleet.spec,
        engines=fleet.engines,
        cost=fleet.cost.to_mapping(),
        strategy=arm.preset,
        overrides=_overrides(arm, learnt),
        budget=Budget(
            max_steps=100_000,
            max_context_tokens=fleet.spec.max_model_len,
            max_step_tokens=fleet.spec.max_model_len,
        ),
        seed=workload.seed,
    )
    batch = await rollout.run(workload.tasks)
    return _row(workload, arm, repeat, bound_s, batch)


def _engine_url(dask_worker: Any) -> str:
    """On a worker: where its engine answers; nothing on one without an engine."""
    plugin = dask_worker.plugins.get(ENGINE_PLUGIN)
    return "" if plugin is None or plugin.client is None else str(plugin.client.base_url)


def _overrides(arm: Arm, learnt: Path | None) -> tuple[str, ...]:
    """The arm's own; its learned predictor starts from `learnt` unless it says where from."""
    choice = build_strategies(arm.preset, overrides=arm.overrides).predictor
    if learnt is None or choice is None or choice.name != "xgboost" or choice.options["warm"]:
        return arm.overrides
    return (*arm.overrides, f"predictor=xgboost,warm={learnt}")


def _row(workload: Workload, arm: Arm, repeat: int, bound_s: float, batch: Batch) -> LiveRow:
    bad = [record for record in batch if record.status != "completed"]
    if bad:
        raise RuntimeError(
            f"{arm.name}: {len(bad)} of {len(batch)} did not complete: {bad[0].cause}: {bad[0].detail}"
        )
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


def as_json(rows: Sequence[LiveRow]) -> dict[str, object]:
    """The JSON object of ``heddle bench live``."""
    return {"rows": [asdict(row) for row in rows]}


def fleet_of(
    kind: str,
    model: str,
    engines: int,
    slots: int,
    *,
    profile: str,
    time_scale: float,
    kv_transfer: bool,
    max_model_len: int,
    kv_capacity_tokens: int = 0,
) -> Fleet:
    """Engines of one kind; emulated ones take the time of `profile`, with its KV capacity unless one is given.

    Raises
    ------
    BadInput
        Unknown kind or profile.
    """
    if kind not in ("vllm", "emulated"):
        raise BadInput(f"--engine {kind}: use vllm or emulated")
    cost = load_profile(profile)
    if kv_capacity_tokens:
        cost = replace(cost, capacity_tokens=kv_capacity_tokens)
    # Replayed tokens mean nothing to the model, so it may run beyond the positions that it was trained on.
    longer = ("--hf-overrides", json.dumps({"max_position_embeddings": max_model_len}))
    spec = EngineSpec(
        kind,  # type: ignore[arg-type]
        model,
        slots=slots,
        max_model_len=max_model_len,
        cost=cost.to_mapping() if kind == "emulated" else None,
        extra_args=longer if kind == "vllm" else (),
        time_scale=time_scale if kind == "emulated" else 1.0,
        kv_transfer=kv_transfer,
    )
    return Fleet(engines, spec, cost)
