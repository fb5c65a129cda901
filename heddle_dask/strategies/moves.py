"""Migration strategies: what the controller asks after each prediction, put to the pure rules of `migration`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.state import Engine, Trajectory
from heddle_dask.core.view import ClusterView, Move, MoveRequest
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.migration.engine_load import EngineLoad
from heddle_dask.strategies.migration.priced import Link, Margin, MovingCandidate, decide_move
from heddle_dask.strategies.migration.rank_rule import RankOrder, rank_target
from heddle_dask.strategies.migration.transfers import choose_transfers
from heddle_dask.strategies.planned import QUANTILES, remaining_tokens
from heddle_dask.strategies.presorted_plan import PresortedPlan


def expected_tool_s(trajectory: Trajectory) -> float:
    """Mean seconds of the trajectory's own actions so far; 0 without any: then nothing hides a move."""
    done = trajectory.actions_done
    return sum(seconds for _, seconds, _ in done) / len(done) if done else 0.0


def _check_quantile(quantile: str) -> None:
    if quantile not in QUANTILES:
        raise ValueError(f"quantile is {quantile!r}; use {' or '.join(QUANTILES)}")


@dataclass(slots=True)
class _Remaining:
    """Predicted tokens of an engine's residents: sums that may be a little out of date, and how much so."""

    counted: dict[TrajectoryId, float] = field(default_factory=dict)
    total: float = 0.0
    longest: float = 0.0
    changed: int = 0

    def told(self, trajectory_id: TrajectoryId, tokens: float) -> None:
        """A resident has a new prediction."""
        self.total += tokens - self.counted.get(trajectory_id, 0.0)
        self.counted[trajectory_id] = tokens
        self.longest = max(self.longest, tokens)
        self.changed += 1

    def outdated(self, engine: Engine) -> bool:
        """More than an eighth has changed: with few residents, anything."""
        gone = abs(len(engine.residents) - len(self.counted))
        return self.changed + gone > len(self.counted) // 8

    def recount(self, view: ClusterView, engine: Engine, quantile: str) -> None:
        """Take the latest predictions of those that live there now."""
        self.counted = {name: remaining_tokens(view.trajectory(name), quantile) for name in engine.residents}
        self.total = sum(self.counted.values())
        self.longest = max(self.counted.values(), default=0.0)
        self.changed = 0


