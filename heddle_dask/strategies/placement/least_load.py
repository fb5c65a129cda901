"""Placement of each step on the engine with the least load, in tokens or in steps; ties at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.nouns import StepRequest

Load = Callable[[Engine], tuple[float, ...]]


def inflight_load(engine: Engine) -> tuple[float, ...]:
    """Context tokens of the queued and generating steps per slot; then the number of these steps."""
    slots = engine.spec.slots
    return engine.inflight_tokens / slots, len(engine.inflight) / slots


def inflight_steps(engine: Engine) -> tuple[float, ...]:
    """Number of queued and generating steps."""
    return (len(engine.inflight),)


def resident_load(engine: Engine) -> tuple[float, ...]:
    """Context tokens of the residents per slot, including those in tool calls."""
    slots = engine.spec.slots
    return engine.resident_tokens / slots, len(engine.residents) / slots


def pick_least(candidates: Sequence[Engine], amounts: Sequence[float], load: Load, rng: random.Random) -> Engine:
    """The candidate of least load; ties at random.

    `amounts` are the first parts of the loads, computed by the caller for speed: a function call for each of a thousand
    engines would dominate. A fixed rule for ties would send a burst of first steps to one engine, because loads
    change only after the choice.
    """
    fewest = min(amounts)
    ties = [engine for engine, own in zip(candidates, amounts, strict=True) if own == fewest]
    if len(ties) > 1:
        loads = [load(engine) for engine in ties]
        least = min(loads)
        ties = [engine for engine, own in zip(ties, loads, strict=True) if own == least]
    return ties[0] if len(ties) == 1 else rng.choice(ties)


@dataclass(slots=True)
class LeastLoad:
    """For each step the engine with the least in flight.

    It balances well but ignores the prefix cache: a trajectory's context is prefilled on each engine.

    Parameters
    ----------
    of
        ``"tokens"``: context tokens in flight per slot; ``"steps"``: steps in flight, as slime's router counts.
    """

    seed: int = 0
    of: Literal["tokens", "steps"] = "tokens"
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        if self.of not in ("tokens", "steps"):
            raise ValueError(f"of={self.of}: use tokens or steps")
        self._rng = random.Random(self.seed)

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        if self.of == "steps":
            steps = [len(engine.inflight) for engine in candidates]
            return pick_least(candidates, steps, inflight_steps, self._rng)
        tokens = [engine.inflight_tokens / engine.spec.slots for engine in candidates]
        return pick_least(candidates, tokens, inflight_load, self._rng)
