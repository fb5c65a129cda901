"""Engine costs for the strategies that plan by work."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from heddle_dask.core.entities import Engine
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import ClassCosts, EngineCost, cost_from_mapping, load_profile, profile_names
from heddle_dask.cost.iteration import UNLIMITED_TOKENS

_DEGREES = (1, 2, 4, 8, 16)
# The profile of strategies that are given none: what engines tell of themselves is closer.
_UNCHOSEN = "tiny-cpu"


@runtime_checkable
class UsesCosts(Protocol):
    """A strategy that plans with engine costs."""

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        """Plan with these costs by TP degree."""


@dataclass(slots=True)
class EngineCosts:
    """The cost of each engine by its hardware and TP degree, with the KV capacity that the engine itself reports.

    Parameters
    ----------
    profile
        Shipped profile for TP degrees that are not in `known`. In place of ``"tiny-cpu"``, which strategies have that
        are given none, goes what the engine tells (`EngineDescription.cost`).
    known
        Costs by TP degree from the session: those of its engines, or measured ones; `ClassCosts` where engines have
        several classes of hardware.

    Raises
    ------
    BadInput
        No such profile.
    """

    profile: str
    known: Mapping[int, EngineCost] = field(default_factory=dict)
    _made: dict[tuple[str, int, int, str], EngineCost] = field(init=False, default_factory=dict)
    _pace_s: float | None = field(init=False, default=None)
    _seen: Sequence[Engine] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.profile not in profile_names():
            load_profile(self.profile)  # raises for an unknown name

    @property
    def pace_s(self) -> float:
        """Seconds per token of one trajectory with full KV memory, on engines of the lowest known TP degree."""
        if self._pace_s is None:
            self._pace_s = _pace_s(self._lowest())
        return self._pace_s

    def see(self, engines: Sequence[Engine]) -> bool:
        """Take the pace of the engines that tell their cost, where none was given; True: it is another than before."""
        if engines is self._seen:
            return False
        self._seen = engines
        if self.known or self.profile != _UNCHOSEN:
            return False
        telling = min((e for e in engines if e.spec.cost), key=lambda e: e.spec.tp_degree, default=None)
        before = self.pace_s
        if telling is not None:
            self._pace_s = _pace_s(self.of(telling))
        return self.pace_s != before

    def _lowest(self) -> EngineCost:
        if self.known:
            return self.known[min(self.known)]
        for degree in _DEGREES:
            with contextlib.suppress(BadInput):
                return load_profile(self.profile, degree)
        return load_profile(self.profile)

    def share_beside(self, engine: Engine, pace: float) -> float:
        """Share of a full batch with which an iteration takes `pace` times as long as with a full one; 0 to 1."""
        cost, slots = self.of(engine), engine.spec.slots
        full = cost.iteration_s(slots, max(0, engine.spec.kv_capacity_tokens))
        alone = cost.iteration_s(1, 0)
        return min(1.0, max(0.0, (pace * full - alone) / (full - alone))) if full > alone else 1.0

    def of(self, engine: Engine) -> EngineCost:
        """The cost of this engine.

        Raises
        ------
        BadInput
            The profile's model does not fit on GPUs of that degree.
        """
        key = (engine.spec.hardware, engine.spec.tp_degree, engine.spec.kv_capacity_tokens, engine.spec.cost)
        if key not in self._made:
            hardware, degree, capacity, told = key
            of_class = self.known.of(hardware, degree) if isinstance(self.known, ClassCosts) else None
            cost = of_class or self.known.get(degree) or self._told(told, degree)
            self._made[key] = replace(cost, capacity_tokens=capacity) if capacity > 0 else cost
        return self._made[key]

    def _told(self, told: str, degree: int) -> EngineCost:
        """What the engine tells, unless a profile was given; else the profile."""
        if told and self.profile == _UNCHOSEN:
            return cost_from_mapping(json.loads(told), degree)
        return load_profile(self.profile, degree)


def _pace_s(cost: EngineCost) -> float:
    return cost.iteration_s(1, cost.capacity_tokens if cost.capacity_tokens < UNLIMITED_TOKENS else 0)
