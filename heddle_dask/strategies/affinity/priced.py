"""Affinity by price: the class on which a domain's prefill and decode cost least, given the load of each class.

The paper maps domains to classes by hand. Here the seconds of an average step of the domain, by the cost model of each
class, take the place of the map. Load counts too: on the best class alone the others would idle. The price of a class
is ``work * (work / engines + backlog) ** power``: with a large power the backlogs of all classes are nearly equal, and
of two domains the one with the larger advantage gets the class (comparative advantage).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.events import StepFinished
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.view import Route
from heddle_dask.cost.engine_cost import EngineCost, engine_cost_for
from heddle_dask.cost.iteration import UNLIMITED_TOKENS
from heddle_dask.cost.published import gpu_names
from heddle_dask.strategies.affinity.hardware_map import preferred, returns_to
from heddle_dask.strategies.engine_costs import EngineCosts

_LEAST_STEPS = 8
"""A domain is known from so many answered steps on; below, it is taken to be like all domains together."""


@dataclass(slots=True)
class StepMeans:
    """Means over the answered steps of a domain, and over its ended trajectories.

    Attributes
    ----------
    steps, trajectories, trajectory_steps
        Counted steps, ended trajectories, and steps of these.
    context_tokens, generated_tokens, prompt_tokens
        Mean context at the end of a step; mean tokens that it generated; mean prompt tokens that the engine computed
        for it, so without those in its prefix cache.
    """

    steps: int = 0
    trajectories: int = 0
    trajectory_steps: int = 0
    context_tokens: float = 0.0
    generated_tokens: float = 0.0
    prompt_tokens: float = 0.0

    def add(self, context_tokens: int, generated_tokens: int, prompt_tokens: int) -> None:
        self.steps += 1
        self.context_tokens += (context_tokens - self.context_tokens) / self.steps
        self.generated_tokens += (generated_tokens - self.generated_tokens) / self.steps
        self.prompt_tokens += (prompt_tokens - self.prompt_tokens) / self.steps

    def end(self, steps: int) -> None:
        self.trajectories += 1
        self.trajectory_steps += steps

    def expected_steps(self, done: int) -> float:
        """Expected number of steps after `done` ones, at least 1; as memoryless lengths have it."""
        ended = self.trajectory_steps / self.trajectories if self.trajectories else 2.0 * done + 1.0
        return max(1.0, ended - done, 0.5 * ended)


@dataclass(slots=True)
class DomainProfiles:
    """The means of every domain, and of all of them together."""

    _of: dict[str, StepMeans] = field(default_factory=dict)
    _all: StepMeans = field(default_factory=StepMeans)

    def step_ended(self, trajectory: Trajectory, answer: StepFinished) -> None:
        """Count the latest finished step of a trajectory, with its last answer."""
        generated = trajectory.step_tokens[-1]
        prompt = max(0, trajectory.context_tokens - answer.new_tokens - answer.cached_tokens)
        for means in (self._of.setdefault(trajectory.spec.domain, StepMeans()), self._all):
            means.add(trajectory.context_tokens, generated, prompt)

    def trajectory_ended(self, trajectory: Trajectory) -> None:
        if trajectory.steps_finished:
            for means in (self._of.setdefault(trajectory.spec.domain, StepMeans()), self._all):
                means.end(trajectory.steps_finished)

    def of(self, domain: str) -> StepMeans | None:
        """The means of a domain; of all while it is new; None before any step has ended."""
        means = self._of.get(domain)
        if means is not None and means.steps >= _LEAST_STEPS:
            return means
        return self._all if self._all.steps else None

    def is_known(self, domain: str) -> bool:
        means = self._of.get(domain)
        return means is not None and means.steps >= _LEAST_STEPS


@dataclass(slots=True)
class _Assigned:
    """A live trajectory: its class, whether its domain was known then, and the seconds of work that it still brings."""

    hardware: str
    known: bool
    work_s: float


def step_work_s(cost: EngineCost, means: StepMeans, batch: float) -> float:
    """Engine seconds that an average step takes of an engine with `batch` decoding sequences.

    Prefill of the tokens that are new since the previous step, and for each generated token its own terms and its share
    of the terms of the iteration.
    """
    token_s = cost.token_s + cost.sequence_s + cost.context_token_s * means.context_tokens
    fixed_s = cost.iteration_s(max(1, round(batch)), 0) - (cost.token_s + cost.sequence_s) * max(1, round(batch))
    decode_s = means.generated_tokens * (token_s + fixed_s / max(1.0, batch))
    return decode_s + cost.prefill_token_s * means.prompt_tokens


@dataclass(slots=True)
class PricedAffinity:
    """The class of least price, for a trajectory's whole life; another one while all engines of it are full.

    A trajectory that was placed before its domain was known may change its class once. Its KV cache then comes along.

    Parameters
    ----------
    profile
        Cost profile of engines of unknown cost.
    model
        Name of a model (`heddle_dask.cost.published`): costs of classes that are named like published GPUs (``H800``,
        ``H20``) where the session does not know them. Empty: the session must.
    power
        Weight of the load. 0: the cheapest class whatever its load, as a map that a computer has made.
    advantage
        A trajectory changes its class if the price there is smaller by this factor.

    Raises
    ------
    BadInput
        No such profile or model, or a negative power.
    """

    profile: str = "tiny-cpu"
    model: str = ""
    power: float = 4.0
    advantage: float = 1.5
    _costs: EngineCosts = field(init=False)
    _domains: DomainProfiles = field(init=False, default_factory=DomainProfiles)
    _assigned: dict[TrajectoryId, _Assigned] = field(init=False, default_factory=dict)
    _backlog_s: dict[str, float] = field(init=False, default_factory=dict)
    _alive: dict[str, int] = field(init=False, default_factory=dict)
    _told: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.power < 0 or self.advantage < 1:
            raise BadInput("affinity 'priced': use a power of at least 0 and an advantage of at least 1")
        self._costs = EngineCosts(self.profile)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        self._costs, self._told = EngineCosts(self.profile, known), True

    # -- choices -------------------------------------------------------------------------------------------------

    def route(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Route:
        """Engines of the trajectory's class, or those of the fallback."""
        wanted = self._class_of(trajectory, candidates)
        allowed = preferred(wanted, trajectory, step, candidates)
        return Route(allowed, with_kv=returns_to(wanted, trajectory, allowed))

    def may_move(self, trajectory: Trajectory, target: Engine) -> bool:
        """Only within its class."""
        mine = self._assigned.get(trajectory.trajectory_id)
        return mine is None or mine.hardware == target.spec.hardware

    def _class_of(self, trajectory: Trajectory, candidates: Sequence[Engine]) -> str:
        mine = self._assigned.get(trajectory.trajectory_id)
        known = self._domains.is_known(trajectory.spec.domain)
        if mine is not None and (mine.known or not known):
            return mine.hardware
        classes = _classes(candidates)
        means = self._domains.of(trajectory.spec.domain)
        works = {name: self._work_s(trajectory, engines, means) for name, engines in classes.items()}
        if mine is not None:
            self._take_off(mine)
        prices = {name: self._price(works[name], name, len(engines)) for name, engines in classes.items()}
        best = min(prices, key=lambda name: prices[name])
        if mine is not None and mine.hardware in prices and prices[mine.hardware] < self.advantage * prices[best]:
            best = mine.hardware
        self._assign(trajectory, best, known, works[best])
        return best

    def _price(self, work_s: float, name: str, engines: int) -> float:
        load_s = (work_s + self._backlog_s.get(name, 0.0)) / engines
        return float(work_s * load_s**self.power)

    def _work_s(self, trajectory: Trajectory, engines: Sequence[Engine], means: StepMeans | None) -> float:
        """Seconds of the trajectory's remaining steps on an engine of this class."""
        engine = engines[0]
        cost = self._cost_of(engine)
        if means is None:  # nothing is known: as many tokens are generated as are read
            tokens = max(1, trajectory.context_tokens)
            means = StepMeans(1, 0, 0, 1.5 * tokens, tokens, tokens)
        steps = means.expected_steps(trajectory.steps_finished)
        return steps * step_work_s(cost, means, self._batch(engine, len(engines), means))

    def _batch(self, engine: Engine, engines: int, means: StepMeans) -> float:
        """Sequences that such an engine decodes together: what is alive there, as far as slots and memory allow."""
        alive = self._alive.get(engine.spec.hardware, 0) / engines
        capacity = engine.spec.kv_capacity_tokens or UNLIMITED_TOKENS
        return max(1.0, min(alive, engine.spec.slots, capacity / max(1.0, means.context_tokens)))

    def _cost_of(self, engine: Engine) -> EngineCost:
        name = engine.spec.hardware.lower()
        if self.model and not self._told and name in gpu_names():
            return engine_cost_for(self.model, name, engine.spec.tp_degree)
        return self._costs.of(engine)

    # -- what is where -------------------------------------------------------------------------------------------

    def _assign(self, trajectory: Trajectory, hardware: str, known: bool, work_s: float) -> None:
        self._assigned[trajectory.trajectory_id] = _Assigned(hardware, known, work_s)
        self._backlog_s[hardware] = self._backlog_s.get(hardware, 0.0) + work_s
        self._alive[hardware] = self._alive.get(hardware, 0) + 1

    def _take_off(self, mine: _Assigned) -> None:
        self._backlog_s[mine.hardware] = max(0.0, self._backlog_s[mine.hardware] - mine.work_s)
        self._alive[mine.hardware] -= 1

    def step_answered(self, trajectory: Trajectory, answer: StepFinished) -> None:
        """Learn from a finished step; its share of the trajectory's work is done."""
        if answer.finish_reason == "abort":
            return
        self._domains.step_ended(trajectory, answer)
        mine = self._assigned.get(trajectory.trajectory_id)
        means = self._domains.of(trajectory.spec.domain)
        if mine is None or means is None:
            return
        done_s = mine.work_s / (1.0 + means.expected_steps(trajectory.steps_finished))
        mine.work_s -= done_s
        self._backlog_s[mine.hardware] = max(0.0, self._backlog_s[mine.hardware] - done_s)

    def forget(self, trajectory: Trajectory) -> None:
        self._domains.trajectory_ended(trajectory)
        mine = self._assigned.pop(trajectory.trajectory_id, None)
        if mine is not None:
            self._take_off(mine)


def _classes(engines: Sequence[Engine]) -> dict[str, list[Engine]]:
    """Engines by class, classes in the order of their first engines."""
    found: dict[str, list[Engine]] = {}
    for hardware, members in groupby(engines, key=lambda engine: engine.spec.hardware):
        found.setdefault(hardware, []).extend(members)
    return found
