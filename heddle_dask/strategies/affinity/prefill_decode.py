"""Prefill and decode on different engines (RollArt, OSDI'26, section 4.9; there the split is chosen by hand).

A prompt that is new to the decode engines goes to a prefill engine first, which computes it and one token. Then its KV
cache is transferred to a decode engine, where the step goes on. A prefill engine keeps the prefix of a trajectory as
long as it has room, so the next long observation costs it only what is new.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.engine_list import engine_among
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.events import StepFinished
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.migrations import can_transfer
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.view import Route
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts


@dataclass(slots=True)
class _Places:
    """Where a trajectory was: its prefill engine with the tokens that it left there, and its decode engine."""

    prefill: EngineId | None = None
    prefilled_tokens: int = 0
    decode: EngineId | None = None


@dataclass(slots=True)
class PrefillDecode:
    """Prompts on engines of one class, generation on those of another; engines of other classes do both.

    Parameters
    ----------
    prefill, decode
        Classes of hardware (`EngineDescription.hardware`).
    least_tokens
        Prompts with fewer tokens that are new to the decode engine are computed there.
    priced
        True: a prompt goes to a prefill engine only if that is expected to be faster, with the load of both engines and
        the transfer. False: every prompt of at least `least_tokens`.
    setup_s, token_s
        Seconds of a transfer: each, and for each token that the target lacks.
    disturbance
        Share of a prompt's seconds on a decode engine that each sequence which decodes there is taken to lose.
    profile
        Cost profile of engines of unknown cost.

    Raises
    ------
    BadInput
        Prefill and decode are the same class, a number is negative, or the profile is unknown.
    """

    prefill: str
    decode: str
    least_tokens: int = 256
    priced: bool = True
    setup_s: float = 0.1
    token_s: float = 5e-6
    disturbance: float = 1.0
    profile: str = "tiny-cpu"
    _costs: EngineCosts = field(init=False)
    _places: dict[TrajectoryId, _Places] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.prefill, self.decode = str(self.prefill), str(self.decode)
        if self.prefill == self.decode:
            raise BadInput(f"prefill and decode are both {self.prefill}: use two classes of hardware")
        if min(self.least_tokens, self.setup_s, self.token_s, self.disturbance) < 0:
            raise BadInput("use numbers of at least 0 for least_tokens, setup_s, token_s and disturbance")
        self._costs = EngineCosts(self.profile)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        self._costs = EngineCosts(self.profile, known)

    def named_classes(self) -> Collection[str]:
        """Both classes must exist."""
        return (self.prefill, self.decode)

    def may_move(self, trajectory: Trajectory, target: Engine) -> bool:
        """Contexts rest on decode engines, or on those that do both."""
        return target.spec.hardware != self.prefill

    def route(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Route:
        """A prefill engine for a new prompt, a decode engine for what follows; all candidates if a kind is missing."""
        decoding = [engine for engine in candidates if engine.spec.hardware != self.prefill]
        if not decoding or len(decoding) == len(candidates):
            return Route(candidates)
        places = self._places.get(trajectory.trajectory_id, _Places())
        home = engine_among(candidates, trajectory.home)
        if trajectory.open_step_tokens:  # the prompt is computed
            return Route(self._same(places.decode, decoding), with_kv=home is not None)
        if home is not None and home.spec.hardware not in (self.prefill, self.decode):
            return Route([home])
        target = home if home is not None and home.spec.hardware == self.decode else self._least(decoding)
        there = trajectory.kept_tokens if trajectory.kept_on == target.engine_id else 0
        new_tokens = max(0, step.context_tokens - there)
        source = self._prefill_engine(places, target, candidates)
        if source is None or new_tokens < self.least_tokens or step.max_new_tokens < 2:
            return Route(self._same(target.engine_id if home is target else places.decode, decoding))
        if self.priced and self._gain_s(step, new_tokens, places, source, target) <= 0:
            return Route(self._same(target.engine_id if home is target else places.decode, decoding))
        return Route([source], prefill_only=True)

    def _same(self, engine_id: EngineId | None, decoding: Sequence[Engine]) -> Sequence[Engine]:
        """The engine with the trajectory's prefix, if it is there and not full; else all that decode."""
        kept = engine_among(decoding, engine_id)
        return decoding if kept is None or len(kept.inflight) >= kept.spec.slots else [kept]

    def _least(self, engines: Sequence[Engine]) -> Engine:
        return min(engines, key=lambda engine: (len(engine.inflight) / engine.spec.slots, engine.number))

    def _prefill_engine(self, places: _Places, target: Engine, candidates: Sequence[Engine]) -> Engine | None:
        """The one with its prefix, else the one with the fewest waiting prompts, that can transfer to the target."""
        able = [e for e in candidates if e.spec.hardware == self.prefill and can_transfer(e, target)]
        kept = engine_among(able, places.prefill)
        if kept is not None:
            return kept
        return min(able, key=lambda engine: (engine.inflight_tokens, engine.number), default=None)

    def _gain_s(self, step: StepRequest, new_tokens: int, places: _Places, source: Engine, target: Engine) -> float:
        """Seconds that the prefill engine saves: the prompt's own, and those of the sequences that decode beside it."""
        here = self._costs.of(target)
        alone_s = here.prefill_token_s * new_tokens
        stay_s = alone_s * (1.0 + self.disturbance * len(target.running))
        there = self._costs.of(source)
        kept = places.prefilled_tokens if places.prefill == source.engine_id else 0
        lacking = max(0, step.context_tokens - kept)
        # Steps on prefill engines run one after the other; of each, about as much is new as of this one.
        queued = 1 + len(source.inflight)
        go_s = there.fixed_s + there.prefill_token_s * lacking * queued
        return stay_s - go_s - self.setup_s - self.token_s * new_tokens

    def step_answered(self, trajectory: Trajectory, answer: StepFinished) -> None:
        if not answer.new_tokens:
            return
        places = self._places.setdefault(trajectory.trajectory_id, _Places())
        if answer.finish_reason == "abort" and trajectory.open_step_tokens == answer.new_tokens == 1:
            places.prefill, places.prefilled_tokens = answer.engine_id, trajectory.context_tokens
        else:
            places.decode = answer.engine_id

    def forget(self, trajectory: Trajectory) -> None:
        self._places.pop(trajectory.trajectory_id, None)
