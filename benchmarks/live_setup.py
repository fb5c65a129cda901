"""Setup of live measurements: trajectories of a trace, engines, and a row per run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from heddle_dask.cli.engine_option import parsed_vllm_options
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.cost.engine_cost import EngineCost, load_profile
from heddle_dask.cost.measured import MeasuredTable
from heddle_dask.cost.published import model_of
from heddle_dask.cost.table_fit import fit_table
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.environments.replay import ReplayEnvironment
from heddle_dask.sim.bound import makespan_bound
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.workloads.planned import (
    PlannedTrajectory,
    PromptDoesNotFit,
    is_replayable,
    planned_trace,
)
from heddle_dask.workloads.traces import read_traces

ARM_PREFIX = "vllm-router/"
"""Prefix of the names of router arms, followed by the router's policy."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Trajectories of one trace, by name or file, scaled."""

    trace: Path
    tasks: int
    token_scale: float
    tool_scale: float
    seed: int

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.trace.name.removesuffix(".gz").removesuffix(".jsonl")

    def environment(self, salt: str = "", max_context_tokens: int | None = None) -> ReplayEnvironment:
        """A new environment over the file; another salt gives other tokens."""
        return ReplayEnvironment(
            self.trace,
            token_scale=self.token_scale,
            tool_scale=self.tool_scale,
            salt=salt,
            max_context_tokens=max_context_tokens,
        )

    def planned(self, max_context_tokens: int) -> tuple[list[PlannedTrajectory], list[PlannedTrajectory]]:
        """The replayed trajectories, and the file's trajectories of all other groups, for a warm start.

        Raises
        ------
        BadInput
            The file is no trace, or the prompt of a trajectory that is to be replayed fills a context.
        """
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
                try:
                    drawn.append(plan(trace))
                except PromptDoesNotFit as error:
                    # Skipping it would silently shorten the tail.
                    raise BadInput(f"trace {str(self.trace)!r}: {error}") from error
            elif trace.group_id not in groups:
                with contextlib.suppress(PromptDoesNotFit):
                    others.append(plan(trace))
        return drawn, others


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines: their number and specification.

    Attributes
    ----------
    cost
        Cost of one engine as used by strategies, in real seconds; exact for emulated engines.
    """

    engines: int
    spec: EngineSpec
    cost: EngineCost


@dataclass(frozen=True, slots=True)
class LiveRow:
    """One run.

    Attributes
    ----------
    steps
        LLM steps of the workload.
    cpu_s
        CPU seconds during the run by kind of process (`process_usage`); none in simulated time.
    """

    workload: str
    arm: str
    repeat: int
    tokens_per_s: float
    makespan_s: float
    bound_share: float
    preemptions: int
    moves: Mapping[str, Any]
    steps: int = 0
    cpu_s: Mapping[str, float] = field(default_factory=dict)


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
    table: str = "",
    dtype: str = "auto",
    gpu_values: Mapping[str, Any] | None = None,
) -> Fleet:
    """Engines of one kind; emulated ones take the time of `profile`, with its KV capacity unless one is given.

    Parameters
    ----------
    table
        Name or file of a measured table of an engine with this model, in place of `profile`.
    gpu_values
        Values of `gpu_options`, by name.

    Raises
    ------
    BadInput
        Unknown kind, profile or table, or a table of another model.
    """
    measured = fit_table(table_of(table, model)).cost if table else None
    cost = measured.for_contexts(max_model_len) if measured else load_profile(profile)
    if kv_capacity_tokens:
        cost = replace(cost, capacity_tokens=kv_capacity_tokens)
    # Replayed tokens have no meaning, so the model may run beyond its trained positions.
    own = engine_kind(kind)
    options = own.options_for(cost.to_mapping(), time_scale=time_scale, max_positions=max_model_len)
    gpu_values = gpu_values or {"engine_args": ()}
    options = parsed_vllm_options(kind, gpu_values, options) or options
    spec = EngineSpec(
        kind,
        model,
        slots=slots,
        max_model_len=max_model_len,
        kv_transfer=kv_transfer,
        dtype=dtype,
        engines_per_gpu=gpu_values.get("engines_per_gpu") or 1,
        options=options,
    )
    return Fleet(engines, spec, cost.scaled(options.time_scale))


def table_of(name: str, model: str, tp_degree: int = 1) -> MeasuredTable:
    """A measured table, by name or file.

    Raises
    ------
    BadInput
        There is no such table, or it is of another model or degree.
    """
    table = MeasuredTable.load(name)
    table.check(model_of(model), tp_degree)
    return table


def lower_bound_s(planned: Sequence[PlannedTrajectory], fleet: Fleet) -> float:
    """Lower bound of the makespan of any strategy, for the cost used by strategies (`sim.bound`)."""
    capacity = fleet.cost.capacity_tokens
    spec = EngineDescription(
        EngineId("any"), fleet.spec.named_slots, fleet.spec.named_context_tokens, kv_capacity_tokens=capacity
    )
    bound = makespan_bound(planned, SimulatedFleet(((spec, fleet.cost),) * fleet.engines))
    return bound.seconds
