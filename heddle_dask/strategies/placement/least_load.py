"""Placement: each step to the least loaded engine, load in tokens, ties at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.nouns import StepRequest

Load = Callable[[Engine], tuple[float, ...]]


def inflight_load(engine: Engine) -> tuple[float, ...]:
    """Context tokens of the steps queued or generating per slot; then how many they are."""
    slots = engine.spec.slots
    return engine.inflight_tokens / slots, len(engine.inflight) / slots


def resident_load(engine: Engine) -> tuple[float, ...]:
    """Context tokens of the trajectories that live there per slot, those in tools included."""
    slots = engine.spec.slots
    return engine.resident_tokens / slots, len(engine.residents) / slots


def pick_least(
    candidates: Sequence[Engine], tokens: Sequence[float], load: Load, rng: random.Random
) -> Engine:
    """The candidate of least load; among equals one at random.

    `tokens` is the first part of the load of each, made by the caller: among a thousand engines a call for each takes
    longer than everything else, and few have the least. A fixed rule for ties sends a burst of first steps to one
    engine: the loads that it compares change only after the choice.
    """
    fewest = min(tokens)
    ties = [engine for engine, own in zip(candidates, tokens, strict=True) if own == fewest]
    if len(ties) > 1:
        loads = [load(engine) for engine in ties]
        least = min(loads)
        ties = [engine for engine, own in zip(ties, loads, strict=True) if own == least]
    return ties[0] if len(ties) == 1 else rng.choice(ties)


@dataclass(slots=True)
class LeastLoad:
    """Per step, the engine with the fewest context tokens in flight per slot (slime's router, which
    counts requests).

    Balances well and forgets the prefix cache: a trajectory's context is prefilled wherever it goes.
    """

    seed: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def choose_engine(
        self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]
    ) -> Engine:
        """The candidate with the least load in flight."""
        tokens = [engine.inflight_tokens / engine.spec.slots for engine in candidates]
        return pick_least(candidates, tokens, inflight_load, self._rng)
