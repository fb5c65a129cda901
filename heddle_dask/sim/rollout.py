"""One simulated rollout, from a preset's name to its figures."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from heddle_dask.core.commands import Command
from heddle_dask.core.errors import BadInput
from heddle_dask.core.events import Event
from heddle_dask.core.retries import RetryPolicy
from heddle_dask.core.view import PredictorChoice
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.from_steps import finished_from_steps, known_work, past_of
from heddle_dask.sim.bound import MakespanBound, makespan_bound
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.timeline import Timeline
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import build_strategies, tell_costs
from heddle_dask.workloads.planned import PlannedTrajectory

Watch = Callable[[Event, Sequence[Command]], None]
"""Takes every event with the commands that followed."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A preset with some of its parts replaced; written ``preset:part=name,option=value:…``."""

    name: str
    preset: str
    overrides: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read the written form."""
        preset, *overrides = text.split(":")
        return cls(text, preset, tuple(overrides))


@dataclass(frozen=True, slots=True)
class SimulatedRollout:
    """What one rollout came to. Virtual seconds throughout, but for `cpu_s`.

    Attributes
    ----------
    completed
        How many of the trajectories ended by themselves; the others were cut off by a fault.
    tokens
        Sampled tokens of these.
    bound
        Lower bounds of `makespan_s`.
    queue_mean_s, queue_p99_s, queue_longest_s
        Seconds that a trajectory waited between asking for its steps and their admission: mean, 0.99 quantile, and
        that of the trajectory with most tokens.
    preemptions, kv_preemptions
        Steps stopped by the strategy, and jobs that an engine threw out because KV ran out.
    prefilled_tokens, cached_tokens
        Prompt tokens computed and found in a cache, when a job was admitted first: what an engine computes again after
        it has thrown a job out is in its seconds only.
    moves
        By kind: started, failed, seconds, tokens, exposed_s, bytes (`core.move_desk.MoveTotals`).
    busy_shares
        Share of the makespan with a running job, by engine.
    finished_s
        When each trajectory ended or was cut off, in order of submission.
    completed_s
        When those ended that completed, in the same order.
    waited_s
        Its queue seconds, in the same order.
    cpu_s
        CPU seconds of this process for the rollout: no part of `figures`, which are the same in every run.
    timeline
        What was watched, if asked for.
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

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens over makespan."""
        return self.tokens / self.makespan_s

    @property
    def bound_share(self) -> float:
        """Lower bound over makespan: at most 1, if all completed."""
        return self.bound.seconds / self.makespan_s

    @property
    def median_finish_s(self) -> float:
        """When half of those that completed had ended; the makespan where none did."""
        return statistics.median(self.completed_s or (self.makespan_s,))

    @property
    def shortfall(self) -> str:
        """What a reader must know of a rollout in which trajectories were cut off; empty if none was."""
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
        As `strategies.presets.build_strategies` takes them.
    seed
        Of everything that is drawn.
    warm
        Trajectories of other groups from which a learning predictor learns first.
    name
        What the row calls it [default: preset and overrides].
    bound
        Where it is known already: it is the same for all strategies.
    retries
        How often a step may be lost or stopped [default: as live].
    watched
        Whether to keep what a report draws.
    watch
        Told of every event with its commands, in order; not together with `watched`.

    Raises
    ------
    BadInput
        Unknown preset or part, no trajectory, or one that fits no engine.
    """
    check_fit(trajectories, fleet)
    strategies = build_strategies(preset, seed=seed, overrides=overrides)
    tell_costs(strategies, fleet.beliefs)
    timeline = Timeline() if watched else None
    world = SimulatedWorld(
        strategies,
        fleet,
        trajectories,
        predictor=_predictor(strategies.predictor, trajectories, warm),
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
    """Refuse what could never end.

    Raises
    ------
    BadInput
        There is no trajectory, or one is longer than the context of some engine.
    """
    if not trajectories:
        raise BadInput("nothing to simulate: give at least one trajectory")
    room = min(spec.max_context_tokens for spec, _ in fleet.engines)
    for plan in trajectories:
        if plan.context_tokens > room:
            raise BadInput(
                f"trajectory {plan.trajectory_id} has {plan.context_tokens} tokens of context, an engine takes {room}: "
                "scale tokens down, or give engines more"
            )


def _predictor(
    choice: PredictorChoice | None,
    trajectories: Sequence[PlannedTrajectory],
    warm: Sequence[PlannedTrajectory] | None,
) -> Predictor | None:
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
    """The smallest value that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
