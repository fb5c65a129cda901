"""Migration by price, after each prediction, with the rules of `pricing` and `load_board`.

Transfers run longest trajectories first, on pairwise disjoint engines (Heddle, section 5.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.nouns import Quantile
from heddle_dask.core.view import ClusterView, Move, MoveRequest
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.migration.load_board import LoadBoard
from heddle_dask.strategies.migration.pricing import Link, Margin, MovingCandidate
from heddle_dask.strategies.remaining import QUANTILES, remaining_or_context_tokens


def choose_transfers(
    waiting: Iterable[MoveRequest],
    running: Iterable[MoveRequest] = (),
    *,
    max_running: int | None = None,
) -> list[MoveRequest]:
    """The transfers of `waiting` to start now, in this order.

    Greedy from the longest; a transfer that shares an engine, as source or target, with a running or chosen one is
    skipped and waits. The result is maximal: no further transfer could be added, unless `max_running` is reached.
    """
    running = list(running)
    busy = {engine for transfer in running for engine in (transfer.source, transfer.target)}
    room = None if max_running is None else max_running - len(running)
    chosen: list[MoveRequest] = []
    for transfer in sorted(waiting, key=lambda t: (-t.length_tokens, t.order)):
        if room is not None and len(chosen) >= room:
            break
        if transfer.source in busy or transfer.target in busy:
            continue
        busy |= {transfer.source, transfer.target}
        chosen.append(transfer)
    return chosen


def expected_tool_s(view: ClusterView, trajectory: Trajectory) -> float:
    """Expected seconds of the tool call that runs or comes next, from its beginning.

    The mean over all calls with its label; before the label is known, over the trajectory's own actions so far. 0 if
    both are unknown: no part of a move is then hidden.
    """
    of_label = view.tool_seconds.mean_s(trajectory.open_labels)
    if of_label is not None:
        return of_label
    done = len(trajectory.actions_done)
    return trajectory.tools_s / done if done else 0.0


def check_quantile(quantile: str) -> None:
    """Refuse a quantile that predictions do not have.

    Raises
    ------
    ValueError
    """
    if quantile not in QUANTILES:
        raise ValueError(f"quantile is {quantile!r}; use {' or '.join(QUANTILES)}")


@dataclass(slots=True)
class _Remaining:
    """Sums of the predicted tokens of an engine's residents, with the amount of change since they were computed."""

    counted: dict[TrajectoryId, float] = field(default_factory=dict)
    total: float = 0.0
    longest: float = 0.0
    changed: int = 0

    def told(self, trajectory_id: TrajectoryId, tokens: float) -> None:
        """Record a new prediction of a resident."""
        self.total += tokens - self.counted.get(trajectory_id, 0.0)
        self.counted[trajectory_id] = tokens
        self.longest = max(self.longest, tokens)
        self.changed += 1

    def outdated(self, engine: Engine) -> bool:
        """Whether more than an eighth has changed; with few residents, any change."""
        gone = abs(len(engine.residents) - len(self.counted))
        return self.changed + gone > len(self.counted) // 8

    def recount(self, view: ClusterView, engine: Engine, quantile: Quantile) -> None:
        """Recompute the sums from the latest predictions of the residents."""
        here = view.residents(engine)
        self.counted = {t.spec.trajectory_id: remaining_or_context_tokens(t, quantile) for t in here}
        self.total = sum(self.counted.values())
        self.longest = max(self.counted.values(), default=0.0)
        self.changed = 0


def _reach_of(engines: Sequence[Engine]) -> dict[int, frozenset[EngineId]]:
    """By TP degree: its engines, if all of them can transfer KV. Engines of different degrees cannot exchange KV."""
    degrees: dict[int, list[Engine]] = {}
    for engine in engines:
        degrees.setdefault(engine.spec.tp_degree, []).append(engine)
    return {
        degree: frozenset(e.engine_id for e in identical)
        for degree, identical in degrees.items()
        if all(e.spec.kv_transfer for e in identical)
    }


@runtime_checkable
class PermitsMoves(Protocol):
    """A strategy that may forbid a move."""

    def may_leave(self, view: ClusterView, trajectory: Trajectory) -> bool:
        """Whether the trajectory may move at all; asked before any engine is priced."""

    def may_move(self, view: ClusterView, trajectory: Trajectory, target: EngineId) -> bool:
        """Whether the trajectory may move to that engine."""


