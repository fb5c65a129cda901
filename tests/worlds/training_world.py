"""A random world in which the model is trained: versions are published and installed, and trajectories grow old."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from worlds.core_builders import Stage, engine_of, trajectory_spec
from worlds.core_world import WEIGHTS, Pick, Program, Step, World, strategies_of

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import FIRST_RUN, PolicyVersion
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.core.run_description import (
    REDUNDANT,
    STALE,
    RetryPolicy,
    RunDescription,
    StalenessBound,
    WeightUpdatePolicy,
)
from heddle_dask.core.transitions import TrajectoryState

TRAINING_MOVES: Final = {
    "optimizer_step": 4.0,
    "resume": 0.3,
    "publish": 5.0,
    "switch": 5.0,
    "fetch_ends": 12.0,
    "install_ends": 12.0,
    "group_ends": 6.0,
    "redundant": 1.0,
}


@dataclass
class TrainingWorld(World):
    """The truth about versions: what every engine has, and which one sampled the first token of each trajectory."""

    bound: StalenessBound = field(default_factory=StalenessBound)
    policy: WeightUpdatePolicy = field(default_factory=WeightUpdatePolicy)
    trained: PolicyVersion = field(default_factory=lambda: PolicyVersion("L1", 0))
    published: PolicyVersion | None = None
    wanted: PolicyVersion | None = None
    has: dict[str, PolicyVersion] = field(default_factory=dict)
    loading: dict[str, None] = field(default_factory=dict)
    fetching: dict[str, PolicyVersion] = field(default_factory=dict)
    fetched: dict[str, PolicyVersion] = field(default_factory=dict)
    installing: dict[str, PolicyVersion] = field(default_factory=dict)
    sampled_by: dict[Any, PolicyVersion] = field(default_factory=dict)  # of steps, their first token
    first: dict[str, PolicyVersion] = field(default_factory=dict)
    kv: dict[str, PolicyVersion] = field(default_factory=dict)
    cancelled: dict[str, str] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)  # members of groups that were not reported since
    earlier: list[PolicyVersion] = field(default_factory=list)  # published before, of the newest lineage
    instead: dict[str, PolicyVersion] = field(default_factory=dict)
    lineages: int = 1

    # -- orders ------------------------------------------------------------------------------------

    def obey(self, command: cmd.Command) -> None:
        match command:
            case cmd.FetchWeights():
                name = command.engine_id
                older = command.version == self.instead.pop(name, None) and name in self.loading
                assert older or command.version == self.published, "only the newest is fetched"
                self.seen["fetches an older one"] += older
                assert name not in self.installing and name not in self.dying
                assert self.fetching.get(name) != command.version, "it does so already"
                assert command.version.is_newer_than(self.has[name])
                self.fetched.pop(name, None)
                self.fetching[name] = command.version
            case cmd.InstallWeights():
                self._install(command)
            case cmd.CancelTrajectory():
                name = command.trajectory_id
                assert name not in self.cancelled, "it was told before"
                assert command.cause in (STALE, REDUNDANT)
                assert command.cause == REDUNDANT or self.bound.mode == "cancel"
                self.cancelled[name] = command.cause
                self.seen[f"cancelled: {command.cause}"] += 1
            case cmd.AdmitTrajectory():
                assert command.trajectory_id not in self.cancelled
                super().obey(command)
            case _:
                super().obey(command)

    def _install(self, command: cmd.InstallWeights) -> None:
        name, version = command.engine_id, command.version
        assert self.fetched.pop(name) == version and name not in self.fetching
        assert version.is_newer_than(self.has[name]), "versions never decrease"
        assert self.wanted is not None
        assert name in self.loading or not self.wanted.is_newer_than(version)
        assert name not in self.draining
        assert command.keep_kv == self.policy.keep_kv
        busy = {e for m in self.moves.values() for e in (m.source_engine_id, m.target_engine_id)}
        assert name not in busy, "a cache is on its way there"
        serving = [other for other in self.installing if other in self.ready]
        assert self.policy.order == "all-at-once" or name in self.loading or not serving
        self.seen["two install"] += bool(serving)
        self.seen["installs before its first step"] += name in self.loading
        self.installing[name] = version

    def _start_step(self, command: cmd.StartStep) -> None:
        super()._start_step(command)
        name = command.step_id.trajectory_id
        assert name not in self.cancelled, "it goes on"
        if not self.stage.trajectory(name).has_begun:
            assert self.is_valid(self.has[command.engine_id]), "it would begin too old"

    def _move_context(self, command: cmd.MoveContext) -> None:
        super()._move_context(command)
        ends = (command.source_engine_id, command.target_engine_id)
        assert not set(ends) & set(self.installing), "its weights are changing"
        if command.kind == "transfer" and not self.policy.keep_kv:
            assert self.has[ends[0]] == self.has[ends[1]] == self.kv[command.trajectory_id]
            self.seen["transfer under one version"] += 1

    def is_valid(self, version: PolicyVersion) -> bool:
        """Whether what began under this version may be in the next batch."""
        if version.lineage not in ("", self.trained.lineage):
            return False
        return self.bound.is_valid(self.trained.number, version.number)

    # -- what must hold ----------------------------------------------------------------------------

    def may_wait(self, name: str) -> bool:
        step = self.programs[name].step
        needs = 0 if step is None else step.request.context_tokens
        able = [e for e in self.ready if needs < self.engines[e].max_context_tokens]
        fresh = any(self.is_valid(self.has[engine_id]) for engine_id in able)
        record = self.stage.trajectory(name)
        begun = record.has_begun
        # An engine with newer weights leaves to those that install them now what they will take.
        soon = any(e in self.installing or e in self.fetched for e in able if not self.is_valid(self.has[e]))
        young = begun or (fresh and not soon and self.bound.mode == "cancel")
        return bool(record.cancelled) or not young or super().may_wait(name)

    def check(self) -> None:
        super().check()
        state = self.stage.state
        for engine_id, version in self.has.items():
            assert state.engines[engine_id].version == version
        run = state.runs[FIRST_RUN]
        assert run.ledger is not None
        most = (self.bound.alpha + run.ledger.steps + 1) * self.bound.batch_trajectories
        assert run.ledger.credits + run.ledger.running + run.ledger.accepted == most
        dormant = (TrajectoryState.SUBMITTED, TrajectoryState.ENDED)
        alive = [t for t in state.trajectories.values() if t.parent is None and t.state not in dormant]
        assert run.ledger.running >= len(alive)
        for name, first in self.first.items():
            if self.bound.mode == "cancel" and name in self.programs and "#" not in name:
                lost = not self.stage.trajectory(name).has_begun  # its engine died with its first step
                assert lost or name in self.cancelled or self.is_valid(first), f"{name} goes on"
        for record in state.trajectories.values():
            assert bool(record.cancelled) == (record.trajectory_id in self.cancelled) or record.parent

    # -- moves -------------------------------------------------------------------------------------

    def tell(self, kind: type, *fields: Any) -> None:
        if kind is ev.StepFinished and len(fields) == 5:
            step_id, engine_id, new_tokens = fields[:3]
            here = self.stage.state.engines[engine_id].version  # of a lost engine: what it had
            version = self.sampled_by.get((step_id, engine_id), here)
            fields = (*fields, version.number)
            name = step_id.trajectory_id
            self.kv[name] = here
            if name in self.programs:
                record = self.stage.trajectory(name)
                if not record.generated_tokens and record.parent is None:
                    self.first.pop(name, None)  # nothing was sampled yet: an attempt that was cancelled does not count
                if new_tokens:
                    self.first.setdefault(name, version)
        if kind is ev.MoveEnded and fields[2] and fields[3] == "recompute" and fields[1] in self.ready:
            self.kv[fields[0]] = self.has[fields[1]]
        super().tell(kind, *fields)

    def possible(self, move: str) -> list[Any]:
        living = [e for e in self.engines if e not in self.dying]
        match move:
            case "optimizer_step":
                return [True]
            case "resume":
                return [True] if self.published is not None else []
            case "publish":
                return [True] if self.published != self.trained else []
            case "switch":
                return [True] if self.published is not None and self.published != self.wanted else []
            case "fetch_ends":
                return [(e, ok) for e in self.fetching if e in living for ok in (True, True, False)]
            case "install_ends":
                return [(e, ok) for e in self.installing if e in living for ok in (True, False)]
            case "group_ends":
                return [(g, share) for g in self.ended for share in (0.0, 1.0, 1.0)]
            case "redundant":
                return [n for n in self.programs if n not in self.cancelled and "#" not in n]
            case "drain_engine":
                return [*self.ready, *self.loading]
            case _:
                return super().possible(move)

    def _do_optimizer_step(self, _: bool) -> None:
        self.trained = replace(self.trained, number=self.trained.number + 1)
        self.stale.append((ev.OptimizerStepEnded, FIRST_RUN, self.trained))
        self.tell(ev.OptimizerStepEnded, FIRST_RUN, self.trained)

    def _do_resume(self, _: bool) -> None:
        """The trainer has come back with an older checkpoint: another lineage."""
        self.lineages += 1
        self.trained = PolicyVersion(f"L{self.lineages}", max(0, self.trained.number - self.pick((0, 1, 2))))
        self.tell(ev.OptimizerStepEnded, FIRST_RUN, self.trained)

    def _do_publish(self, _: bool) -> None:
        before = self.published
        if before is not None:
            kept = [v for v in self.earlier if v in self.has.values()]
            self.earlier = [*kept, before] if before.lineage == self.trained.lineage else []
        self.published = self.trained
        foreign = self.wanted is not None and self.wanted.lineage != self.trained.lineage
        if foreign or self.policy.install == "when-fetched":
            self.wanted = self.trained
        if before is not None:
            self.stale.append((ev.WeightsPublished, before, "file:///old"))
            self.seen["superseded"] += bool(self.fetching or self.fetched)
        self.tell(ev.WeightsPublished, self.trained, "file:///new")

    def _do_switch(self, _: bool) -> None:
        assert self.published is not None
        self.wanted = self.published
        self.stale.append((ev.SwitchRequested, self.wanted))
        self.tell(ev.SwitchRequested, self.wanted)

    def _do_fetch_ends(self, ending: tuple[str, bool]) -> None:
        name, ok = ending
        version = self.fetching.pop(name)
        if ok and name not in self.draining:
            self.fetched[name] = version
        self.seen["fetch failed"] += not ok
        if not ok and name in self.loading:
            has = self.has[name]
            left = [v for v in self.earlier if version.is_newer_than(v) and v.is_newer_than(has)]
            if left:
                self.instead[name] = left[-1]
            else:
                self._begins(name)
        self.stale.append((ev.WeightsFetched, name, PolicyVersion("L0", 9)))
        self.tell(ev.WeightsFetched, name, version, "" if ok else "no route")

    def _do_install_ends(self, ending: tuple[str, bool]) -> None:
        name, ok = ending
        version = self.installing.pop(name)
        if ok:
            self.has[name] = version
            self._begins(name)
        self.seen["install failed"] += not ok
        self.tell(ev.WeightsInstalled, name, version, 0.05, "" if ok else "out of memory")
        if not ok:
            self._do_engine_dies(name)

    def _begins(self, name: str) -> None:
        """An engine takes its first step with the newest weights of the lineage that it could get."""
        assert self.published is not None
        if name in self.loading and self.has[name].lineage == self.published.lineage:
            del self.loading[name]
            if name not in self.draining:
                self.ready[name] = None
                self.seen["begins behind"] += self.published.is_newer_than(self.has[name])

    def _do_group_ends(self, ending: tuple[str, float]) -> None:
        group, share = ending
        self.tell(ev.GroupEnded, FIRST_RUN, group, round(share * self.ended.pop(group)))

    def _do_redundant(self, name: str) -> None:
        self.tell(ev.TrajectoryRedundant, name)
        self.stale.append((ev.TrajectoryRedundant, name))

    def _do_join_engine(self, size: int) -> None:
        known = self.published or PolicyVersion()
        older = replace(known, number=max(0, known.number - 1))
        version = self.pick((PolicyVersion(), known, older))
        made = engine_of(self.fresh("E"), self.pick((1, 2, 4)), size, self.kv_tokens, True)
        made = replace(made, policy_version=version.number, lineage=version.lineage)
        self.has[made.engine_id] = version
        self._joins(made)

    def _joins(self, made: EngineDescription) -> None:
        name = made.engine_id
        self.engines[name] = made
        behind = self.wanted is not None and self.wanted.is_newer_than(self.has[name])
        (self.loading if behind else self.ready)[name] = None
        self.tell(ev.EngineJoined, made)

    def _engine_gone_for_moves(self, engine_id: str) -> None:
        super()._engine_gone_for_moves(engine_id)
        for known in (self.loading, self.fetching, self.fetched, self.installing, self.has):
            if engine_id in known:
                del known[engine_id]  # type: ignore[attr-defined]

    def _do_drain_engine(self, engine_id: str) -> None:
        self.loading.pop(engine_id, None)
        self.fetched.pop(engine_id, None)
        super()._do_drain_engine(engine_id)

    def _do_submit(self, prompt_tokens: int) -> None:
        group = self.fresh("g")
        for number in range(self.pick((1, 2))):
            name = f"{group}/{number}"
            self.programs[name] = Program()
            self.group_of[name] = group
            self.tell(ev.TrajectorySubmitted, trajectory_spec(name, prompt_tokens, group))

    def _do_fork(self, parent: str) -> None:
        record = self.stage.trajectory(parent)
        super()._do_fork(parent)
        name = list(self.programs)[-1]
        if record.first_version is not None and parent in self.first:
            self.first[name] = self.first[parent]
        if parent in self.cancelled:
            self.cancelled[name] = self.cancelled[parent]

    def _do_start(self, step: Step) -> None:
        assert step.engine_id is not None
        name = step.request.step_id.trajectory_id
        version = self.stage.state.engines[step.engine_id].version
        self.sampled_by[step.identity] = version
        if not self.stage.trajectory(name).generated_tokens and self.stage.trajectory(name).parent is None:
            self.first[name] = version
        self.first.setdefault(name, version)
        super()._do_start(step)

    def _do_end(self, name: str) -> None:
        group = self.group_of.get(name)
        if group is not None and self.programs[name].admitted:
            self.ended[group] = self.ended.get(group, 0) + (name not in self.cancelled)
        super()._do_end(name)

    # -- the end -----------------------------------------------------------------------------------

    def drain(self) -> None:
        self._catch_up()
        super().drain()

    def _catch_up(self) -> None:
        """The trainer, the store and the engines come to rest at the newest version."""
        for move in ("publish", "switch"):
            if self.possible(move):
                self.do(move, True)
        self._end_moves()
        while endings := [(m, s) for m in ("fetch_ends", "install_ends") for s in self.possible(m) if s[1]]:
            self.do(*endings[0])
            self._end_moves()

    def _advance_all(self) -> None:
        self._catch_up()
        for name in [n for n in self.programs if self.stage.trajectory(n).cancelled]:
            self._do_end(name)
        for group in list(self.ended):
            self._do_group_ends((group, 0.0))
        if self.programs and not any(p.admitted for p in self.programs.values()):
            self._do_optimizer_step(True)
            self._catch_up()
        if self.programs:
            super()._advance_all()


def new_training_world(
    preset: str, pick: Pick[Any], *, seed: int, bound: StalenessBound, policy: WeightUpdatePolicy
) -> TrainingWorld:
    """An empty world with one run that is trained on."""
    retries = RetryPolicy(2)
    stage = Stage(strategies=strategies_of(preset, seed=seed, overrides=()), retries=retries)
    world = TrainingWorld(stage, retries, pick, kv_tokens=(0, 600, 20_000)[seed % 3], bound=bound, policy=policy)
    world.tell(ev.RunStarted, RunDescription(retries=retries, staleness=bound, weights=policy))
    world.tell(ev.OptimizerStepEnded, FIRST_RUN, world.trained)
    return world


def play_training(
    preset: str,
    *,
    seed: int,
    moves: int,
    bound: StalenessBound,
    policy: WeightUpdatePolicy,
    draws: Sequence[str] = (),
) -> TrainingWorld:
    """A world of that many random moves."""
    rng = random.Random(seed)
    world = new_training_world(preset, rng.choice, seed=seed, bound=bound, policy=policy)
    calm = {"lose_engine": 0.4, "drain_engine": 0.4, "engine_dies": 0.4} if seed % 2 else {}
    weights = {**WEIGHTS, **calm, **TRAINING_MOVES}
    for move in draws or rng.choices(list(weights), list(weights.values()), k=moves):
        if subjects := world.possible(move):
            world.do(move, rng.choice(subjects))
    world.drain()
    return world
