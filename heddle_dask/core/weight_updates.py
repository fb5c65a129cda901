"""Weight updates of engines: fetch while they generate, then pause, load and resume.

Only the newest published version counts: it replaces an older one that is under way or at hand. An engine that joins
behind the version that is wanted takes no step before it has it. While an engine installs, and while it waits for a
move that uses it, no other move begins there: a KV cache must not arrive under other weights than it was written with.

A failed fetch or installation leaves an engine with what it has, and the fetch is repeated after a while, a few times.
An engine that takes no step yet does not wait for that: it loads the newest version before that it can get.
Where an engine is not usable after a failed installation its worker ends it and starts another, which joins.
"""

from __future__ import annotations

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command, FetchWeights, InstallWeights, WakeUp
from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId, PolicyVersion
from heddle_dask.core.migrations import Migrations
from heddle_dask.core.state import State
from heddle_dask.core.transitions import EngineEvent, EngineState, WeightsEvent, WeightsState

_SERVING = (EngineState.READY, EngineState.LOADING)


class WeightUpdates:
    """The controller's handler of weights."""

    def __init__(self, state: State, moves: Migrations) -> None:
        self.state = state
        self.moves = moves
        # Engines with fetched weights, those that install while they serve, and times of repetitions.
        self._fetched: dict[EngineId, None] = {}
        self._installing: dict[EngineId, None] = {}
        self._retries: dict[EngineId, float] = {}

    def published(self, event: ev.WeightsPublished) -> list[Command]:
        """Weights are in the store: engines fetch them."""
        run = self.state.runs.get(event.run_id)
        weights = self.state.weights
        policy = weights.policy if run is None else run.description.weights
        engines = self.state.engines.values()
        in_use = {engine.version for engine in engines if engine.state is not EngineState.LOST}
        if not weights.publish(event.version, event.uri, policy, in_use):
            return self.state.count_stale()
        return [command for engine in engines for command in self._fetch(engine)]

    def switch_requested(self, event: ev.SwitchRequested) -> list[Command]:
        """Engines are to go over to a newer version."""
        if not self.state.weights.switch(event.version):
            return self.state.count_stale()
        return self.install_next()

    def joined(self, engine: Engine) -> list[Command]:
        """An engine has joined: it fetches what it lacks."""
        return self._fetch(engine)

    def fetched(self, event: ev.WeightsFetched) -> tuple[list[Command], Engine | None]:
        """An engine has weights at hand, or could not get them; returns what `installed` does."""
        engine = self._under_way(event.engine_id, event.version)
        if engine is None:
            return self.state.count_stale(), None
        weights = engine.weights
        if event.cause:
            if not weights.advance(WeightsEvent.FETCH_FAILED):
                return self.state.count_stale(), None
            older = self._fetch_older(engine, event.cause)
            return (older, None) if older else (self._back_off(engine, event.cause), self._begins(engine))
        if not weights.advance(WeightsEvent.FETCHED):
            return self.state.count_stale(), None
        weights.cause = ""
        if engine.state in _SERVING:
            self._fetched[engine.engine_id] = None
        return self.install_next(), None

    def _under_way(self, engine_id: EngineId, version: PolicyVersion) -> Engine | None:
        """The engine, where that version is its target and it is not lost."""
        engine = self.state.engines.get(engine_id)
        if engine is None or engine.state is EngineState.LOST or engine.weights.target != version:
            return None
        return engine

    def _fetch_older(self, engine: Engine, cause: str) -> list[Command]:
        """Have an engine that takes no step yet fetch the version before the one that it could not get."""
        weights = engine.weights
        if engine.state is not EngineState.LOADING or weights.target is None:
            return []
        older = self.state.weights.instead_of(weights.target, weights.installed)
        if older is None:
            return []
        weights.target, weights.cause = older, cause
        return self._order_fetch(engine)

    def _back_off(self, engine: Engine, cause: str) -> list[Command]:
        weights, policy = engine.weights, self.state.weights.policy
        weights.target, weights.cause = self.state.weights.published, cause
        weights.failures += 1
        if weights.failures >= policy.max_fetches or engine.state not in _SERVING:
            weights.advance(WeightsEvent.GIVEN_UP)
            return []
        at_s = self.state.at + policy.backoff_s(weights.failures)
        self._retries[engine.engine_id] = at_s
        return [WakeUp(at_s)]

    def time_reached(self, event: ev.TimeReached) -> list[Command]:
        """Failed fetches whose time has come are repeated."""
        due = [engine_id for engine_id, at_s in self._retries.items() if at_s <= event.at]
        return [command for engine_id in due for command in self._order_fetch(self.state.engines[engine_id])]

    def _fetch(self, engine: Engine) -> list[Command]:
        """Have an engine fetch the newest weights, unless it has them, installs others, or does so already."""
        published, weights = self.state.weights.published, engine.weights
        if published is None or engine.state not in _SERVING or weights.state is WeightsState.INSTALLING:
            return []
        if not published.is_newer_than(weights.installed) or weights.target == published:
            return []
        weights.target, weights.failures = published, 0
        return self._order_fetch(engine)

    def _order_fetch(self, engine: Engine) -> list[Command]:
        target = engine.weights.target
        assert target is not None, engine.engine_id
        self._forget(engine.engine_id)
        commands = self._stop_waiting_for_moves(engine)
        engine.weights.advance(WeightsEvent.FETCH_ORDERED)
        return [*commands, FetchWeights(engine.engine_id, target, self.state.weights.uri_of(target))]

    def _forget(self, engine_id: EngineId) -> None:
        self._fetched.pop(engine_id, None)
        self._retries.pop(engine_id, None)

    # -- installing --------------------------------------------------------------------------------

    def install_next(self) -> list[Command]:
        """Have the engines install that may: one at a time or all, in the order of their fetches."""
        commands: list[Command] = []
        for engine_id in list(self._fetched):
            engine = self.state.engines[engine_id]
            if self._may_install_now(engine):
                commands.append(self._install(engine))
        return commands

    def _may_install_now(self, engine: Engine) -> bool:
        weights = self.state.weights
        if not weights.may_install(engine.weights):
            return False
        serves = engine.state is EngineState.READY
        if serves and weights.policy.order == "one-by-one" and self._installing:
            return False
        if self.moves.is_busy(engine.engine_id):
            engine.weights.waits_for_moves = True
            self.moves.close(engine.engine_id)
            return False
        return True

    def _install(self, engine: Engine) -> Command:
        name, weights = engine.engine_id, engine.weights
        assert weights.target is not None, name
        self._forget(name)
        weights.waits_for_moves = False
        weights.advance(WeightsEvent.INSTALL_ORDERED)
        if engine.state is EngineState.READY:
            self._installing[name] = None
        self.moves.close(name)
        return InstallWeights(name, weights.target, self.state.weights.policy.keep_kv)

    def installed(self, event: ev.WeightsInstalled) -> tuple[list[Command], Engine | None]:
        """An engine samples with other weights, or could not load them.

        Returns
        -------
        tuple
            What follows for weights, and the engine if it takes its first step from now on.
        """
        engine = self._under_way(event.engine_id, event.version)
        if engine is None or engine.weights.state is not WeightsState.INSTALLING:
            return self._unordered(event), None
        weights = engine.weights
        self._installing.pop(engine.engine_id, None)
        commands: list[Command] = []
        begins = None
        if event.cause:
            weights.advance(WeightsEvent.INSTALL_FAILED)
            commands += self._back_off(engine, event.cause)
        else:
            weights.advance(WeightsEvent.INSTALLED)
            weights.installed, weights.target, weights.cause = event.version, None, ""
            self.state.take_version(event.version)
            begins = self._begins(engine)
        commands += [*self.moves.open(engine.engine_id), *self._fetch(engine), *self.install_next()]
        return commands, begins

    def _begins(self, engine: Engine) -> Engine | None:
        """The engine, if it takes its first step now: with the newest weights of the lineage that it could get."""
        known = self.state.weights
        foreign = known.published is None or known.published.lineage != engine.version.lineage
        if engine.state is not EngineState.LOADING or (foreign and known.is_behind(engine.version)):
            return None
        engine.advance(EngineEvent.LOADED)
        return engine

    def _unordered(self, event: ev.WeightsInstalled) -> list[Command]:
        """An engine answers an order that nobody here gave: of a controller before this one, at most once."""
        engine = self.state.engines.get(event.engine_id)
        if engine is not None and engine.state is not EngineState.LOST and not event.cause:
            weights = engine.weights
            later = event.version.lineage == weights.installed.lineage or not weights.installed.lineage
            if later and event.version.is_newer_than(weights.installed):
                weights.installed = event.version
        return self.state.count_stale()

    # -- engines that leave ------------------------------------------------------------------------

    def leaves(self, engine: Engine) -> list[Command]:
        """An engine drains or is lost: another one may install in its place."""
        self._forget(engine.engine_id)
        commands = self._stop_waiting_for_moves(engine)
        if engine.state is EngineState.LOST:
            self._installing.pop(engine.engine_id, None)
            commands += self.moves.open(engine.engine_id)
        return [*commands, *self.install_next()]

    def _stop_waiting_for_moves(self, engine: Engine) -> list[Command]:
        if not engine.weights.waits_for_moves:
            return []
        engine.weights.waits_for_moves = False
        return self.moves.open(engine.engine_id)
