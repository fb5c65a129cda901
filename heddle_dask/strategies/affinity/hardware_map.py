"""Affinity by a map from task domains to classes of hardware (RollArt, OSDI'26, section 3.3).

What an affinity says is checked against the engines and tasks of a run before it starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import StepRequest, joined_domain
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


def keys_of(domain: str) -> Iterator[str]:
    """All keys that cover a domain, from the narrowest to the widest.

    A domain is the name of an environment, with a tier and a split behind colons, and a kind of task behind a slash.
    ``math:hard:train/chain`` is covered by ``math:hard:train/chain``, ``math:hard/chain``, ``math/chain``,
    ``math:hard:train``, ``math:hard`` and ``math``.
    """
    whole, slash, kind = domain.partition("/")
    names = list(_shorter(whole, ":"))
    for part in (*_shorter(kind, "/"), "") if slash else ("",):
        yield from (joined_domain(name, part) for name in names)


def _shorter(text: str, mark: str) -> Iterator[str]:
    while text:
        yield text
        text = text.rpartition(mark)[0]


def narrowest_key(domain: str, keys: Collection[str]) -> str | None:
    """The narrowest of these keys that covers a domain (`keys_of`); None: there is none."""
    return next((key for key in keys_of(domain) if key in keys), None)


@dataclass(slots=True)
class HardwareMap:
    """Each domain's class; another class only while all engines of that one are full (`room.preferred`).

    Parameters
    ----------
    classes
        Class of hardware by domain, or by a wider key (`keys_of`): ``math`` covers ``math:hard/chain``. ``default`` is
        for all others, which may go anywhere without it.

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
            key = narrowest_key(domain, self.classes)
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


def check_classes(strategies: StrategySet, hardware: Collection[str]) -> None:
    """Refuse an affinity that names a class which none of the run's engines has.

    Raises
    ------
    BadInput
    """
    affinity = strategies.affinity
    if isinstance(affinity, HardwareMap):
        _check_classes(affinity.classes.values(), hardware)
    elif isinstance(affinity, NamesClasses):
        _check_classes(affinity.named_classes(), hardware)


def check_domains(strategies: StrategySet, domains: Collection[str], *, all_known: bool = True) -> None:
    """Refuse a map with a key that covers no task.

    Parameters
    ----------
    domains
        Those of the tasks, and the names of all environments.
    all_known
        False: more tasks will come, whose kinds may be any; their environments are known.

    Raises
    ------
    BadInput
        With the names that there are.
    """
    affinity = strategies.affinity
    if not isinstance(affinity, HardwareMap):
        return
    covering = {DEFAULT, *(key for domain in domains for key in keys_of(domain))}
    for key in affinity.classes:
        if key in covering or (not all_known and key.partition("/")[0] in covering):
            continue
        raise BadInput(
            f"affinity names '{key}', of which there is no task; the names are {', '.join(sorted(domains))}, with or "
            f"without what follows ':' and '/'"
        )


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
