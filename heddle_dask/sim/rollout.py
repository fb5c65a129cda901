"""Runs one simulated rollout of a preset and collects its figures."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command
from heddle_dask.core.errors import BadInput
from heddle_dask.core.events import Event
from heddle_dask.core.ids import EngineId
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.snapshot import EngineCounts
from heddle_dask.core.state import State
from heddle_dask.core.view import PredictorChoice
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.from_steps import finished_from_steps, known_work, past_of
from heddle_dask.sim.bound import MakespanBound, makespan_bound
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.affinity.hardware_map import check_classes, check_domains
from heddle_dask.strategies.presets import build_strategies, tell_costs
from heddle_dask.workloads.planned import PlannedTrajectory

Curve = list[tuple[float, int]]


class Timeline:
    """Counts running steps and active trajectories in the controller's state after each event.

    Attributes
    ----------
    running
        By engine: times at which the number of steps in its batch changed, with the new number.
    active
        The same for trajectories that are admitted and have not ended.
    """

    def __init__(self) -> None:
        self.running: dict[str, Curve] = {}
        self.active: Curve = [(0.0, 0)]

    def take(self, event: ev.Event, state: State) -> None:
        """Count the state after one event, in order of time."""
        changed: Iterable[EngineId] = ()
        match event:
            case ev.EngineJoined():
                self.running[event.engine.engine_id] = [(event.at, 0)]
            case ev.StepStarted() | ev.StepFinished() | ev.StepFailed():
                changed = (event.engine_id,)
            case ev.EngineLost() | ev.ProgramEnded() | ev.TrajectoryEnded():
                changed = state.engines
        for engine_id in changed:
            counts = EngineCounts.of(state.engines[engine_id])
            self._note(self.running[engine_id], event.at, counts.generating)
        self._note(self.active, event.at, state.alive)

    @staticmethod
    def _note(curve: Curve, at: float, number: int) -> None:
        then, before = curve[-1]
        if then == at:
            curve[-1] = (at, number)
        elif number != before:
            curve.append((at, number))


def means(curve: Curve, until_s: float, cells: int) -> list[float]:
    """Means of a step function over `cells` equal parts of 0 ... `until_s`."""
    if until_s <= 0:
        return [0.0] * cells
    width_s = until_s / cells
    sums = [0.0] * cells
    ends = [at for at, _ in curve[1:]] + [until_s]
    for (begin_s, number), end_s in zip(curve, ends, strict=True):
        if not number:
            continue
        first, last = int(begin_s / width_s), min(cells - 1, int(min(end_s, until_s) / width_s))
        for cell in range(first, last + 1):
            inside_s = min(end_s, (cell + 1) * width_s, until_s) - max(begin_s, cell * width_s)
            sums[cell] += number * max(0.0, inside_s)
    return [total / width_s for total in sums]


Watch = Callable[[Event, Sequence[Command]], None]
"""Called with every event and the commands that followed it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A preset with some of its parts replaced. Text form: ``preset:part=name,option=value:…``."""

    name: str
    preset: str
    overrides: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Parse the text form. A name may be ``package.module:Class``."""
        preset, *pieces = text.split(":")
        overrides: list[str] = []
        for piece in pieces:
            # A class has no "=" before its options: it belongs to the module before it.
            if overrides and "=" not in piece.partition(",")[0]:
                overrides[-1] += f":{piece}"
            else:
                overrides.append(piece)
        return cls(text, preset, tuple(overrides))


