"""Admission by KV memory: the longest predicted trajectory first, each when an engine has room for it until it ends.

If the context of a trajectory is evicted during a tool call, its whole context is prefilled again. If the contexts of
all live trajectories do not fit, that happens at nearly every step, and neither order nor placement helps (CONCUR,
2601.22705; ThunderAgent, 2602.13692). So a trajectory starts when an engine has room for its growing context
(`cost.memory_profile`), and keeps that room until it ends. Waiting trajectories are not bound to an engine: the next
engine with room takes the longest that fits, which is Graham's list schedule with backfilling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import Quantile
from heddle_dask.core.view import Admit, ClusterView
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.admission.candidate_engines import CandidateEngines, Rejection
from heddle_dask.strategies.admission.engine_snapshot import EngineSnapshot, Longest, held_tokens, load_of, longest_of
from heddle_dask.strategies.admission.kv_forecast import KvForecast
from heddle_dask.strategies.admission.next_in_queue import longest_or_sibling
from heddle_dask.strategies.admission.wait_queue import WaitQueue
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.observation_tokens import growth_of, observed_per_token
from heddle_dask.strategies.remaining import RemainingDemand, demand_of, tools_left

# An engine that rejected every waiting trajectory is checked again when this share of its residents, or of its queue,
# has left: a check takes time for each resident, and finds little room before (experiments.md, decision time).
_LEFT_SHARE = 1 / 64


@dataclass(slots=True)
class KvFit:
    """Admit the longest trajectory that fits, while not too many steps queue; every engine gets at least one.

    A long trajectory is *critical*: if it starts late, it ends last. Non-critical trajectories whose group prompt is
    already cached on the engine go first: they need less memory and prefill there, and their order matters little. A
    trajectory that would finish last even on a full engine gets a lightly loaded one: fewer others are admitted beside
    it (the interference of Heddle's Eq. 2, at admission).

    Without a predictor, and while a waiting trajectory has a prediction of a model that has learnt from no more
    trajectories than are alive, it admits like `KvForecast`: what ends first is short, and a model of these alone
    admits too many.

    Parameters
    ----------
    profile
        Cost profile of the engines (`heddle_dask.cost`). With `tools`, seconds matter; otherwise only ratios.
    fill
        Share of each engine's KV memory that may be reserved. Engines that do not report their memory have no limit but
        `per_slot`.
    per_slot
        Maximum number of trajectories per slot that generate or queue. Above 1, a free slot is filled at once, and the
        predictor observes more trajectories early.
    critical
        A trajectory is critical if its remaining path is at least this share of the remaining tokens of all
        trajectories, waiting ones included, divided by the number of live ones.
    least_share
        An engine takes at least this share of its capacity beside its longest trajectory, however long that is: a
        prediction that is far too long would otherwise keep an engine empty (experiments.md, least share). 0 is
        best for exact predictions.
    lengths
        Number of equally likely lengths that approximate each remaining length (`remaining_lengths`); 1: the mean.
    margin
        Standard deviations of the forecast memory use that are kept free.
    quantile
        Quantile of the prediction that is used for the remaining length.
    tools
        Whether the seconds of tool calls still to come count (`remaining_demand`).
    """

    profile: str = "tiny-cpu"
    fill: float = 0.95
    per_slot: float = 2.5
    critical: float = 1.0
    least_share: float = 0.7
    lengths: int = 4
    margin: float = 1.0
    quantile: Quantile = "q90"
    tools: bool = True
    _costs: EngineCosts = field(init=False)
    _queue: WaitQueue = field(init=False, default_factory=WaitQueue)
    _engines: Sequence[Engine] = field(init=False, default=())
    _candidates: CandidateEngines = field(init=False, default_factory=CandidateEngines)
    # The latest trajectory that was the shortest of all waiting ones on its arrival, since the last call.
    _shorter: Trajectory | None = field(init=False, default=None)
    # The number for the next `ClusterView.touched_since`.
    _seen: int = field(init=False, default=0)
    # Context tokens added per generated token: itself and the observation tokens.
    _growth: float = field(init=False, default=3.0)
    # The longest context that engines take.
    _most_tokens: float = field(init=False, default=math.inf)
    # The admission while predictions say too little.
    _unpredicted: KvForecast = field(init=False, compare=False)
    _predicts: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        if min(self.fill, self.per_slot) <= 0 or min(self.critical, self.margin) < 0 or self.lengths < 1:
            raise ValueError("use fill and per_slot above 0, critical and margin from 0, lengths from 1")
        if not 0 <= self.least_share <= 1:
            raise ValueError("use a least_share from 0 to 1")
        if self.quantile not in ("median", "q90"):
            raise ValueError(f"quantile={self.quantile}: use median or q90")
        self._costs = EngineCosts(self.profile)
        self._unpredicted = KvForecast(fill=self.fill)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        self._costs = EngineCosts(self.profile, known)

    def rank(self, trajectory: Trajectory) -> None:
        """Put a waiting trajectory into the queue, or change its place after a new prediction."""
        if trajectory.prediction is None:  # the run has no predictor
            self._predicts = False
            return
        tokens = trajectory.remaining_tokens(self.quantile) or 0.0
        path = tokens + (tools_left(trajectory, self._costs.pace_s) if self.tools else 0.0)
        self._enqueue(trajectory, tokens, path)
        if self._queue.shortest() is trajectory:
            self._shorter = trajectory

    def forget(self, trajectory: Trajectory) -> None:
        self._queue.discard(trajectory)
        self._unpredicted.forget(trajectory)

    def admit(self, view: ClusterView) -> Iterator[Admit]:
        """Admit the longest trajectories that fit, each with a reservation on its engine.

        An engine that rejected all is not checked again before its load has dropped, a shorter trajectory arrives that
        fits there, or its turn comes. O(residents) for each checked engine, O(log residents) for each engine asked for
        a new shortest trajectory.
        """
        if not self._predicts or self._queue.learnt_from <= view.alive:
            yield from self._admit_unpredicted(view)
            return
        self._growth = 1.0 + observed_per_token(view)
        self._take_changes(view, view.ready_engines)
        if self._queue.longest() is None or not view.ready_engines:
            return
        if not self._prepare(view) or not self._candidates:
            return
        # Mean remaining tokens per live trajectory, if all remaining tokens were divided among the live ones.
        left_tokens, alive = self._all_left(view), view.alive
        rest_tokens = left_tokens / max(1, alive)
        snapshots: dict[EngineId, EngineSnapshot] = {}
        admitted = 0
        while self._queue.longest() is not None and (engine := self._candidates.next()) is not None:
            name = engine.engine_id
            if name not in snapshots:
                snapshots[name] = self._snapshot(view, engine, rest_tokens)
                self._candidates.put(engine, self._turn_of(view, engine))
                continue  # its number is exact now, and another engine may precede it
            critical = self.critical * left_tokens / max(1, alive + admitted)
            chosen = self._next(snapshots[name], critical)
            if chosen is None:
                self._candidates.close(engine, self._rejection(view, snapshots[name]))
                if self._all_closed(view):
                    snapshots.clear()
                continue
            self._queue.remove(chosen)
            demand = self._demand(chosen, self.lengths)
            yield Admit(chosen, name, demand.context_tokens + demand.growth * demand.tokens / 2)
            snapshots[name].add(chosen, demand)
            self._candidates.put(engine, self._turn_of(view, engine))
            admitted += 1

    def _admit_unpredicted(self, view: ClusterView) -> Iterator[Admit]:
        for one in self._unpredicted.admit(view):
            self._queue.discard(one.trajectory)
            yield one
        self._engines = ()  # rejections of engines are not kept up to date meanwhile

    # -- overridden by `Deadline` ----------------------------------------------------------------------------

    def _bound_lengths(self, most_tokens: float) -> None:
        """Take the longest context of the engines as the bound of all lengths."""
        self._most_tokens = most_tokens

    def _enqueue(self, trajectory: Trajectory, tokens: float, path: float) -> None:
        self._queue.put(trajectory, tokens, path)

    def _prepare(self, view: ClusterView) -> bool:
        """Called before engines are asked; False admits nothing now."""
        return True

    def _next(self, engine: EngineSnapshot, critical: float) -> Trajectory | None:
        """The waiting trajectory that starts next on this engine, if any."""
        if not engine.held:
            return self._queue.longest()
        if engine.free < 1:
            return None
        return longest_or_sibling(self._queue, engine, critical, self._queued_demand)

    def _queued_demand(self, trajectory: Trajectory) -> RemainingDemand:
        """Demand of a waiting trajectory, with its mean length only."""
        return self._demand(trajectory, 1)

    def _turn_of(self, view: ClusterView, engine: Engine) -> float:
        """Sort key of the order in which engines are asked, smallest first: the used share of the engine."""
        return self._held_share(view, engine)

    def _rejection(self, view: ClusterView, site: EngineSnapshot) -> Rejection:
        """The condition for asking the engine again: some residents have left, or its queue is short enough."""
        held, queued = load_of(view, site.engine)
        share = self._held_share(view, site.engine)
        if site.free < 1:
            most_queued = queued + site.free - 1
            return Rejection(held, most_queued - int(_LEFT_SHARE * most_queued), share, None)
        return Rejection(held, -1.0, share, site)

    def _all_closed(self, view: ClusterView) -> bool:
        """Called after a rejection; True if engines were opened and are to be checked again."""
        return False

    def _in_turn(self, engines: Sequence[Engine]) -> Engine | None:
        """An engine to check although it did not change, since predictions may fall; usually None."""
        return self._candidates.next_in_turn(engines)

    def _share(self, engine: Engine, longest: Longest, rest_tokens: float) -> float:
        """Share of the engine that may be used beside its longest resident."""
        if longest.path <= rest_tokens or longest.tokens <= 0:
            return 1.0
        pace = (rest_tokens - (longest.path - longest.tokens)) / longest.tokens
        return max(self.least_share, self._costs.share_beside(engine, pace))

    def _residents(self, view: ClusterView, engine: Engine) -> list[tuple[Trajectory, RemainingDemand]]:
        """Residents of the engine, reservations included, with their demands."""
        there = (*view.residents(engine), *view.reserved(engine))
        return [(t, self._demand(t, self.lengths)) for t in there]

    def _snapshot(self, view: ClusterView, engine: Engine, rest_tokens: float) -> EngineSnapshot:
        held, queued = load_of(view, engine)
        most = self.per_slot * engine.spec.slots
        if held and queued > most - 1:
            return EngineSnapshot(engine, most - queued, held)
        there = self._residents(view, engine)
        longest = longest_of(there)
        share = self._share(engine, longest, rest_tokens)
        capacity = self._capacity(engine, share)
        return EngineSnapshot(engine, share * most - queued, held, capacity, there, longest, self.margin)

    # -- opening engines -------------------------------------------------------------------------------------

    def _take_changes(self, view: ClusterView, engines: Sequence[Engine]) -> None:
        """Open the engines that may have room since their rejection."""
        names, self._seen = view.touched_since(self._seen)
        shorter, self._shorter = self._shorter, None
        if engines is not self._engines or (self._candidates.rejections and view.alive < len(engines)):
            self._engines = engines
            if self._costs.see(engines):
                for trajectory in self._queue.trajectories:
                    self.rank(trajectory)
            self._bound_lengths(max((e.spec.max_context_tokens for e in engines), default=math.inf))
            self._candidates.reset((engine, self._turn_of(view, engine)) for engine in engines)
            return
        if not engines:
            return
        for name in names:
            if name in self._candidates:
                engine = view.engine(name)
                self._candidates.put(engine, self._turn_of(view, engine))
        if self._candidates.rejections:
            self._reopen(view, engines)
            if shorter is not None:
                self._open_for(view, shorter)

    def _reopen(self, view: ClusterView, engines: Sequence[Engine]) -> None:
        """Open the engines with less load than at their rejection, and sometimes the next in turn."""
        in_turn = self._in_turn(engines)
        for name in view.freed if in_turn is None else [*view.freed, in_turn.engine_id]:
            rejection = self._candidates.rejections.get(name)
            if rejection is None:
                continue
            engine = view.engine(name)
            held, queued = load_of(view, engine)
            enough = rejection.held - held > _LEFT_SHARE * held
            if engine is in_turn or enough or queued <= rejection.most_queued:
                self._open(view, engine)

    def _open_for(self, view: ClusterView, arrival: Trajectory) -> None:
        """Open the least used full engine on which this trajectory fits, according to the snapshot of its rejection.

        No other waiting trajectory may start there: all were rejected, or wait for a critical one. The share that may
        be reserved is the current one.
        """
        demand = self._demand(arrival, 1)
        rest_tokens = self._all_left(view) / max(1, view.alive)
        for site in self._candidates.full():
            share = self._share(site.engine, site.longest, rest_tokens)
            site.set_capacity(self._capacity(site.engine, share))
            if site.fits(arrival, demand):
                self._open(view, site.engine)
                return

    def _open(self, view: ClusterView, engine: Engine) -> None:
        self._candidates.open(engine, self._turn_of(view, engine))

    # -- sizes -----------------------------------------------------------------------------------------------

    def _demand(self, trajectory: Trajectory, lengths: int, unseen_tokens: float = 0.0) -> RemainingDemand:
        pace_s = self._costs.pace_s if self.tools else None
        growth = growth_of(trajectory, self._growth)
        return demand_of(trajectory, lengths, pace_s, growth, unseen_tokens, self._most_tokens)

    def _all_left(self, view: ClusterView) -> float:
        """Remaining tokens of all waiting and live trajectories."""
        return self._queue.tokens + view.expected_tokens

    def _held_share(self, view: ClusterView, engine: Engine) -> float:
        """The larger of two shares: residents per slot (four per slot are 1), and KV memory in use."""
        slots = (len(engine.residents) + len(engine.reserved)) / (4 * engine.spec.slots)
        capacity = self.fill * engine.spec.kv_capacity_tokens
        return slots if capacity <= 0 else max(slots, held_tokens(view, engine) / capacity)

    def _capacity(self, engine: Engine, share: float) -> float:
        """KV tokens that may be reserved; 0 when the engine does not report its memory."""
        reported = self.fill * engine.spec.kv_capacity_tokens
        return max(1.0, share * reported) if reported > 0 else 0.0
