"""Placement: by predicted work, not by count.

A trajectory without a home goes to the engine that would then be done with all its predicted work earliest
(`partition.work`): decoding, KV, queueing for slots and memory, and the group's prompt unless a member has it there
already. A whole batch may be planned at once before its first steps (`Planned.plan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.transitions import EngineState, TrajectoryState
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.partition.least_end import LeastEnd
from heddle_dask.strategies.partition.work import Work, WorkLoad
from heddle_dask.strategies.partition.work_plan import MISSING_PROMPTS, WorkEngine, plan_by_work
from heddle_dask.strategies.placement.sticky import home_among

_MOST_DRIFT = 0.25
QUANTILES = ("median", "q90")


def remaining_tokens(trajectory: Trajectory, quantile: str = "median") -> float:
    """Predicted tokens still to be generated; without a prediction as many as its context holds, at least 1."""
    predicted = trajectory.predicted_tokens if quantile == "median" else trajectory.predicted_tokens_q90
    if predicted is not None and predicted > 0:
        return predicted
    return float(max(trajectory.context_tokens, trajectory.spec.prompt_tokens, 1))


def work_of(trajectory: Trajectory, quantile: str = "median", context_tokens: int = 0) -> Work:
    """What this trajectory will ask of an engine that holds none of its KV.

    The group shares the first prompt; a first step of unknown prompt length is all prompt.
    """
    context = max(context_tokens, trajectory.context_tokens, trajectory.spec.prompt_tokens)
    prompt = trajectory.spec.prompt_tokens or (context if trajectory.steps_finished == 0 else 0)
    shared = min(prompt, context)
    return Work(
        group=trajectory.spec.group_id,
        decode_tokens=remaining_tokens(trajectory, quantile),
        context_tokens=context,
        shared_tokens=shared,
        prefill_tokens=context - shared,
    )


@dataclass(slots=True)
class _Holding:
    """What was placed on one engine: sums that are a little out of date, and how much so.

    `added` and the residents that are not accounted for by `held` and `unseen` are changes since the sums were made.
    """

    engine: Engine
    load: WorkLoad
    held: dict[TrajectoryId, Trajectory] = field(default_factory=dict)
    added: int = 0
    unseen: int = 0

    def add(self, trajectory: Trajectory, work: Work, *, resident: bool) -> None:
        self.held[trajectory.trajectory_id] = trajectory
        if resident:
            self.load.host(work)
        else:
            self.load.add(work)
        self.added += 1

    def recount(self, quantile: str) -> None:
        """Drop those that left, and take the latest predictions of the others: their KV is here."""
        here = self.engine.residents
        self.held = {i: t for i, t in self.held.items() if i in here}
        works = [work_of(t, quantile) for t in self.held.values()]
        self.load = WorkLoad.of(self.load.cost, self.load.slots, (), works)
        self.added = 0
        self.unseen = len(here) - len(self.held)  # moved here, and no step asked for since


@dataclass(slots=True)
class Planned:
    """Keep the home; without one, the engine that ends its predicted work earliest with this trajectory.

    Attributes
    ----------
    profile
        Cost profile of the engines (`heddle_dask.cost`); only ratios matter.
    quantile
        Which prediction is planned with: median or q90.

    Notes
    -----
    The sums of an engine are counted anew when a quarter of what it holds has changed, at most one engine per
    choice: O(1) amortised. A choice bounds every engine's end and asks the few that can win (`partition.least_end`).
    """

    profile: str = "tiny-cpu"
    quantile: str = "median"
    _costs: EngineCosts = field(init=False)
    _holdings: dict[EngineId, _Holding] = field(init=False, default_factory=dict)
    _plan: dict[TrajectoryId, tuple[Trajectory, EngineId]] = field(init=False, default_factory=dict)
    # The engines of the latest choice, what they hold, their loads side by side, and their numbers there.
    _seated: Sequence[Engine] = field(init=False, default=())
    _here: list[_Holding] = field(init=False, default_factory=list)
    _ends: LeastEnd = field(init=False, default_factory=lambda: LeastEnd(()))
    _number: dict[EngineId, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.quantile not in QUANTILES:
            raise BadInput(f"planned: quantile is {self.quantile!r}; use {' or '.join(QUANTILES)}")
        self._costs = EngineCosts(self.profile)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        """Plan with these costs by TP degree in place of the profile; before the first choice."""
        self._costs = EngineCosts(self.profile, known)

    def plan(self, trajectories: Sequence[Trajectory], engines: Sequence[Engine]) -> None:
        """Plan a batch that has no homes yet; its first steps follow the plan where the engine is a candidate.

        Trajectories that are not planned are placed one by one, as they ask; so are those of a batch that is smaller
        than the number of engines: counting all that the engines hold would cost more than a plan of few is worth.
        """
        if not trajectories or not engines:
            return
        for trajectory in trajectories:
            self._plan.pop(trajectory.trajectory_id, None)  # it may have been planned for fewer engines
        if len(trajectories) < len(engines):
            return
        sites = []
        for engine in engines:
            holding = self._holding(engine)
            holding.recount(self.quantile)
            sites.append(WorkEngine(self._costs.of(engine), engine.spec.slots, held=holding.load))
        self._seated = ()  # all loads have changed
        made = plan_by_work([work_of(t, self.quantile) for t in trajectories], sites)
        ended = TrajectoryState.ENDED
        self._plan = {i: entry for i, entry in self._plan.items() if entry[0].state is not ended}
        for trajectory, number in zip(trajectories, made.engine_of, strict=True):
            self._plan[trajectory.trajectory_id] = (trajectory, engines[number].engine_id)

    def choose_engine(
        self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]
    ) -> Engine:
        """The home, else the planned engine, else the one that would end earliest."""
        home = self._home(trajectory, candidates)
        if home is not None:
            holding = self._holding(home)
            if trajectory.trajectory_id not in holding.held:  # it was moved there
                holding.add(trajectory, work_of(trajectory, self.quantile), resident=True)
                self._load_changed(holding)
            return home
        _, planned = self._plan.pop(trajectory.trajectory_id, (None, None))
        work = work_of(trajectory, self.quantile, step.context_tokens)
        if candidates is not self._seated:
            self._seat(candidates)
        self._recount_most_outdated()
        j = None if planned is None else self._number.get(planned)
        if j is None:
            # The first of equals, in join order: this trajectory counts there before the next is placed.
            j = self._ends.first(work)
        chosen = self._here[j]
        chosen.add(trajectory, work, resident=False)
        self._load_changed(chosen)
        return chosen.engine

    def _home(self, trajectory: Trajectory, candidates: Sequence[Engine]) -> Engine | None:
        """`home_among`, without a walk over the candidates when what it holds is known."""
        if trajectory.home is None:
            return None
        holding = self._holdings.get(trajectory.home)
        if holding is not None and holding.engine in candidates:  # engines compare by identity
            return holding.engine
        return home_among(trajectory, candidates)

    def _seat(self, candidates: Sequence[Engine]) -> None:
        """Put the loads of these engines side by side; as long as they are the same ones, they stay."""
        self._here = [self._holding(engine) for engine in candidates]
        self._number = {engine.engine_id: j for j, engine in enumerate(candidates)}
        self._ends = LeastEnd([holding.load for holding in self._here], MISSING_PROMPTS)
        self._seated = candidates

    def _load_changed(self, holding: _Holding) -> None:
        j = self._number.get(holding.engine.engine_id)
        if j is not None and self._seated:
            self._ends.changed(j, holding.load)

    def _recount_most_outdated(self) -> None:
        drifts = [
            (h.added + abs(len(h.engine.residents) - len(h.held) - h.unseen)) / (8 + len(h.held))
            for h in self._here
        ]
        most = max(drifts)
        if most > _MOST_DRIFT:
            outdated = self._here[drifts.index(most)]
            outdated.recount(self.quantile)
            self._load_changed(outdated)

    def _holding(self, engine: Engine) -> _Holding:
        holding = self._holdings.get(engine.engine_id)
        if holding is None:
            lost = [i for i, h in self._holdings.items() if h.engine.state is EngineState.LOST]
            for engine_id in lost:
                del self._holdings[engine_id]
            holding = _Holding(engine, WorkLoad(self._costs.of(engine), engine.spec.slots))
            self._holdings[engine.engine_id] = holding
        return holding
