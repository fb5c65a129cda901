"""What a program says about the resources of a call: checked once, and turned into a demand."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.core.errors import BadInput, is_encodable, is_finite
from heddle_dask.core.nouns import DurationProfile
from heddle_dask.core.resources import (
    CPU_POOL,
    CPUS,
    GPU_POOL,
    GPUS,
    MEMORY,
    Amounts,
    ResourceDemand,
    api_resource,
    meter_of,
    steps_of,
)

Given = int | tuple[int, int] | Set[int]
"""A fixed amount, the smallest and the largest of a range, or a set of amounts."""

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("kMGT", 1)}}
_UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources of one call of a tool or a reward.

    Attributes
    ----------
    cpus, gpus
        A fixed number, ``(least, most)``, or a set such as ``{1, 2, 4}`` [default: 1 CPU, no GPU; no CPU either for a
        call that needs GPUs, an API or a service].
    memory
        Bytes, or a text such as ``"2 GiB"`` [default: 0, which reserves none].
    api
        Concurrent calls by API, ``{"search": 1}``; the API's quota is declared with the run [default: none].
    tokens, cost
        What the call is expected to use at most of its API, which is one, where a window of the quota counts that
        [default: 0]. Another amount counts once it is known (`report_use`).
    pool
        Kind of worker that may run it [default: ``"gpu"`` with GPUs or a service, otherwise ``"cpu"``].
    service
        Model service that it calls, as declared with the run [default: none].
    profile
        How long it runs with how many units of the elastic resource; None: learned from the calls of its label.

    At most one of them may be elastic (a range or a set).

    Raises
    ------
    BadInput
        Negative amounts, an empty range, two elastic resources, or an impossible profile.
    """

    cpus: Given | None = None
    gpus: Given = 0
    memory: int | str | tuple[int, int] = 0
    api: Mapping[str, Given] = field(default_factory=dict)
    pool: str = ""
    service: str = ""
    profile: DurationProfile | None = None
    tokens: int = 0
    cost: float = 0.0

    def __post_init__(self) -> None:
        self.demand()
        if self.profile is not None:
            check_profile(self.profile)
        for name, text in (("pool", self.pool), ("service", self.service)):
            if not isinstance(text, str) or not is_encodable(text):
                raise BadInput(f"needs: {name} is {text!r}: use a text")

    def demand(self) -> ResourceDemand:
        """The amounts by resource."""
        if not isinstance(self.api, Mapping) or not all(isinstance(name, str) and name for name in self.api):
            raise BadInput(f"needs: api is {self.api!r}: use a mapping such as {{'search': 1}}")
        remote = bool(self.api) or bool(self.service) or self.gpus != 0
        cpus = (0 if remote else 1) if self.cpus is None else self.cpus
        memory = _bytes(self.memory) if isinstance(self.memory, str) else self.memory
        listed = {CPUS: amounts_of("cpus", cpus), GPUS: amounts_of("gpus", self.gpus)}
        listed[MEMORY] = amounts_of("memory", memory)
        for name, calls in self.api.items():
            if "#" in name:
                raise BadInput(f"needs: api {name!r}: a name has no '#'")
            listed[api_resource(name)] = amounts_of(f"api {name}", calls)
        listed.update(self._metered())
        elastic = [name for name, amounts in listed.items() if amounts.elastic]
        if len(elastic) > 1:
            raise BadInput(f"needs: {' and '.join(elastic)} are elastic; at most one resource may be")
        return ResourceDemand.of(listed)

    def _metered(self) -> dict[str, Amounts]:
        used = {"tokens": self.tokens, "cost": self.cost}
        for unit, amount in used.items():
            if not (is_finite(amount) and 0 <= amount < 2**40):
                raise BadInput(f"needs: {unit} is {amount!r}: use a number from 0 to 2**40")
        if any(used.values()) and len(self.api) != 1:
            raise BadInput("needs: tokens and cost are those of one API: name it, api={'judge': 1}")
        steps = {(api, unit): steps_of(unit, amount) for unit, amount in used.items() for api in self.api}
        return {api_resource(meter_of(*each)): Amounts(amount, amount) for each, amount in steps.items()}

    @property
    def of_pool(self) -> str:
        """The pool, by default according to what is needed."""
        return self.pool or (GPU_POOL if self.service or self.gpus != 0 else CPU_POOL)


def check_profile(profile: object) -> None:
    if not isinstance(profile, DurationProfile):
        raise BadInput(f"needs: profile is {profile!r}: use DurationProfile(one_unit_s, serial_share)")
    one_s, serial = profile.one_unit_s, profile.serial_share
    if not (is_finite(one_s) and one_s > 0 and is_finite(serial) and 0 <= serial <= 1):
        raise BadInput(f"needs: profile is {profile!r}: use seconds above 0 and a share from 0 to 1")


def amounts_of(name: str, given: Any) -> Amounts:
    """What a program gave for one resource.

    Raises
    ------
    BadInput
        No whole number, range or set of whole numbers from 0 to 2**63 - 1: larger ones do not fit into a message.
    """
    wanted = f"needs: {name} is {given!r}: use a number, (least, most) or a set of numbers, from 0 to 2**63 - 1"
    if isinstance(given, Set):
        if not given or not all(_is_amount(each) for each in given):
            raise BadInput(wanted)
        only = tuple(sorted(given))
        return Amounts(only[0], only[-1], only if len(only) > 1 else ())
    least, most = given if isinstance(given, tuple | list) and len(given) == 2 else (given, given)
    if not (_is_amount(least) and _is_amount(most) and least <= most):
        raise BadInput(wanted)
    return Amounts(least, most)


def _is_amount(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    amount = float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else math.inf
    if amount >= 2**63:
        raise BadInput(f"needs: memory is '{text}': use bytes or a text such as '2 GiB' or '512 MiB'")
    return int(amount)
