"""CPU time of `Controller.handle` by kind of event, in a steady state.

A small world in virtual time is the body: engines with slots and priority queues, tools, noisy predictions, moves,
and a new trajectory for each that ends. All draws are from one seed. Engines are H100s at TP degree 4 with Qwen3-14B
(`cost` profile), 100 slots and the KV capacity of that profile.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import click

from benchmarks.action_decisions import measure_action_decisions
from benchmarks.tables import Column, names, print_measured, print_rows
from heddle_dask.cli.shared_options import COUNT, WholeNumber, shared_options, whole_numbers
from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, StepId, TrajectoryId
from heddle_dask.core.nouns import (
    ActionRequest,
    EngineDescription,
    HostDescription,
    Prediction,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.resources import Resources
from heddle_dask.core.view import StrategySet
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.strategies.presets import build_strategies, tell_costs

PROFILE = "qwen3-14b-h100"
DEGREE = 4
SLOTS = 100
GROUP = 16
PROMPT_TOKENS = 600
TOOL_TOKENS = 150
TOKEN_S = 0.02
HOSTS, HOST_CPUS = 16, 512
_PREDICTION_S, _MOVE_S, _STOP_S, _TURN_S = 0.05, 0.3, 0.02, 0.01
PER_STEP = "all of one step"
EVERY_EVENT = "every event"
FIRST_PLAN = "first plan"


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """CPU microseconds of `Controller.handle` for one kind of event.

    Attributes
    ----------
    event
        Name of the event; ``"all of one step"``: every event of a trajectory from one step's request to before the
        next; ``"every event"``: of any kind; ``"first plan"``: the first request after all were submitted, once.
    count
        Number of measured events.
    """

    preset: str
    engines: int
    trajectories: int
    event: str
    count: int
    mean_us: float
    p50_us: float
    p99_us: float


@dataclass(slots=True)
class _Agent:
    """A trajectory of the world: its remaining steps, and its open step."""

    tokens: list[int]
    context: int = PROMPT_TOKENS
    next_step: int = 0
    done_tokens: int = 0
    attempt: int = 0
    running_on: EngineId | None = None
    ends_at: float = 0.0
    action: bool = False


@dataclass(slots=True)
class _Site:
    """An engine: free slots, and its queue in order of priority."""

    free: int
    queue: list[tuple[float, int, cmd.StartStep]] = field(default_factory=list)


class SteadyWorld:
    """A controller with a constant number of trajectories, whose commands are carried out in virtual time."""

    def __init__(self, strategies: StrategySet, *, trajectories: int, engines: int, seed: int) -> None:
        self.controller = Controller(strategies)
        self.rng = random.Random(seed)
        self.agents: dict[TrajectoryId, _Agent] = {}
        self.sites: dict[EngineId, _Site] = {}
        self.spent_ns: dict[str, list[int]] = {}
        self.at = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = self._handled = 0
        self._step_ns: dict[TrajectoryId, int] = {}
        capacity = load_profile(PROFILE, DEGREE).capacity_tokens
        for i in range(engines):
            name = EngineId(f"e{i}")
            self.sites[name] = _Site(SLOTS)
            spec = EngineDescription(name, SLOTS, 131_072, DEGREE, capacity, kv_transfer=True)
            self._tell(ev.EngineJoined(self.at, spec))
        for i in range(HOSTS):
            self._tell(ev.HostJoined(self.at, HostDescription(HostId(f"h{i}"), Resources.of(cpus=HOST_CPUS))))
        for _ in range(trajectories):
            self._submit()

    def play(self, events: int) -> None:
        """Run `events` events."""
        wanted = self.handled + events
        while self.handled < wanted:
            self.at, _, happen = heapq.heappop(self._due)
            happen()

    @property
    def handled(self) -> int:
        """Number of events so far."""
        return self._handled

    def forget_times(self) -> None:
        """Discard the times measured so far."""
        self.spent_ns.clear()
        self._step_ns.clear()

    # -- the controller ----------------------------------------------------------------------------------

    def _tell(self, event: ev.Event, of: TrajectoryId | None = None) -> None:
        began = time.thread_time_ns()
        commands = self.controller.handle(event)
        took = time.thread_time_ns() - began
        self._handled += 1
        self.spent_ns.setdefault(type(event).__name__, []).append(took)
        if of in self._step_ns:
            self._step_ns[of] += took
        for command in commands:
            self._obey(command)

    def _obey(self, command: cmd.Command) -> None:
        match command:
            case cmd.AdmitTrajectory(name):
                self._later(self.rng.random(), lambda: self._request(name))
            case cmd.StartStep():
                site = self.sites[command.engine_id]
                heapq.heappush(site.queue, (-command.priority.number, command.order, command))
                self._later(0.0, lambda: self._fill(command.engine_id))
            case cmd.AbortStep(step_id):
                self._later(_STOP_S, lambda: self._stopped(step_id))
            case cmd.PredictRemaining(name):
                steps = self.agents[name].next_step
                self._later(_PREDICTION_S, lambda: self._predict(name, steps))
            case cmd.MoveContext():
                self._later(_MOVE_S, lambda: self._moved(command))
            case cmd.RunAction(action_id, host_id):
                seconds = self.rng.lognormvariate(1.2, 1.0)
                self._later(seconds, lambda: self._acted(action_id, host_id, seconds))

    def _later(self, seconds: float, happen: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._due, (self.at + seconds, self._numbers, happen))

    # -- what happens ------------------------------------------------------------------------------------

    def _submit(self) -> None:
        number = self._numbers = self._numbers + 1
        name = TrajectoryId(f"t{number}")
        steps = 1 + min(30, int(self.rng.expovariate(1 / 8)))
        mean = self.rng.lognormvariate(5.0, 0.6)
        self.agents[name] = _Agent([1 + int(mean * self.rng.lognormvariate(0, 0.6)) for _ in range(steps)])
        group = GroupId(f"g{number // GROUP}")
        self._tell(ev.TrajectorySubmitted(self.at, TrajectorySpec(name, group, 0, "bench", PROMPT_TOKENS)))

    def _request(self, name: TrajectoryId) -> None:
        agent = self.agents[name]
        if agent.attempt == 0:
            if name in self._step_ns:
                self.spent_ns.setdefault(PER_STEP, []).append(self._step_ns[name])
            self._step_ns[name] = 0
        step = StepRequest(StepId(name, agent.next_step, agent.attempt), agent.context, 8192)
        self._tell(ev.StepRequested(self.at, step), name)

    def _fill(self, engine_id: EngineId) -> None:
        site = self.sites[engine_id]
        while site.free and site.queue:
            _, _, step = heapq.heappop(site.queue)
            step_id = step.step_id
            name = step_id.trajectory_id
            agent = self.agents[name]
            site.free -= 1
            seconds = TOKEN_S * (agent.tokens[agent.next_step] - agent.done_tokens)
            agent.running_on, agent.ends_at = engine_id, self.at + seconds
            self._tell(ev.StepStarted(self.at, step_id, engine_id), name)
            self._later(seconds, partial(self._finished, step_id))

    def _finished(self, step_id: StepId) -> None:
        name = step_id.trajectory_id
        agent = self.agents[name]
        if agent.attempt != step_id.attempt or agent.running_on is None:
            return  # the step was stopped
        new = agent.tokens[agent.next_step] - agent.done_tokens
        engine = self._free_slot(agent)
        agent.context += new + TOOL_TOKENS
        agent.next_step, agent.attempt, agent.done_tokens = step_id.step_index + 1, 0, 0
        over = agent.next_step == len(agent.tokens)
        self._later(_TURN_S, lambda: self._end(name) if over else self._act(name))
        self._tell(ev.StepFinished(self.at, step_id, engine, new, 0, "stop"), name)

    def _stopped(self, step_id: StepId) -> None:
        name = step_id.trajectory_id
        agent = self.agents.get(name)
        if agent is None or agent.attempt != step_id.attempt or agent.running_on is None:
            return  # the step had ended by itself
        left = agent.tokens[agent.next_step] - agent.done_tokens
        new = max(0, left - math.ceil((agent.ends_at - self.at) / TOKEN_S))
        engine = self._free_slot(agent)
        agent.done_tokens += new
        agent.context += new
        agent.attempt += 1
        self._tell(ev.StepFinished(self.at, step_id, engine, new, 0, "abort"), name)
        self._later(_TURN_S, lambda: self._request(name))

    def _free_slot(self, agent: _Agent) -> EngineId:
        engine_id = agent.running_on
        assert engine_id is not None
        agent.running_on = None
        self.sites[engine_id].free += 1
        self._later(0.0, lambda: self._fill(engine_id))
        return engine_id

    def _act(self, name: TrajectoryId) -> None:
        self._numbers += 1
        request = ActionRequest(ActionId(f"{name} a{self._numbers}"), name, "tool", "bench")
        self._tell(ev.ActionRequested(self.at, request), name)

    def _acted(self, action_id: ActionId, host_id: HostId, seconds: float) -> None:
        name = TrajectoryId(action_id.split()[0])
        self._tell(ev.ActionFinished(self.at, action_id, host_id, seconds), name)
        self._later(_TURN_S, lambda: self._request(name))

    def _predict(self, name: TrajectoryId, steps: int) -> None:
        agent = self.agents.get(name)
        if agent is None:
            return
        tokens = sum(agent.tokens[steps:]) * self.rng.lognormvariate(0, 0.5)
        said = Prediction(tokens, 2 * tokens, "bench", tools_s=tokens / 100)
        event = ev.PredictionMade(self.at, name, steps, said)
        self._tell(event, name)

    def _moved(self, move: cmd.MoveContext) -> None:
        name = move.trajectory_id
        self._tell(
            ev.MoveEnded(
                self.at,
                name,
                move.target_engine_id,
                True,
                move.kind,
                _MOVE_S,
                1000,
                source_engine_id=move.source_engine_id,
            ),
            name,
        )

    def _end(self, name: TrajectoryId) -> None:
        self._tell(ev.TrajectoryEnded(self.at, name, "completed"))
        del self.agents[name]
        self._step_ns.pop(name, None)
        self._submit()


def bench_strategies(arm: str, seed: int) -> StrategySet:
    """The strategies of an arm (``preset:part=name…``), with the cost of the world's engines."""
    preset, *overrides = arm.split(":")
    strategies = build_strategies(preset, seed=seed, overrides=overrides)
    tell_costs(strategies, {DEGREE: load_profile(PROFILE, DEGREE)})
    return strategies


