"""The strategy: merge engines for the tail when that is clearly worth it, by median and 0.9 quantile alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.transitions import TrajectoryState
from heddle_dask.core.view import ClusterView, Regroup
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.observation_tokens import observed_per_token
from heddle_dask.strategies.regrouping.foreseen import TailEngine, TailTrajectory
from heddle_dask.strategies.regrouping.merging import (
    Foreseen,
    MergedKind,
    best_regroup,
    best_share,
    regrouped_s,
    staying_s,
)

RESTART_S = 60.0
"""Where nobody says what a start takes. vLLM on one GPU, weights and compiled graphs cached: 34 s of `init engine`, 59
until the first answer (vllm-project/vllm issue 20264)."""
_WEIGHT_TOKENS = 1000.0  # what is known of all weighs as much as so many tokens of one's own
_ALIVE_STEP = 8  # asked again when an eighth of those alive has ended


@dataclass(slots=True)
class MergeIdle:
    """Merge engines of a node when the last trajectory is then foreseen to end clearly earlier.

    Parameters
    ----------
    profile
        Cost profile of the engines (`heddle_dask.cost`).
    evacuate
        Engines that still hold trajectories may be merged too; these go to the others first. Else only idle ones.
    restart_s
        Seconds until a merged engine answers; None: what the body says, `RESTART_S` where it says nothing.
    relative, absolute_s
        Least gain: as a share of the time that the tail takes without merging, and in seconds. Both must hold under
        the median and under the 0.9 quantile of the predictions.
    per_slot
        Ask only while no more than this share of the slots is taken: before that it is no tail.
    most
        Most regroups of a session.
    """

    profile: str = "tiny-cpu"
    evacuate: bool = True
    restart_s: float | None = None
    relative: float = 0.1
    absolute_s: float = 1.0
    per_slot: float = 0.25
    most: int = 8
    _costs: EngineCosts = field(init=False)
    _known: Mapping[int, EngineCost] = field(init=False, default_factory=dict)
    _body_restart_s: float = field(init=False, default=RESTART_S)
    _done: int = field(init=False, default=0)
    _asked_at_alive: int = field(init=False, default=0)
    _sent: dict[TrajectoryId, EngineId] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.relative, self.absolute_s, self.per_slot, self.most, self.restart_s or 0.0) < 0:
            raise ValueError(
                "use numbers of at least 0 for relative, absolute_s, per_slot, most and restart_s"
            )
        self._costs = EngineCosts(self.profile)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        """Reckon with these costs by TP degree; engines are merged to no other degree."""
        self._known = known
        self._costs = EngineCosts(self.profile, known)

    def use_restart(self, seconds: float) -> None:
        """A merged engine answers after so many seconds, as far as the body knows."""
        self._body_restart_s = seconds

    def propose(self, view: ClusterView, at: float) -> Regroup | None:
        """Merges that pay, or None."""
        engines = view.ready_engines
        if self._done >= self.most or len(engines) < 2 or not self._is_due(view.alive, engines):
            return None
        if len({engine.spec.max_context_tokens for engine in engines}) > 1:
            return None  # those that are left might not take every context
        observed = observed_per_token(view)
        fleet = [self._tail_engine(engine, observed) for engine in engines]
        kinds = self._kinds(engines, observed)
        tails = [self._tail(view, engines, at, quantile) for quantile in ("q90", "median")]
        if not kinds or not all(tails):
            return None
        cautious, median = tails
        assert cautious is not None and median is not None
        best = best_regroup(fleet, cautious, kinds, evacuate=self.evacuate)
        if best is None or not self._is_clear(best):
            return None
        likely_s = regrouped_s(fleet, median, best.merges, kinds)
        if not self._is_clear(Foreseen(best.merges, staying_s(fleet, median), likely_s)):
            return None
        self._done += 1
        return Regroup(best.merges, best.stay_s, best.regroup_s)

    def attract(self, view: ClusterView, engine: Engine, at: float) -> Sequence[Trajectory]:
        """The longest, as many as end both sides together; nobody where that ends no earlier."""
        others = [other for other in view.ready_engines if other is not engine]
        left = self._tail(view, [engine, *others], at, "q90")
        if left is None:
            return []
        observed = observed_per_token(view)
        fleet = [self._tail_engine(other, observed) for other in others]
        merged = self._tail_engine(engine, observed)
        self._seat_sent(left)
        seconds, going = best_share(fleet, left, [merged])
        if seconds >= staying_s(fleet, left):
            return []
        self._sent.update((row.trajectory_id, engine.engine_id) for row in going)
        return [view.trajectory(row.trajectory_id) for row in going]

    def _seat_sent(self, left: dict[EngineId, list[TailTrajectory]]) -> None:
        """Those on their way to an engine that joined just before count as being there."""
        sent, self._sent = self._sent, {}
        for engine_id, rows in list(left.items()):
            for row in list(rows):
                target = sent.get(row.trajectory_id, engine_id)
                if target != engine_id and target in left:
                    self._sent[row.trajectory_id] = target
                    rows.remove(row)
                    left[target].append(row)

    def _is_due(self, alive: int, engines: Sequence[Engine]) -> bool:
        """Few enough are alive, and an eighth fewer than when it was asked last (or more: another batch)."""
        asked, self._asked_at_alive = self._asked_at_alive, 0
        if not alive or alive > self.per_slot * sum(engine.spec.slots for engine in engines):
            return False
        due = alive > asked or alive <= asked - max(1, asked // _ALIVE_STEP)
        self._asked_at_alive = alive if due else asked
        return due

    def _is_clear(self, foreseen: Foreseen) -> bool:
        return foreseen.gain_s >= max(self.absolute_s, self.relative * foreseen.stay_s, 1e-9)

    def _tail_engine(self, engine: Engine, observed: float) -> TailEngine:
        spec, cost = engine.spec, self._costs.of(engine)
        return TailEngine(spec.engine_id, spec.node, spec.tp_degree, cost, spec.slots, observed)

    def _kinds(self, engines: Sequence[Engine], observed: float) -> dict[int, MergedKind]:
        """Degrees above the least that runs; slots grow with the degree, as memory does."""
        least = min(engines, key=lambda engine: engine.spec.tp_degree).spec
        longest = max(engine.spec.max_context_tokens for engine in engines)
        restart_s = self._body_restart_s if self.restart_s is None else self.restart_s
        return {
            degree: MergedKind(
                TailEngine(
                    least.engine_id, "", degree, cost, least.slots * degree // least.tp_degree, observed
                ),
                restart_s,
            )
            for degree, cost in sorted(self._known.items())
            if degree > least.tp_degree and cost.capacity_tokens >= longest
        }

    def _tail(
        self, view: ClusterView, engines: Sequence[Engine], at: float, quantile: str
    ) -> dict[EngineId, list[TailTrajectory]] | None:
        """What lives where; None when somebody alive lives nowhere or nothing is predicted of it."""
        found: dict[EngineId, list[TailTrajectory]] = {}
        count = 0
        pooled = _tool_s_per_token(view, engines)
        for engine in engines:
            token_s = self._tail_engine(engine, 0.0).token_s(len(engine.inflight), engine.inflight_tokens)
            rows = []
            for trajectory in view.residents(engine):
                predicted = (
                    trajectory.predicted_tokens_q90 if quantile == "q90" else trajectory.predicted_tokens
                )
                if predicted is None:
                    return None
                rows.append(_row(trajectory, predicted, at, token_s, pooled))
            found[engine.engine_id] = rows
            count += len(rows)
        return found if count == view.alive else None


def _tool_s_per_token(view: ClusterView, engines: Sequence[Engine]) -> float:
    """Tool seconds for each generated token, of all that live on these engines."""
    residents = [trajectory for engine in engines for trajectory in view.residents(engine)]
    tools_s = sum(t.tools_s for t in residents)
    return tools_s / max(1, sum(t.generated_tokens for t in residents))


def _row(
    trajectory: Trajectory, predicted: float, at: float, token_s: float, tool_s_per_token: float
) -> TailTrajectory:
    """What it still needs now: less what it has generated since it was predicted, in the running step as far as the
    clock says; at least a token. Its own tools weigh as its tokens do, those of all like `_WEIGHT_TOKENS`.
    """
    made = trajectory.generated_tokens - trajectory.predicted_at_tokens
    running = 0.0
    if trajectory.state is TrajectoryState.GENERATING and token_s > 0:
        running = (at - trajectory.requested_at) / token_s
    tokens = max(1.0, predicted - made - running)
    running = min(running, max(0.0, predicted - made))
    tools_s = trajectory.tools_s + tool_s_per_token * _WEIGHT_TOKENS
    tool_s = tokens * tools_s / (trajectory.generated_tokens + _WEIGHT_TOKENS)
    return TailTrajectory(trajectory.trajectory_id, tokens, trajectory.context_tokens + running, tool_s)