@dataclass(slots=True)
class Priced:
    """Move if the trajectory ends clearly earlier on another engine, with all costs of the move (`migration.pricing`).

    Parameters
    ----------
    profile
        Cost profile of the engines.
    relative, absolute_s, max_moves
        Meaning of *clearly earlier*, and maximum number of moves of one trajectory (`pricing.Margin`).
    setup_s, token_s
        Seconds of a KV transfer between engines of one TP degree: per move and per token.
    quantile
        Quantile of the prediction that is used.
    permits
        A strategy that may forbid moves: an admission that plans the end of each engine (`admission.deadline`).

    Notes
    -----
    The sums over an engine's residents are recomputed when an eighth has changed: amortised O(1). A decision checks
    bounds of all engines and prices the few that can win (`migration.load_board`).
    """

    profile: str = "tiny-cpu"
    relative: float = 0.15
    absolute_s: float = 1.0
    max_moves: int = 4
    setup_s: float = 0.1
    token_s: float = 5e-6
    quantile: Quantile = "median"
    permits: PermitsMoves | None = field(default=None, metadata={"part": "admission", "kind": PermitsMoves})
    _costs: EngineCosts = field(init=False)
    _remaining: list[_Remaining] = field(init=False, default_factory=list)
    _seen: int = field(init=False, default=0)
    _engines: Sequence[Engine] = field(init=False, default=())
    _board: LoadBoard = field(init=False, default_factory=lambda: LoadBoard(()))
    _link: Link = field(init=False)
    # By TP degree: the engines that can transfer KV to each other.
    _reach: Mapping[int, frozenset[EngineId]] = field(init=False, default_factory=dict)
    _margin: Margin = field(init=False, default_factory=Margin)

    def __post_init__(self) -> None:
        check_quantile(self.quantile)
        prices = (self.relative, self.absolute_s, self.max_moves, self.setup_s, self.token_s)
        if min(prices) < 0:
            raise ValueError("use numbers of at least 0 for relative, absolute_s, max_moves, setup_s and token_s")
        self._costs = EngineCosts(self.profile)
        self._margin = Margin(self.relative, self.absolute_s, self.max_moves)
        self._link = Link(self.setup_s, self.token_s)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        self._costs = EngineCosts(self.profile, known)
        self._engines, self._remaining = (), []

    def propose(self, view: ClusterView, trajectory: Trajectory) -> Move | None:
        """A move that pays, or None."""
        assert trajectory.home is not None, trajectory.trajectory_id
        engines = view.ready_engines
        if len(engines) < 2:
            return None
        if engines is not self._engines:
            self._rebuild(engines)
        remaining = remaining_or_context_tokens(trajectory, self.quantile)
        self._take_loads(view, trajectory, remaining)
        if self.permits is not None and not self.permits.may_leave(view, trajectory):
            return None  # before any engine is priced
        candidate = MovingCandidate(
            trajectory_id=trajectory.trajectory_id,
            remaining_tokens=remaining,
            context_tokens=trajectory.context_tokens,
            home=trajectory.home,
            tool_s=expected_tool_s(view, trajectory),
            moved=trajectory.moves,
        )
        reach = self._reach.get(view.engine(trajectory.home).spec.tp_degree, frozenset())
        move = self._board.decide(candidate, self._link, self._margin, reach)
        if move is None:
            return None
        if self.permits is not None and not self.permits.may_move(view, trajectory, move.target):
            return None
        # Start with the tool call or not at all: a later move is seldom hidden, and the next call is another
        # opportunity.
        return Move(move.target, move.kind, move.gain_s, may_wait=False)

    def choose(self, waiting: Sequence[MoveRequest], running: Sequence[MoveRequest]) -> Sequence[MoveRequest]:
        """Longest trajectories first, pairwise disjoint engines."""
        return choose_transfers(waiting, running)

    def _rebuild(self, engines: Sequence[Engine]) -> None:
        """Make a new board for changed ready engines; the sums of remaining engines are kept."""
        known = dict(zip([engine.engine_id for engine in self._engines], self._remaining, strict=True))
        self._engines, self._seen = engines, 0
        facts = [(e.engine_id, self._costs.of(e), e.spec.slots, e.spec.max_context_tokens) for e in engines]
        self._board = LoadBoard(facts)
        self._remaining = [known.get(engine.engine_id) or _Remaining() for engine in engines]
        self._reach = _reach_of(engines)

    def _take_loads(self, view: ClusterView, trajectory: Trajectory, remaining: float) -> None:
        """Update the board: the home has a new prediction, and residents of any engine may have changed."""
        board = self._board
        home = board.number_of.get(trajectory.home) if trajectory.home is not None else None
        if home is not None:
            self._remaining[home].told(trajectory.spec.trajectory_id, remaining)
        kv_tokens, residents = board.kv_tokens, board.residents
        for j in self._changed(view, home):
            engine = self._engines[j]
            if engine.resident_tokens != kv_tokens[j] or len(engine.residents) != residents[j] or j == home:
                sums = self._remaining[j]
                if sums.outdated(engine):
                    sums.recount(view, engine, self.quantile)
                board.set(j, len(engine.residents), engine.resident_tokens, sums.total, sums.longest)

    def _changed(self, view: ClusterView, home: int | None) -> Iterable[int]:
        """Numbers of the engines with changed residents since the board was updated; all for a new board."""
        fresh = self._seen == 0
        names, self._seen = view.touched_since(self._seen)
        if fresh:
            return range(len(self._engines))
        number_of = self._board.number_of
        return dict.fromkeys(
            [number_of[name] for name in names if name in number_of] + ([] if home is None else [home])
        )
