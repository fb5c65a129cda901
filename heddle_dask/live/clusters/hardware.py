"""Classes of the rollout workers of a cluster on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.spec import check_hardware


def hardware_of_workers(hardware: Mapping[str, int] | None, engines: int) -> list[str]:
    """The class of each rollout worker; empty without classes.

    Raises
    ------
    BadInput
        A class is no plain name, or the numbers do not add up to `engines`.
    """
    if hardware is None:
        return [""] * engines
    for name in hardware:
        check_hardware("hardware", name)
    classes = [name for name, count in hardware.items() for _ in range(count)]
    if len(classes) != engines or min(hardware.values(), default=1) < 1:
        told = ",".join(f"{name}={count}" for name, count in hardware.items())
        raise BadInput(f"hardware {told} is not of {engines} engines: give a class to each, or fewer engines")
    return classes
