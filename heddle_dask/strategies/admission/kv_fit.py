"""Admission by KV memory: the longest predicted first, each as soon as an engine has room for it until it ends.

A trajectory that comes back from its tool to find its context thrown out pays for the whole of it again. Where the
contexts of all that are alive do not fit, that happens at nearly every step, and neither order nor placement repairs it
(CONCUR, 2601.22705; ThunderAgent, 2602.13692). So a trajectory starts when an engine has room for its context as it
will grow (`cost.memory_profile`), and keeps that room until it ends. Those that wait are bound to no engine: the next
one with room takes the longest that fits, which is Graham's list schedule with backfilling (`next_in_line`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.admission.candidate_engines import EngineGate, Refusal
from heddle_dask.strategies.admission.coming import Coming
from heddle_dask.strategies.admission.deadlines import FinishLine
from heddle_dask.strategies.admission.engine_backlog import EngineRoom, ask_of
from heddle_dask.strategies.admission.engine_snapshot import AdmissionSite, Longest, longest_of
from heddle_dask.strategies.admission.next_in_queue import next_in_line
from heddle_dask.strategies.admission.running_step import unseen_tokens
from heddle_dask.strategies.admission.wait_queue import WaitingLine
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.observation_tokens import growth_of, observed_per_token
from heddle_dask.strategies.remaining import is_certain
from heddle_dask.strategies.remaining_demand import Stay, stay_of, tools_left

# Nobody waits longer than this for others of the first batch to be predicted.
_FIRST_BATCH_S = 2.0
_ROUNDING_S = 1e-6
# Such a share of its residents, or of its queue, must have left an engine before it is looked at again: a look takes
# time for each of them, and finds little room before (docs/LOG.md).
_LEFT_SHARE = 1 / 64


@dataclass(slots=True)
class KvFit:
    """Admit the longest that fits while not too many queue; one per engine in any case.

    A long one is *critical*: started late, it ends last. Of those that are not, one goes first whose group's prompt the
    engine holds: it takes less memory and less prefill there, and the order matters little. Whose own tokens would take
    longer than everything else, at the pace of a full engine, gets a quicker one: fewer are admitted beside it, so that
    it ends with the others (the interference of Heddle's Eq. 2, at admission).

    With `in_time` it is reckoned when everything could be done (`finish_line`), and an engine takes no more work than
    it can do until then. The engine whose longest is the longest is asked first: the long ones come together. Nobody
    passes a critical one that waits for memory (`next_in_line`).

    Parameters
    ----------
    profile
        Cost profile of the engines (`heddle_dask.cost`); only ratios matter.
    fill
        Share of each engine's KV memory that may be promised. Engines that do not say how much they have bound nothing.
    certain_fill
        The same in time (`in_time`): no margin is kept for lengths that are certain, and contexts grow in lumps.
    per_slot
        Most trajectories that generate or queue, per slot. More than 1: a free slot finds a step at once, and the
        predictor sees more trajectories begin.
    certain_per_slot
        The same in time: the memory is foreseen as if all went on at one pace, and of those that queue the short ones,
        which would free theirs, go last.
    critical
        Critical is who has more left than this share of what all have left, divided by those that are alive: of the
        time, that is, until everything is done.
    least_share
        The engine of the longest takes at least this share of what it could, however long that one is. A guess of a
        length that is too long by far would otherwise empty an engine for it (docs/LOG.md has 0, 0.5, 0.7 and 1). Where
        a prediction leaves no doubt, as an oracle's, it is not needed.
    lengths
        By how many equally likely lengths each trajectory's future is counted (`remaining`); 1: it ends at its mean.
    margin
        Standard deviations of the memory in use, as foreseen, that are kept free.
    quantile
        Which prediction is *longest*, and how much is left of a trajectory.
    tools
        Whether the time of tools still to come counts (`stay`): for who is longest, and how long memory is held.
    in_time
        Whether an engine takes only what it can do in time, as long as predictions leave no doubt, as an oracle's. With
        guesses it gains nothing (docs/LOG.md).
    """

    profile: str = "tiny-cpu"
    fill: float = 0.95
    certain_fill: float = 0.85
    per_slot: float = 2.5
    certain_per_slot: float = 1.2
    critical: float = 1.0
    least_share: float = 0.7
    lengths: int = 4
    margin: float = 1.0
    quantile: Literal["median", "q90"] = "q90"
    tools: bool = True
    in_time: bool = True
    _costs: EngineCosts = field(init=False)
    _line: WaitingLine = field(init=False, default_factory=WaitingLine)
    _coming: Coming = field(init=False, default_factory=Coming)
    _engines: Sequence[Engine] = field(init=False, default=())
    _gate: EngineGate = field(init=False, default_factory=EngineGate)
    # Came last, and is shorter than all that were refused.
    _shorter: Trajectory | None = field(init=False, default=None)
    # How much of what has touched engines is known (`ClusterView.touched_since`).
    _seen: int = field(init=False, default=0)
    # Whether every prediction so far left no doubt, and some was made.
    _exact: bool | None = field(init=False, default=None)
    _growth: float = field(init=False, default=3.0)
    _finish: FinishLine = field(init=False, default_factory=FinishLine)
    # When the first of those came who wait while nobody is alive.
    _first_at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if min(self.fill, self.certain_fill, self.per_slot, self.certain_per_slot) <= 0 or self.critical < 0:
            raise ValueError("use fill and per_slot, certain or not, above 0 and critical of at least 0")
        if not 0 <= self.least_share <= 1:
            raise ValueError("use a least_share from 0 to 1")
        if self.lengths < 1 or self.margin < 0:
            raise ValueError("use at least 1 of lengths and a margin of at least 0")
        if self.quantile not in ("median", "q90"):
            raise ValueError(f"quantile={self.quantile}: use median or q90")
        self._costs = EngineCosts(self.profile)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        """Reckon with these costs by TP degree in place of the profile."""
        self._costs = EngineCosts(self.profile, known)

    def rank(self, trajectory: Trajectory) -> None:
        """It may be admitted from now on; once more when its prediction is new."""
        self._exact = self._exact is not False and is_certain(trajectory)
        stay = self._stay(trajectory, 1)
        self._line.put(trajectory, self._left(trajectory), self._path(trajectory), stay)
        if self._line.shortest() is trajectory:
            self._shorter = trajectory

    @property
    def keeps_time(self) -> bool:
        """Whether engines take only what they can do in time."""
        return self.in_time and self._exact is True

    @property
    def _fill(self) -> float:
        return self.certain_fill if self.keeps_time else self.fill

    @property
    def _per_slot(self) -> float:
        return self.certain_per_slot if self.keeps_time else self.per_slot

    def _left(self, trajectory: Trajectory) -> float:
        said = trajectory.prediction
        if said is None:
            return 0.0
        return said.tokens_q90 if self.quantile == "q90" else said.tokens

    def _path(self, trajectory: Trajectory) -> float:
        """Until its end, tools included."""
        return self._left(trajectory) + (tools_left(trajectory, self._costs.pace_s) if self.tools else 0.0)

    def _stay(self, trajectory: Trajectory, lengths: int, unseen_tokens: float = 0.0) -> Stay:
        pace_s = self._costs.pace_s if self.tools else None
        growth = growth_of(trajectory, self._growth)
        return stay_of(trajectory, lengths, pace_s, growth, unseen_tokens)

    def _waiting_stay(self, trajectory: Trajectory) -> Stay:
        """Of one that waits, by one length: what is certain does not change."""
        return self._line.stay_of(trajectory) if self.keeps_time else self._stay(trajectory, 1)

    def engine_for(self, trajectory_id: TrajectoryId) -> EngineId | None:
        """Where it was admitted to, for the placement; asked once."""
        return self._coming.placed(trajectory_id)

    def promised_tokens(self, name: EngineId) -> float:
        """KV tokens of those that were admitted to this engine and are not there yet, as they will be on average."""
        return self._coming.promised_tokens(name)

    def admit(self, view: ClusterView) -> Sequence[Trajectory]:
        """The longest that have room.

        Whoever refused everybody is not looked at again before it has less to do, or a shorter one comes that fits
        there, or its turn comes. O(residents) for each engine that is looked at, O(log residents) for each that a
        newcomer asks who is the shortest.
        """
        self._growth = _growth(view)
        self._take_news(view, view.ready_engines)
        if self._line.longest() is None or not view.ready_engines or self._others_come(view):
            return []
        if self.keeps_time:
            self._foresee(view)
        if not self._gate:
            return []
        # What each of those alive would still have to generate if all that is left were shared out among them.
        left_tokens = self._all_left(view)
        rest_tokens = left_tokens / max(1, view.alive)
        sites: dict[EngineId, AdmissionSite] = {}
        admitted: list[Trajectory] = []
        # Whoever holds least, as a share of what it may, is next; in time, who has the longest.
        while self._line.longest() is not None and (engine := self._gate.next()) is not None:
            name = engine.engine_id
            if name not in sites:
                sites[name] = self._site(view, engine, rest_tokens)
                self._gate.put(engine, self._turn_of(engine))
                continue  # now that it was looked at, another may come first
            site = sites[name]
            critical = self.critical * left_tokens / max(1, view.alive + len(admitted))
            chosen = next_in_line(self._line, site, critical, self._waiting_stay)
            if chosen is None:
                self._refuse(site)
                if self._all_late(view):
                    sites.clear()
                continue
            self._line.remove(chosen)
            stay = self._stay(chosen, self.lengths)
            self._coming.add(name, chosen, stay.context_tokens + stay.growth * stay.tokens / 2)
            site.add(chosen, stay)
            self._gate.put(engine, self._turn_of(engine))
            admitted.append(chosen)
        return admitted

    def may_leave(self, view: ClusterView, trajectory: Trajectory) -> bool:
        """Whether it may move at all: its engine is late, as it was when it was looked at last. O(1).

        A guess may always: what is known of it now is more than was known when it was admitted.
        """
        if not self.keeps_time or trajectory.home is None:
            return True
        return self._finish.end_s(view.engine(trajectory.home), view.at) > self._finish.late_s(view.at)

    def may_move(self, view: ClusterView, trajectory: Trajectory, target: EngineId) -> bool:
        """Whether one that `may_leave` may go there: its engine is late, looked at now, and that one will not be.

        Nor will it be the longest there: one that is alone of its length prices the fixed part of all the iterations
        that it takes, and crawls beside the many short ones until they are done. Once nobody waits, that is no longer
        so where the contexts are lighter than at home, and to be done sooner than home is enough.
        """
        if not self.keeps_time or trajectory.home is None:
            return True
        home, there = view.engine(trajectory.home), view.engine(target)
        end_s = self._room(view, home).end_s
        if end_s <= self._finish.late_s(view.at):
            return False
        ask, room = ask_of(self._stay(trajectory, 1)), self._room(view, there)
        if room.has_longer(ask) and room.fits(ask):
            return True
        if len(self._line) or self._iteration_s(there) > self._iteration_s(home):
            return False
        return room.end_with_s(ask, end_s) < end_s

    def _others_come(self, view: ClusterView) -> bool:
        """Whether nobody should start yet: the first batch is better judged as a whole than in the order of answers."""
        if not self.keeps_time or view.alive or self._coming or len(self._line) >= view.waiting:
            self._first_at = None
            return False
        if self._first_at is None:
            self._first_at = view.at
        return view.at < self._first_at + _FIRST_BATCH_S

    def _foresee(self, view: ClusterView) -> None:
        """When everything could be done; whoever had no time left may have some then."""
        left_tokens, waiting = self._all_left(view), len(self._line)
        if not self._finish.outdated(view.ready_engines, left_tokens, waiting):
            return
        costs = [(self._costs.of(e), self._promised(e)) for e in view.ready_engines]
        for engine in view.ready_engines:
            if not self._finish.knows(engine):
                self._room(view, engine)
        self._finish.foresee(view.at, view.ready_engines, costs, self._line.sums.longest_first(), left_tokens)
        self._open_late(view)

    def _open_late(self, view: ClusterView) -> None:
        for name in list(self._gate.late):
            self._open_again(view.engine(name))

    def _all_late(self, view: ClusterView) -> bool:
        """Whether every engine refused for want of time alone: then it is later, and the first to be done goes on."""
        late = self._gate.late
        if len(late) < len(view.ready_engines) or not self._finish.postpone(min(late.values())):
            return False
        self._open_late(view)
        return True

    def _take_news(self, view: ClusterView, engines: Sequence[Engine]) -> None:
        """Open the engines that may have room which they had not when they refused."""
        names, self._seen = view.touched_since(self._seen)
        shorter, self._shorter = self._shorter, None
        asked = self._coming.take_asked()
        for name in names:
            self._coming.drop_arrived(name)
        if engines is not self._engines or (self._gate.refused and view.alive < len(engines)):
            self._engines = engines
            self._gate.reset((engine, self._turn_of(engine)) for engine in engines)
            self._coming.keep({engine.engine_id for engine in engines})
            return
        if not engines:
            return
        for name in (*names, *asked):
            if name in self._gate:
                engine = view.engine(name)
                self._gate.put(engine, self._turn_of(engine))
        if self._gate.refused:
            self._reopen(view, engines, [*view.freed, *asked])
            if shorter is not None:
                self._open_for(view, shorter)

    def _reopen(self, view: ClusterView, engines: Sequence[Engine], names: list[EngineId]) -> None:
        """Open those of `names` that have less to do than when they refused, and now and then whose turn it is."""
        # Predictions that are certain do not fall, and what is late is opened when the end is foreseen anew.
        in_turn = None if self.keeps_time else self._gate.next_in_turn(engines)
        for name in names if in_turn is None else [*names, in_turn.engine_id]:
            refused = self._gate.refused.get(name)
            if refused is None:
                continue
            engine = view.engine(name)
            held, queued = self._load(engine)
            enough = refused.held - held > _LEFT_SHARE * held
            if engine is in_turn or enough or queued <= refused.most_queued:
                self._open_again(engine)

    def _open_for(self, view: ClusterView, newcomer: Trajectory) -> None:
        """Open the one of those that were full that holds least and has room for this one, as it was then.

        Nobody else who waits may start there: all were refused, or wait for one that is critical (`next_in_line`). What
        may be promised is as it is now.
        """
        stay = self._stay(newcomer, 1)
        rest_tokens = self._all_left(view) / max(1, view.alive)
        for site in self._gate.full_sites():
            share = self._share(site.engine, site.longest, rest_tokens)
            site.set_capacity(self._capacity(site.engine, share))
            if site.fits(newcomer, stay):
                self._open_again(site.engine)
                return

    def _all_left(self, view: ClusterView) -> float:
        """What is left of all that wait or are alive."""
        return self._line.tokens + view.expected_tokens

    def _open_again(self, engine: Engine) -> None:
        self._gate.open(engine, self._turn_of(engine))

    def _refuse(self, site: AdmissionSite) -> None:
        """Not before some residents have left, or, where only the queue is too long, before that is short enough."""
        held, queued = self._load(site.engine)
        share = self._held_share(site.engine)
        if site.free < 1:
            most_queued = queued + site.free - 1
            refusal = Refusal(held, most_queued - int(_LEFT_SHARE * most_queued), share, None)
        else:
            refusal = Refusal(held, -1.0, share, site, self._time_for_one(site))
        self._gate.close(site.engine, refusal)

    def _load(self, engine: Engine) -> tuple[int, int]:
        """How many live at the engine, and how many generate or queue there; with those that are coming."""
        coming = len(self._coming.to(engine.engine_id))
        return len(engine.residents) + coming, len(engine.inflight) + coming

    def _turn_of(self, engine: Engine) -> float:
        """By which engines are asked, the least first: in time, where the longest is; else who holds least."""
        return self._held_share(engine) - (self._finish.longest(engine) if self.keeps_time else 0.0)

    def _held_share(self, engine: Engine) -> float:
        """Trajectories per slot, or KV memory held, whichever is more of what there is; four a slot are all."""
        coming = self._coming.to(engine.engine_id)
        slots = (len(engine.residents) + len(coming)) / (4 * engine.spec.slots)
        capacity = self._fill * engine.spec.kv_capacity_tokens
        if capacity <= 0:
            return slots
        return max(slots, self._held_tokens(engine) / capacity)

    def _held_tokens(self, engine: Engine) -> int:
        return engine.resident_tokens + sum(t.context_tokens for t in self._coming.to(engine.engine_id))

    def _iteration_s(self, engine: Engine) -> float:
        """Of an iteration with everybody who lives there or is coming."""
        batch = min(self._load(engine)[0], engine.spec.slots)
        return self._costs.of(engine).iteration_s(batch, self._held_tokens(engine))

    def _there(self, view: ClusterView, engine: Engine) -> list[tuple[Trajectory, Stay]]:
        """Who lives there or is coming, and for how long."""
        residents = view.residents(engine)
        unseen: Mapping[TrajectoryId, float] = {}
        if self.keeps_time:
            unseen = unseen_tokens(engine, residents, self._costs.of(engine), view.at)
        return [
            (t, self._stay(t, self.lengths, unseen.get(t.trajectory_id, 0.0)))
            for t in (*residents, *self._coming.to(engine.engine_id))
        ]

    def _room(
        self, view: ClusterView, engine: Engine, there: Sequence[tuple[Trajectory, Stay]] | None = None
    ) -> EngineRoom:
        """What it has to do as of now, and the time for it; `there` where that is known already."""
        asks = [ask_of(stay) for _, stay in (self._there(view, engine) if there is None else there)]
        return self._finish.look(engine, self._costs.of(engine), self._promised(engine), view.at, asks)

    def _promised(self, engine: Engine) -> float:
        """KV tokens that may be promised in all."""
        told = engine.spec.kv_capacity_tokens
        return self._fill * (told if told > 0 else self._costs.of(engine).capacity_tokens)

    def _site(self, view: ClusterView, engine: Engine, rest_tokens: float) -> AdmissionSite:
        self._coming.drop_arrived(engine.engine_id)
        held, queued = self._load(engine)
        most = self._per_slot * engine.spec.slots
        if held and queued > most - 1:
            return AdmissionSite(engine, most - queued, held)
        there = self._there(view, engine)
        longest = longest_of(there)
        share = self._share(engine, longest, rest_tokens)
        capacity = self._capacity(engine, share)
        room = self._room(view, engine, there) if self.keeps_time else None
        free = share * most - queued
        return AdmissionSite(engine, free, held, capacity, there, longest, self.margin, room)

    def _capacity(self, engine: Engine, share: float) -> float:
        """KV tokens that may be promised; 0 says that the engine does not tell how much it has."""
        told = self._fill * engine.spec.kv_capacity_tokens
        return max(1.0, share * told) if told > 0 else 0.0

    def _share(self, engine: Engine, longest: Longest, rest_tokens: float) -> float:
        """How much of the engine may be used beside the longest that lives there."""
        # In time, whoever is certain is reckoned with in seconds.
        if longest.path <= rest_tokens or longest.tokens <= 0 or self.keeps_time:
            return 1.0
        pace = (rest_tokens - (longest.path - longest.tokens)) / longest.tokens
        return max(0.0 if longest.exact else self.least_share, self._costs.share_beside(engine, pace))

    def _time_for_one(self, site: AdmissionSite) -> float | None:
        """The deadline with which it would take one; None where it lacks more than time."""
        if site.room is None or site.late is None:
            return None
        return site.room.at + site.room.rest_with_s(ask_of(self._waiting_stay(site.late))) + _ROUNDING_S


def _growth(view: ClusterView) -> float:
    """Context tokens that come with each generated token: itself, and what tools add."""
    return 1.0 + observed_per_token(view)