@dataclass(frozen=True, slots=True)
class SimulatedRollout:
    """Results of one rollout. All times are virtual seconds, except `cpu_s`.

    Attributes
    ----------
    completed
        Number of trajectories that ended by themselves; the others were cut off by a fault.
    tokens, steps
        Sampled tokens and LLM steps of the completed trajectories.
    queue_mean_s, queue_p99_s, queue_longest_s
        Seconds that a trajectory waited between its step requests and their admissions: mean, 0.99 quantile, and the
        value of the trajectory with most tokens.
    preemptions, kv_preemptions
        Steps preempted by the strategy, and jobs preempted by an engine because KV ran out.
    prefilled_tokens, cached_tokens
        Prompt tokens computed and found in a cache at the first admission of each job. Recomputation after a
        preemption by the engine appears in its seconds only.
    moves
        By kind: started, failed, seconds, tokens, exposed_s, bytes (`core.move_desk.MoveTotals`).
    busy_shares
        Share of the makespan with a running job, by engine.
    finished_s
        Time at which each trajectory ended or was cut off, in order of submission.
    completed_s
        End times of the completed trajectories, in the same order.
    waited_s
        Queue seconds of each trajectory, in the same order.
    cpu_s
        CPU seconds of this process for the rollout; not part of `figures`, which are equal in every run.
    """

    strategy: str
    seed: int
    trajectories: int
    completed: int
    tokens: int
    makespan_s: float
    bound: MakespanBound
    queue_mean_s: float
    queue_p99_s: float
    queue_longest_s: float
    preemptions: int
    kv_preemptions: int
    prefilled_tokens: int
    cached_tokens: int
    moves: Mapping[str, Mapping[str, float]]
    busy_shares: Mapping[str, float]
    finished_s: tuple[float, ...]
    completed_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    cpu_s: float = field(compare=False)
    timeline: Timeline | None = None
    steps: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens over makespan."""
        return self.tokens / self.makespan_s

    @property
    def bound_share(self) -> float:
        """Lower bound over makespan; at most 1 if all trajectories completed."""
        return self.bound.seconds / self.makespan_s

    @property
    def median_finish_s(self) -> float:
        """Median end time of the completed trajectories; the makespan if none completed."""
        return statistics.median(self.completed_s or (self.makespan_s,))

    @property
    def shortfall(self) -> str:
        """A warning if trajectories were cut off; empty if all completed."""
        if self.completed == self.trajectories:
            return ""
        return (
            f"{self.strategy}, seed {self.seed}: only {self.completed:,d} of {self.trajectories:,d} trajectories "
            "completed; the bound is of all"
        )

    def figures(self) -> dict[str, object]:
        """A JSON-able row: equal inputs give equal rows, in every process."""
        return {
            "strategy": self.strategy,
            "seed": self.seed,
            "trajectories": self.trajectories,
            "completed": self.completed,
            "tokens": self.tokens,
            "makespan_s": round(self.makespan_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "bound_s": round(self.bound.seconds, 3),
            "bound_share": round(self.bound_share, 4),
            "bound_binding": self.bound.binding,
            "bounds_s": {name: round(seconds, 3) for name, seconds in asdict(self.bound).items()},
            "median_finish_s": round(self.median_finish_s, 3),
            "queue_mean_s": round(self.queue_mean_s, 3),
            "queue_p99_s": round(self.queue_p99_s, 3),
            "queue_longest_s": round(self.queue_longest_s, 3),
            "preemptions": self.preemptions,
            "kv_preemptions": self.kv_preemptions,
            "prefilled_tokens": self.prefilled_tokens,
            "cached_tokens": self.cached_tokens,
            "moves": {
                kind: {name: round(value, 3) for name, value in totals.items()}
                for kind, totals in sorted(self.moves.items())
            },
            "busy_share_mean": round(statistics.mean(self.busy_shares.values()), 4),
            "busy_share_least": round(min(self.busy_shares.values()), 4),
        }


def simulate(
    preset: str,
    overrides: Sequence[str],
    fleet: SimulatedFleet,
    trajectories: Sequence[PlannedTrajectory],
    *,
    seed: int,
    warm: Sequence[PlannedTrajectory] | None = None,
    name: str | None = None,
    bound: MakespanBound | None = None,
    retries: RetryPolicy | None = None,
    watched: bool = False,
    watch: Watch | None = None,
) -> SimulatedRollout:
    """Run trajectories under a preset, from cold caches.

    Parameters
    ----------
    overrides
        Overrides in the form of `strategies.presets.build_strategies`.
    warm
        Trajectories of other groups for the warm start of a learned predictor.
    name
        Name in the row [default: preset and overrides].
    bound
        The lower bound, if already known; it is equal for all strategies.
    retries
        Limits of lost and preempted attempts of a step [default: as live].
    watched
        Whether to keep a timeline for a report.
    watch
        Called with every event and its commands, in order; cannot be combined with `watched`.
    """
    check_fit(trajectories, fleet)
    strategies = build_strategies(preset, seed=seed, overrides=overrides)
    check_classes(strategies, {spec.hardware for spec, _ in fleet.engines})
    check_domains(strategies, {plan.domain for plan in trajectories})
    tell_costs(strategies, fleet.beliefs)
    timeline = Timeline() if watched else None
    world = SimulatedWorld(
        strategies,
        fleet,
        trajectories,
        predictor=rollout_predictor(strategies.predictor, trajectories, warm),
        seed=seed,
        retries=retries,
        watch=watch if timeline is None else lambda event, _: timeline.take(event, world.controller.state),
    )
    began_s = time.process_time()
    world.run()
    cpu_s = time.process_time() - began_s
    return _figures(
        world,
        name=name or ":".join((preset, *overrides)),
        seed=seed,
        bound=bound or makespan_bound(trajectories, fleet),
        cpu_s=cpu_s,
        timeline=timeline,
    )


def check_fit(trajectories: Sequence[PlannedTrajectory], fleet: SimulatedFleet) -> None:
    if not trajectories:
        raise BadInput("nothing to simulate: give at least one trajectory")
    room = min(spec.max_context_tokens for spec, _ in fleet.engines)
    for plan in trajectories:
        if plan.context_tokens > room:
            raise BadInput(
                f"trajectory {plan.trajectory_id} has {plan.context_tokens} tokens of context, an engine takes {room}: "
                "scale tokens down, or give engines more"
            )


def rollout_predictor(
    choice: PredictorChoice | None,
    trajectories: Sequence[PlannedTrajectory],
    warm: Sequence[PlannedTrajectory] | None,
) -> Predictor | None:
    """The predictor of a rollout of these trajectories, which has learned from `warm`; None without a choice."""
    if choice is None:
        return None
    known = known_work(trajectories)
    observed = sum(plan.context_tokens - plan.prompt_tokens - plan.generated_tokens for plan in trajectories)
    predictor = build_predictor(choice, known, observation_per_token=observed / sum(known.tokens.values()))
    if warm:
        predictor.warm_start(finished_from_steps(past_of(plan)) for plan in warm)
    return predictor


def _figures(
    world: SimulatedWorld,
    *,
    name: str,
    seed: int,
    bound: MakespanBound,
    cpu_s: float,
    timeline: Timeline | None,
) -> SimulatedRollout:
    programs = list(world.programs.values())
    engines = world.engines
    makespan_s = max(program.finished_s for program in programs)
    waited_s = [program.queue_s for program in programs]
    completed = [program for program in programs if program.status == "completed"]
    longest = max(programs, key=lambda program: program.plan.generated_tokens)
    return SimulatedRollout(
        strategy=name,
        seed=seed,
        trajectories=len(programs),
        completed=len(completed),
        tokens=sum(program.plan.generated_tokens for program in completed),
        steps=sum(len(program.plan.steps) for program in completed),
        makespan_s=makespan_s,
        bound=bound,
        queue_mean_s=statistics.fmean(waited_s),
        queue_p99_s=_quantile(waited_s, 0.99),
        queue_longest_s=longest.queue_s,
        preemptions=sum(program.preemptions for program in programs),
        kv_preemptions=sum(engine.kv_preemptions for engine in engines.values()),
        prefilled_tokens=sum(engine.prefilled_tokens for engine in engines.values()),
        cached_tokens=sum(engine.cached_tokens for engine in engines.values()),
        moves={kind: asdict(totals) for kind, totals in world.controller.moves.totals.items()},
        busy_shares={name: engine.busy_s / makespan_s for name, engine in engines.items()},
        finished_s=tuple(program.finished_s for program in programs),
        completed_s=tuple(program.finished_s for program in completed),
        waited_s=tuple(waited_s),
        cpu_s=cpu_s,
        timeline=timeline,
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