def measure_decisions(
    presets: Sequence[str], engines: Sequence[int], *, trajectories: int, events: int, seed: int
) -> Iterator[DecisionRow]:
    """Rows for every preset and number of engines.

    Parameters
    ----------
    trajectories
        Number of trajectories in the controller, including those that wait for admission.
    events
        Number of measured events, after a warm-up of twelve times `trajectories` events (at least two steps of each).

    Raises
    ------
    BadInput
        Unknown preset.
    """
    collect_seldom()  # as the scheduler does
    for preset in presets:
        for number in engines:
            world = SteadyWorld(bench_strategies(preset, seed), trajectories=trajectories, engines=number, seed=seed)
            row = _rows(preset, number, trajectories)
            while "StepRequested" not in world.spent_ns:
                world.play(1)
            yield row(FIRST_PLAN, world.spent_ns["StepRequested"])
            world.play(12 * trajectories)
            world.forget_times()
            world.play(events)
            for event in sorted(world.spent_ns):
                yield row(event, world.spent_ns[event])
            every = [ns for event, spent in world.spent_ns.items() if event != PER_STEP for ns in spent]
            yield row(EVERY_EVENT, every)


def _rows(preset: str, engines: int, trajectories: int) -> Callable[[str, Sequence[int]], DecisionRow]:
    def row(event: str, spent_ns: Sequence[int]) -> DecisionRow:
        spent_us = sorted(ns / 1000 for ns in spent_ns)
        return DecisionRow(
            preset=preset,
            engines=engines,
            trajectories=trajectories,
            event=event,
            count=len(spent_us),
            mean_us=round(statistics.fmean(spent_us), 2),
            p50_us=round(spent_us[len(spent_us) // 2], 2),
            p99_us=round(spent_us[len(spent_us) * 99 // 100], 2),
        )

    return row


_TIMES: Sequence[Column] = (
    ("mean us", lambda row: f"{row.mean_us:.1f}"),
    ("p50 us", lambda row: f"{row.p50_us:.1f}"),
    ("p99 us", lambda row: f"{row.p99_us:.1f}"),
)
COLUMNS: Sequence[Column] = (
    ("preset", lambda row: row.preset),
    ("engines", lambda row: str(row.engines)),
    ("trajectories", lambda row: str(row.trajectories)),
    ("event", lambda row: row.event),
    ("count", lambda row: str(row.count)),
    *_TIMES,
)
ACTION_COLUMNS: Sequence[Column] = (
    ("actions", lambda row: row.strategy),
    ("what", lambda row: row.what),
    ("waiting", lambda row: str(row.waiting)),
    ("CPUs", lambda row: str(row.cpus)),
    ("started", lambda row: f"{row.started:.1f}"),
    *_TIMES,
)


@click.command("decisions")
@click.option(
    "--presets",
    default="heddle,heddle:admission=unlimited,heddle-paper,slime,verl",
    show_default=True,
    help="preset:part=name:…, comma-separated.",
)
@click.option("--engines", default="16,64", show_default=True, help="Counts, comma-separated.")
@click.option(
    "--trajectories",
    type=COUNT,
    default=6400,
    show_default=True,
    help="In the controller at any time.",
)
@click.option("--events", type=WholeNumber(100), default=60_000, show_default=True, help="Measured, per preset.")
@click.option(
    "--actions",
    default="fcfs-minimum,elastic,elastic:order=tail",
    show_default=True,
    help="Strategies of actions, name:option=value:…, comma-separated; empty: none.",
)
@click.option("--waiting", type=COUNT, default=1000, show_default=True, help="Actions that wait.")
@shared_options
def decisions(
    presets: str,
    engines: str,
    trajectories: int,
    events: int,
    actions: str,
    waiting: int,
    as_json: bool,
    seed: int,
) -> None:
    """CPU microseconds that the controller takes for each kind of event, in a steady state."""
    numbers = whole_numbers("--engines", engines, "16,64")
    chosen = [name.strip() for name in presets.split(",")]
    for name in chosen:
        bench_strategies(name, seed)  # refuses a bad preset before anything is measured
    measured = measure_decisions(chosen, numbers, trajectories=trajectories, events=events, seed=seed)
    rows = print_rows(measured, COLUMNS, err=as_json)
    # One event in 20 starts an action, and a pass is made for each 600.
    starts, passes = max(20, events // 20), max(5, events // 600)
    of_actions = measure_action_decisions(names(actions), waiting=waiting, actions=starts, passes=passes, seed=seed)
    action_rows = print_rows(of_actions, ACTION_COLUMNS, err=as_json)
    if as_json:
        print_measured({"rows": rows, "actions": action_rows})
