"""The paper's placement: presorted partition of the batch, long trajectories on the engines of high TP degree.

Engines are sorted by TP degree, descending, and run i of the presorted trajectories goes to engine i (Heddle, section
6). For identical engines this is the value of Eq. 3; for heterogeneous ones the fixed order may be about 10 % worse
than the optimum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import neg

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.nouns import Quantile, StepRequest
from heddle_dask.core.transitions import OVER
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.migration.rank_order import rank_target
from heddle_dask.strategies.partition.runs import Presorted, Worker, partition_in_order, worker_of
from heddle_dask.strategies.placement.least_load import resident_load
from heddle_dask.strategies.placement.sticky import home_among
from heddle_dask.strategies.remaining import QUANTILES, remaining_or_context_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """The engine of each trajectory, with the sizes that the rank rule needs.

    Attributes
    ----------
    engine_of
        The engine of each planned trajectory.
    engines, sizes
        Engines in the order of their runs, longest trajectories first, and the number of trajectories of each.
    seconds
        Makespan by Eq. 2.
    lengths
        Predicted tokens, longest first.
    """

    engine_of: Mapping[TrajectoryId, EngineId]
    engines: tuple[EngineId, ...]
    sizes: tuple[int, ...]
    seconds: float
    lengths: tuple[float, ...]

    def engine_by_rank(self, tokens: float) -> EngineId:
        """The engine with the run into which a trajectory of that predicted length would fall."""
        rank = bisect_left(self.lengths, -tokens, key=neg)
        return self.engines[rank_target(min(rank, len(self.lengths) - 1), len(self.lengths), self.sizes)]


def presorted_plan(
    trajectories: Sequence[Trajectory],
    engines: Sequence[Engine],
    costs: EngineCosts,
    quantile: Quantile = "median",
) -> Plan:
    """Partition the trajectories by Eq. 2 in the paper's order of engines."""
    by_length = sorted(trajectories, key=lambda t: (-remaining_or_context_tokens(t, quantile), t.number))
    lengths = [remaining_or_context_tokens(t, quantile) for t in by_length]
    ordered = sorted(engines, key=lambda e: (-e.spec.tp_degree, e.number))
    contexts = [max(t.context_tokens, t.spec.prompt_tokens) for t in by_length]
    mean_context = (sum(contexts) + sum(lengths) / 2) / max(1, len(lengths))
    kinds: dict[tuple[EngineCost, int], Worker] = {}
    for engine in ordered:
        kind = (costs.of(engine), engine.spec.slots)
        if kind not in kinds:
            kinds[kind] = worker_of(*kind, context_tokens=mean_context, most=max(1, len(lengths)))
    workers = [kinds[costs.of(engine), engine.spec.slots] for engine in ordered]
    partition = partition_in_order(Presorted(lengths), workers)
    assert partition is not None  # every table has room for all trajectories
    engine_of = {
        by_length[i].trajectory_id: ordered[run.worker].engine_id
        for run in partition.runs
        for i in range(run.start, run.stop)
    }
    sizes = tuple(partition.sizes(len(ordered)))
    return Plan(engine_of, tuple(e.engine_id for e in ordered), sizes, partition.seconds, tuple(lengths))


@dataclass(slots=True)
class PresortedPlan:
    """The home; without one, the planned engine; without a plan, the least resident load.

    Attributes
    ----------
    profile
        Cost profile of the engines (`heddle_dask.cost`).
    quantile
        Quantile of the prediction that is used as length.
    latest
        The plan of the last batch, for the rank rule.

    Notes
    -----
    The paper plans one batch for empty engines. Here a batch is planned together with the running trajectories: they
    are part of the runs but keep their homes (the rank rule moves them); only new trajectories follow the plan. A
    batch smaller than the number of engines is not planned: each of its trajectories is placed by its rank in the
    latest plan, like in the rank rule, until half as many have arrived as were planned or the engines have changed.
    """

    profile: str = "tiny-cpu"
    quantile: Quantile = "median"
    latest: Plan | None = field(init=False, default=None)
    _costs: EngineCosts = field(init=False)
    _open: dict[TrajectoryId, tuple[Trajectory, EngineId]] = field(init=False, default_factory=dict)
    _active: dict[TrajectoryId, Trajectory] = field(init=False, default_factory=dict)
    _by_rank: int = field(init=False, default=0)  # number placed by rank since the latest plan

    def __post_init__(self) -> None:
        if self.quantile not in QUANTILES:
            raise BadInput(f"presorted: quantile is {self.quantile!r}; use {' or '.join(QUANTILES)}")
        self._costs = EngineCosts(self.profile)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        self._costs = EngineCosts(self.profile, known)

    def plan(self, trajectories: Sequence[Trajectory], engines: Sequence[Engine]) -> None:
        """Partition a batch without homes together with the running trajectories; no effect if either is empty."""
        if not trajectories or not engines:
            return
        latest = self.latest
        if latest is not None and self._stands(latest, trajectories, engines):
            self._by_rank += len(trajectories)
            for trajectory in trajectories:
                self._expect(trajectory, latest.engine_by_rank(remaining_or_context_tokens(trajectory, self.quantile)))
            return
        self._open = {i: entry for i, entry in self._open.items() if entry[0].state not in OVER}
        self._active = {i: one for i, one in self._active.items() if one.state not in OVER}
        self._active.update((one.trajectory_id, one) for one in trajectories)
        self._by_rank = 0
        self.latest = presorted_plan(list(self._active.values()), engines, self._costs, self.quantile)
        for trajectory in trajectories:
            self._expect(trajectory, self.latest.engine_of[trajectory.trajectory_id])

    def _stands(self, latest: Plan, trajectories: Sequence[Trajectory], engines: Sequence[Engine]) -> bool:
        """Whether the latest plan is still used: same engines, and few arrivals since."""
        few = len(trajectories) < len(engines) and 2 * (self._by_rank + len(trajectories)) <= len(latest.lengths)
        return few and {engine.engine_id for engine in engines} == set(latest.engines)

    def _expect(self, trajectory: Trajectory, engine_id: EngineId) -> None:
        self._active[trajectory.trajectory_id] = trajectory
        self._open[trajectory.trajectory_id] = (trajectory, engine_id)

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        """The home, else the planned engine, else the first of least resident load."""
        home = home_among(trajectory, candidates)
        if home is not None:
            return home
        _, planned = self._open.pop(trajectory.trajectory_id, (None, None))
        return next((e for e in candidates if e.engine_id == planned), None) or min(
            candidates, key=lambda engine: (*resident_load(engine), engine.number)
        )
