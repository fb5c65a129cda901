"""What an affinity says, checked against the engines and tasks of a run before it starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from heddle_dask.core.errors import BadInput
from heddle_dask.core.view import StrategySet
from heddle_dask.strategies.affinity.hardware_map import DEFAULT, HardwareMap


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
                    f"affinity names domain '{key}', of which there is no task; domains: "
                    f"{', '.join(sorted(domains))}"
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
