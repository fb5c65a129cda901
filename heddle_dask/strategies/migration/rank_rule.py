"""The paper's rank rule as a migration strategy (Heddle, section 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.ids import EngineId
from heddle_dask.core.migrations import can_transfer
from heddle_dask.core.nouns import Quantile
from heddle_dask.core.view import ClusterView, Move, MoveRequest
from heddle_dask.strategies.migration.priced import check_quantile, choose_transfers
from heddle_dask.strategies.migration.rank_order import RankOrder, rank_target
from heddle_dask.strategies.placement.presorted import PresortedPlan
from heddle_dask.strategies.remaining import remaining_or_context_tokens


@dataclass(slots=True)
class RankRule:
    """The paper's rule: the rank of the new prediction determines the engine (`rank_order`).

    Parameters
    ----------
    quantile
        Quantile of the prediction that is ranked.
    plan
        The placement; the sizes of its plan are scaled.

    Raises
    ------
    ValueError
        The placement is not `presorted`, or the quantile is unknown.
    """

    quantile: Quantile = "median"
    plan: PresortedPlan | None = field(default=None, metadata={"part": "placement", "kind": PresortedPlan})
    _order: RankOrder = field(init=False, default_factory=RankOrder)

    def __post_init__(self) -> None:
        check_quantile(self.quantile)
        if self.plan is None:
            raise ValueError("it needs placement=presorted: it scales the sizes of that plan")

    def propose(self, view: ClusterView, trajectory: Trajectory) -> Move | None:
        if self.plan is None or self.plan.latest is None:
            return None
        rank = self._order.update(trajectory.trajectory_id, remaining_or_context_tokens(trajectory, self.quantile))
        latest = self.plan.latest
        target: EngineId = latest.engines[rank_target(rank, len(self._order), latest.sizes)]
        ready = {engine.engine_id: engine for engine in view.ready_engines}
        if target == trajectory.home or target not in ready or trajectory.home not in ready:
            return None
        copied = can_transfer(ready[trajectory.home], ready[target])
        return Move(target, "transfer" if copied else "recompute")

    def choose(self, waiting: Sequence[MoveRequest], running: Sequence[MoveRequest]) -> Sequence[MoveRequest]:
        """Longest trajectories first, pairwise disjoint engines."""
        return choose_transfers(waiting, running)

    def forget(self, trajectory: Trajectory) -> None:
        self._order.remove(trajectory.trajectory_id)
