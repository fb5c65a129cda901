"""Strategies side by side on real engines: makespan, throughput and the share of a lower bound reached.

Every run has a cluster and engines of its own, cold; the arms take turns, so that a drifting machine meets all alike.
The work is a replayed trace: each step generates exactly the trace's tokens and each tool takes its seconds.

The bound (a makespan that no order and no placement can beat) is the larger of: the longest trajectory alone on an
empty engine, its tools included; all tokens at the best rate of all engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import EngineCost, load_profile
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Task
from heddle_dask.environments.replay import ReplayEnvironment
from heddle_dask.live.local_cluster import LocalRolloutCluster
from heddle_dask.live.rollout import Rollout
from heddle_dask.live.services import Budget
from heddle_dask.workloads.planned import plan_replay
from heddle_dask.workloads.traces import read_traces


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

    def environment(self) -> ReplayEnvironment:
        """A fresh environment over the file."""
        return ReplayEnvironment(self.trace, token_scale=self.token_scale, tool_scale=self.tool_scale)


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
class Arm:
    """A preset with some of its parts replaced; written ``preset:part=name,option=value:…``."""

    name: str
    preset: str
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read the written form."""
        preset, *overrides = text.split(":")
        return cls(text, preset, tuple(overrides))


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


def lower_bound_s(workload: Workload, fleet: Fleet, max_context_tokens: int) -> float:
    """Seconds that no strategy can go below; see the module."""
    traces = {trace.trajectory_id: trace for trace in read_traces(workload.trace)}
    tasks: Sequence[Task] = workload.environment().tasks(workload.tasks, workload.seed)
    alone_s = fleet.cost.span_s(1, 1, 0, 0)
    slots = fleet.spec.slots
    best_tokens_per_s = max(batch / fleet.cost.span_s(1, batch, 0, 0) for batch in range(1, slots + 1))
    longest_s, tokens = 0.0, 0
    for task in tasks:
        plan = plan_replay(
            traces[task.task_id],
            token_scale=workload.token_scale,
            tool_scale=workload.tool_scale,
            max_context_tokens=max_context_tokens,
        )
        generated = sum(step.generated_tokens for step in plan.steps)
        tools_s = sum(step.tool_s for step in plan.steps[:-1])
        longest_s = max(longest_s, generated * alone_s + tools_s)
        tokens += generated
    scale = fleet.spec.time_scale if fleet.spec.kind == "emulated" else 1.0
    return scale * max(longest_s, tokens / (best_tokens_per_s * fleet.engines))


async def measure_live(
    workloads: Sequence[Workload],
    fleet: Fleet,
    arms: Sequence[Arm],
    *,
    repeats: int,
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
        bound_s = lower_bound_s(workload, fleet, fleet.spec.max_model_len)
        for repeat in range(repeats):
            turn = repeat % len(arms)
            for arm in (*arms[turn:], *arms[:turn]):
                row = await _run(workload, fleet, arm, repeat, bound_s)
                rows.append(row)
                on_row(row)
    return rows


async def _run(workload: Workload, fleet: Fleet, arm: Arm, repeat: int, bound_s: float) -> LiveRow:
    async with (
        LocalRolloutCluster(
            engines=fleet.engines, tool_cpus=4096, dashboard=False, asynchronous=True
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        rollout = Rollout(
            client,
            env=workload.environment(),
            model=fleet.spec.model,
            engine=fleet.spec,
            engines=fleet.engines,
            strategy=arm.preset,
            overrides=arm.overrides,
            budget=Budget(
                max_steps=100_000,
                max_context_tokens=fleet.spec.max_model_len,
                max_step_tokens=fleet.spec.max_model_len,
            ),
            seed=workload.seed,
        )
        batch = await rollout.run(workload.tasks)
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
    kind: str, model: str, engines: int, slots: int, *, profile: str, time_scale: float, kv_transfer: bool
) -> Fleet:
    """Engines of one kind; emulated ones take the time of `profile`.

    Raises
    ------
    BadInput
        Unknown kind or profile.
    """
    if kind not in ("vllm", "emulated"):
        raise BadInput(f"--engine {kind}: use vllm or emulated")
    cost = load_profile(profile)
    max_model_len = 4096 if kind == "vllm" else 131_072
    spec = EngineSpec(
        kind,  # type: ignore[arg-type]
        model,
        slots=slots,
        max_model_len=max_model_len,
        cost={"profile": profile} if kind == "emulated" else None,
        time_scale=time_scale if kind == "emulated" else 1.0,
        kv_transfer=kv_transfer,
    )
    return Fleet(engines, spec, cost)