@dataclass(slots=True)
class Priced:
    """Move when another engine ends the trajectory clearly earlier, all prices counted (`migration.priced`).

    Parameters
    ----------
    profile
        Cost profile of the engines.
    relative, absolute_s, max_moves
        What *clearly earlier* means, and the most moves of one trajectory.
    setup_s, token_s
        Price of a KV transfer between engines that can: seconds per move and per token.
    quantile
        Which prediction is planned with.

    Notes
    -----
    What the residents of an engine still need is counted anew when an eighth of it has changed, not at every question:
    amortised O(1) beside the O(engines) of the prices.
    """

    profile: str = "tiny-cpu"
    relative: float = 0.1
    absolute_s: float = 1.0
    max_moves: int = 4
    setup_s: float = 0.1
    token_s: float = 5e-6
    quantile: str = "median"
    _costs: EngineCosts = field(init=False)
    _remaining: dict[EngineId, _Remaining] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        _check_quantile(self.quantile)
        prices = (self.relative, self.absolute_s, self.max_moves, self.setup_s, self.token_s)
        if min(prices) < 0:
            raise ValueError(
                "use numbers of at least 0 for relative, absolute_s, max_moves, setup_s and token_s"
            )
        self._costs = EngineCosts(self.profile)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        """Price with these costs by TP degree in place of the profile."""
        self._costs = EngineCosts(self.profile, known)

    def propose(self, view: ClusterView, trajectory: Trajectory) -> Move | None:
        """A move that pays, or None."""
        assert trajectory.home is not None, trajectory.trajectory_id
        engines = view.ready_engines
        if len(engines) < 2:
            return None
        home = view.engine(trajectory.home)
        can_transfer = home.spec.kv_transfer and all(engine.spec.kv_transfer for engine in engines)
        remaining = remaining_tokens(trajectory, self.quantile)
        if trajectory.home in self._remaining:
            self._remaining[trajectory.home].told(trajectory.trajectory_id, remaining)
        candidate = MovingCandidate(
            trajectory_id=trajectory.trajectory_id,
            remaining_tokens=remaining,
            context_tokens=trajectory.context_tokens,
            home=trajectory.home,
            tool_s=expected_tool_s(trajectory),
            moved=trajectory.moves,
        )
        move = decide_move(
            candidate,
            [self._load(view, engine) for engine in engines],
            Link(self.setup_s, self.token_s) if can_transfer else None,
            Margin(self.relative, self.absolute_s, self.max_moves),
        )
        if move is None:
            return None
        return Move(move.target, move.kind, move.stay_s - move.move_s)

    def choose(self, waiting: Sequence[MoveRequest], running: Sequence[MoveRequest]) -> Sequence[MoveRequest]:
        """Longest first, disjoint ends."""
        return choose_transfers(waiting, running)

    def _load(self, view: ClusterView, engine: Engine) -> EngineLoad:
        remaining = self._remaining_at(view, engine)
        return EngineLoad(
            engine_id=engine.engine_id,
            cost=self._costs.of(engine),
            slots=engine.spec.slots,
            residents=len(engine.residents),
            remaining_tokens=remaining.total,
            longest_tokens=remaining.longest,
            kv_tokens=float(engine.resident_tokens),
            max_context_tokens=engine.spec.max_context_tokens,
        )

    def _remaining_at(self, view: ClusterView, engine: Engine) -> _Remaining:
        remaining = self._remaining.get(engine.engine_id)
        if remaining is None:
            ready = {other.engine_id for other in view.ready_engines}
            self._remaining = {name: sums for name, sums in self._remaining.items() if name in ready}
            remaining = self._remaining[engine.engine_id] = _Remaining()
        if remaining.outdated(engine):
            remaining.recount(view, engine, self.quantile)
        return remaining


@dataclass(slots=True)
class RankRule:
    """The paper's rule: the rank of the new prediction names the engine (`migration.rank_rule`).

    Needs the sizes of the presorted plan: the preset hands it the placement.
    """

    quantile: str = "median"
    plan: PresortedPlan | None = field(init=False, default=None)
    _order: RankOrder = field(init=False, default_factory=RankOrder)
    _known: dict[str, Trajectory] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        _check_quantile(self.quantile)

    def propose(self, view: ClusterView, trajectory: Trajectory) -> Move | None:
        """A move to the engine of the trajectory's rank."""
        if self.plan is None or self.plan.latest is None:
            return None
        self._forget_ended()
        self._known[trajectory.trajectory_id] = trajectory
        rank = self._order.update(trajectory.trajectory_id, remaining_tokens(trajectory, self.quantile))
        latest = self.plan.latest
        target: EngineId = latest.engines[rank_target(rank, len(self._order), latest.sizes)]
        ready = {engine.engine_id: engine for engine in view.ready_engines}
        if target == trajectory.home or target not in ready or trajectory.home not in ready:
            return None
        can_transfer = ready[target].spec.kv_transfer and ready[trajectory.home].spec.kv_transfer
        return Move(target, "transfer" if can_transfer else "recompute")

    def choose(self, waiting: Sequence[MoveRequest], running: Sequence[MoveRequest]) -> Sequence[MoveRequest]:
        """Longest first, disjoint ends."""
        return choose_transfers(waiting, running)

    def _forget_ended(self) -> None:
        ended: Iterable[str] = [name for name, t in self._known.items() if t.state.value == "ended"]
        for name in ended:
            self._order.remove(self._known.pop(name).trajectory_id)
