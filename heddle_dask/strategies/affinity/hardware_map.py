"""Affinity by a map from task domains to classes of hardware (RollArt, OSDI'26, section 3.3)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.view import Route
from heddle_dask.strategies.affinity.room import preferred, returns_to

DEFAULT = "default"
"""The key of the map for all other domains."""


def widest_key(domain: str, keys: Collection[str]) -> str | None:
    """The key for a domain: itself or its longest prefix of whole parts; None: there is none.

    ``math/hard`` is covered by ``math/hard``, and else by ``math``.
    """
    while domain:
        if domain in keys:
            return domain
        domain = domain.rpartition("/")[0]
    return None


@dataclass(slots=True)
class HardwareMap:
    """Each domain's class; another class only while all engines of that one are full (`room.preferred`).

    Parameters
    ----------
    classes
        Class of hardware by domain; a domain covers those that begin with it (``math`` covers ``math/hard``).
        ``default`` is for all others, which may go anywhere without it.

    Raises
    ------
    BadInput
        The map is empty, or a class is no text.
    """

    classes: Mapping[str, str]
    _wanted: dict[str, str | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.classes:
            raise BadInput("affinity 'map' names no domain: use affinity=map,math=H20,default=H800")
        for domain, hardware in self.classes.items():
            if not isinstance(hardware, str) or not hardware:
                raise BadInput(f"affinity of {domain!r} is {hardware!r}: use the name of a class of hardware")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """From the options of an override: domains with their classes."""
        return cls({domain: str(hardware) for domain, hardware in options.items()})

    def wanted(self, domain: str) -> str | None:
        """The class of a domain; None: any."""
        if domain not in self._wanted:
            key = widest_key(domain, self.classes)
            self._wanted[domain] = self.classes.get(DEFAULT if key is None else key)
        return self._wanted[domain]

    def route(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Route:
        """Engines of the wanted class, or those of the fallback; on its way back the KV cache comes along."""
        wanted = self.wanted(trajectory.spec.domain)
        if wanted is None:
            return Route(candidates)
        allowed = preferred(wanted, trajectory, step, candidates)
        return Route(allowed, with_kv=returns_to(wanted, trajectory, allowed))

    def may_move(self, trajectory: Trajectory, target: Engine) -> bool:
        """Only to the wanted class."""
        return self.wanted(trajectory.spec.domain) in (None, target.spec.hardware)
