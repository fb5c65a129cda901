"""Affinity by a map from task domains to classes of hardware (RollArt, OSDI'26, section 3.3).

What an affinity says is checked against the engines and tasks of a run before it starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.view import Route, StrategySet


def has_room(engine: Engine, trajectory: Trajectory, step: StepRequest) -> bool:
    """Whether a slot is free there, and the context fits into the KV memory beside those of the residents.

    An engine that does not report its memory has only its slots as a limit.
    """
    if len(engine.inflight) >= engine.spec.slots:
        return False
    capacity = engine.spec.kv_capacity_tokens
    if capacity <= 0 or trajectory.home == engine.engine_id:
        return True
    return engine.resident_tokens + step.context_tokens <= capacity


def of_class(engines: Sequence[Engine], hardware: str) -> list[Engine]:
    """Those of one class, in their order."""
    return [engine for engine in engines if engine.spec.hardware == hardware]


def preferred(wanted: str, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Sequence[Engine]:
    """The engines of the wanted class; another class only while all of that one are full.

    This is the fallback of RollArt (OSDI'26, sections 3.1 and 3.3). A trajectory that is at home in the wanted class
    stays there. One that had to go elsewhere returns as soon as there is room.

    Returns
    -------
    Sequence[Engine]
        Engines of the wanted class with room; all of that class if the trajectory is at home there, or if no engine at
        all has room; else engines of other classes with room. All candidates if none is of the wanted class.
    """
    own = of_class(candidates, wanted)
    if not own:
        return candidates
    if trajectory.home is not None and any(engine.engine_id == trajectory.home for engine in own):
        return own
    roomy = [engine for engine in own if has_room(engine, trajectory, step)]
    if roomy:
        return roomy
    others = [e for e in candidates if e.spec.hardware != wanted and has_room(e, trajectory, step)]
    return others or own


def returns_to(wanted: str, trajectory: Trajectory, allowed: Sequence[Engine]) -> bool:
    """Whether a step goes to the wanted class from another one: its KV cache then comes along."""
    if trajectory.home is None or not allowed or allowed[0].spec.hardware != wanted:
        return False
    return all(engine.engine_id != trajectory.home for engine in allowed)


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


@runtime_checkable
class NamesClasses(Protocol):
    """An affinity whose options name classes of hardware."""

    def named_classes(self) -> Collection[str]:
        """The classes that must exist."""


def check_affinity(strategies: StrategySet, hardware: Collection[str], domains: Collection[str]) -> None:
    """Refuse classes that no engine has, and keys that cover no task.

    Parameters
    ----------
    hardware
        Classes of the engines that the run will have.
    domains
        Domains of its tasks; empty: not known yet, and not checked.

    Raises
    ------
    BadInput
    """
    affinity = strategies.affinity
    if isinstance(affinity, HardwareMap):
        _check_classes(affinity.classes.values(), hardware)
        for key in affinity.classes:
            if domains and key != DEFAULT and not any(_covers(key, domain) for domain in domains):
                raise BadInput(
                    f"affinity names domain '{key}', of which there is no task; domains: {', '.join(sorted(domains))}"
                )
    elif isinstance(affinity, NamesClasses):
        _check_classes(affinity.named_classes(), hardware)


def _covers(key: str, domain: str) -> bool:
    return domain == key or domain.startswith(f"{key}/")


def _check_classes(named: Collection[str], hardware: Collection[str]) -> None:
    known = sorted(name for name in set(hardware) if name)
    for name in named:
        if name not in known:
            there = ", ".join(known) or "none is declared (--hardware H800=2,H20=3)"
            raise BadInput(f"affinity names hardware '{name}', which no engine has; classes: {there}")


def affinity_override(table: Mapping[str, Any] | str) -> str:
    """The override for ``affinity = {math = "H20", default = "H800"}`` or ``affinity = "priced"`` of a TOML file.

    Raises
    ------
    BadInput
        It is neither a text nor a table of texts.
    """
    if isinstance(table, str):
        return f"affinity={table}"
    if not isinstance(table, Mapping) or not all(isinstance(v, str) for v in table.values()):
        raise BadInput(f'affinity is {table!r}: use a table such as {{math = "H20", default = "H800"}}')
    return ",".join(["affinity=map", *(f"{domain}={hardware}" for domain, hardware in table.items())])
