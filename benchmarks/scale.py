"""CPU time and memory of a simulated rollout by size, with engines in proportion to trajectories.

Each size runs in its own process, for its own peak memory. One GPU per hundred trajectories, one engine per GPU
(Qwen3-8B on H100s, 100 slots), the coding workload, predictions of the oracle: the measurement covers the simulator,
the controller and its strategies.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import click

from benchmarks.tables import Column, names, print_measured_rows
from heddle_dask.cli.shared_options import shared_options, whole_numbers
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.from_steps import known_work
from heddle_dask.sim.fleet import SimulatedFleet, equal_engines
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import PRESETS, build_strategies, tell_costs
from heddle_dask.workloads.choice import load_workload
from heddle_dask.workloads.planned import PlannedTrajectory

PROFILE = "qwen3-8b-h100"
WORKLOAD = "coding"
SLOTS = 100
SAMPLES = 16
TRAJECTORIES_PER_GPU = 100
MAX_CONTEXT_TOKENS = 64_000


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One simulated rollout.

    Attributes
    ----------
    cpu_s
        CPU seconds of the rollout, without making the workload and the fleet.
    peak_bytes
        Peak memory of the process, including workload and interpreter.
    events
        Number of events that the controller handled.
    growth
        CPU seconds relative to the preset's smallest size, divided by the same ratio of n log n: at most 1 if the
        growth is at most n log n.
    """

    preset: str
    trajectories: int
    gpus: int
    steps: int
    events: int
    makespan_s: float
    cpu_s: float
    peak_bytes: int
    growth: float


def measure_scale(presets: Sequence[str], sizes: Sequence[int], *, seed: int) -> Iterator[ScaleRow]:
    """A row per preset and size, in that order; sizes ascend.

    Raises
    ------
    BadInput
        There is no such preset, or a size is not a whole number of groups.
    """
    for preset in presets:
        if preset not in PRESETS:
            raise BadInput(f"unknown strategy '{preset}'; choose one of: {', '.join(PRESETS)}")
    for size in sizes:
        if size < TRAJECTORIES_PER_GPU or size % SAMPLES:
            raise BadInput(f"--trajectories {size}: use multiples of {SAMPLES} of at least {TRAJECTORIES_PER_GPU}")
    # A new interpreter: memory inherited by a fork would count.
    context = multiprocessing.get_context("spawn")
    for preset in presets:
        first: ScaleRow | None = None
        for size in sorted(sizes):
            with context.Pool(1) as pool:
                row = pool.apply(_measure, (preset, size, seed))
            first = first or row
            yield _with_growth(row, first)


def _with_growth(row: ScaleRow, first: ScaleRow) -> ScaleRow:
    n_log_n = [each.trajectories * math.log(each.trajectories) for each in (row, first)]
    growth = row.cpu_s / first.cpu_s * n_log_n[1] / n_log_n[0]
    return ScaleRow(**{**asdict(row), "growth": round(growth, 3)})


def _measure(preset: str, trajectories: int, seed: int) -> ScaleRow:
    """Measure one size; runs in its own process."""
    world = build_world(preset, trajectories, seed)
    collect_seldom()  # as in `heddle simulate`: repeated garbage collection of all plans is no work of the rollout
    began_s = time.process_time()
    world.run()
    cpu_s = time.process_time() - began_s
    programs = world.programs.values()
    return ScaleRow(
        preset=preset,
        trajectories=trajectories,
        gpus=len(world.engines),
        steps=sum(len(program.plan.steps) for program in programs),
        events=world.events,
        makespan_s=round(max(program.finished_s for program in programs), 3),
        cpu_s=round(cpu_s, 3),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        growth=1.0,
    )


def build_world(preset: str, trajectories: int, seed: int) -> SimulatedWorld:
    """The rollout to be measured, not started yet."""
    plans = load_workload(
        WORKLOAD, trajectories=trajectories, samples=SAMPLES, seed=seed, max_context_tokens=MAX_CONTEXT_TOKENS
    )
    return world_of(preset, plans, -(-trajectories // TRAJECTORIES_PER_GPU), MAX_CONTEXT_TOKENS, seed)


def world_of(
    preset: str, plans: Sequence[PlannedTrajectory], engines: int, max_context_tokens: int, seed: int
) -> SimulatedWorld:
    """A rollout on engines of one GPU. The oracle predicts: learning runs beside the loop, a few times a run."""
    cost = load_profile(PROFILE)
    fleet = SimulatedFleet(equal_engines(engines, cost, slots=SLOTS, max_context_tokens=max_context_tokens))
    learns = "xgboost" in PRESETS[preset]["predictor"]
    strategies = build_strategies(preset, seed=seed, overrides=["predictor=oracle"] if learns else [])
    tell_costs(strategies, fleet.beliefs)
    choice = strategies.predictor
    predictor = None if choice is None else build_predictor(choice, known_work(plans))
    return SimulatedWorld(strategies, fleet, plans, predictor=predictor, seed=seed)


COLUMNS: Sequence[Column] = (
    ("preset", lambda row: row.preset),
    ("trajectories", lambda row: f"{row.trajectories:,d}"),
    ("GPUs", lambda row: str(row.gpus)),
    ("steps", lambda row: f"{row.steps:,d}"),
    ("events", lambda row: f"{row.events:,d}"),
    ("makespan s", lambda row: f"{row.makespan_s:,.1f}"),
    ("CPU s", lambda row: f"{row.cpu_s:.2f}"),
    ("peak MiB", lambda row: f"{row.peak_bytes / 2**20:,.0f}"),
    ("of n log n", lambda row: f"{row.growth:.2f}"),
)


@click.command("scale")
@click.option(
    "--trajectories",
    default="1600,6400,25600,102400",
    show_default=True,
    help="Sizes, comma-separated; an engine of one GPU for each hundred.",
)
@click.option("--presets", default="heddle,slime", show_default=True, help="Comma-separated; the oracle predicts.")
@shared_options
def scale(trajectories: str, presets: str, as_json: bool, seed: int) -> None:
    """CPU seconds and peak memory of a simulated rollout, each size in a process of its own."""
    sizes = whole_numbers("--trajectories", trajectories, "1600,6400")
    print_measured_rows(measure_scale(names(presets), sizes, seed=seed), COLUMNS, as_json=as_json)
