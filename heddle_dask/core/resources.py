"""Amounts of resources: what hosts have, what actions demand, and what they are granted.

A resource is named by a text. CPUs, GPUs and memory belong to hosts; an API quota (`api_resource`) belongs to the
cluster. Amounts are whole numbers: CPUs, GPUs, bytes, concurrent calls.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from heddle_dask.core.errors import BadInput, check_count, check_seconds, is_finite

CPUS = "cpus"
GPUS = "gpus"
MEMORY = "memory_bytes"
MODELS_PER_GPU = "models_per_gpu"
"""Copies of model services that fit into the memory of one GPU of the host at the same time, each with the memory that
it needs to serve; 1 where a host does not say. A property of the host: nothing takes of it."""
COPY_BYTES = "model_copy_bytes"
"""Bytes of host memory for copies of model services; no limit where a host does not say. A property of the host."""
_API_PREFIX = "api:"
IDLE_NICE = 20
"""In place of a nice value: the class of processes that run when no others want to (``SCHED_IDLE`` of sched(7))."""


def cpu_weight(nice: int) -> float:
    """The weight of a process among those of its core: Linux gives a level 1.25 times that of the next (sched(7))."""
    return 3.0 if nice >= IDLE_NICE else 1024.0 / 1.25**nice


def api_resource(name: str) -> str:
    """The resource of the API of this name: calls that are made at the same time."""
    return _API_PREFIX + name


def api_of(resource: str) -> str | None:
    """The name of the API of this resource; None for a resource of hosts."""
    return resource.removeprefix(_API_PREFIX) if resource.startswith(_API_PREFIX) else None


METERS = {"tokens": 1, "cost": 1_000_000}
"""What an API also counts, in whole steps for each unit: its account is a resource of its own beside that of calls."""


def meter_of(api: str, unit: str) -> str:
    """The name of the account of this unit of an API."""
    return f"{api}#{unit}"


def unit_of(name: str) -> str:
    """The unit of an account: ``"calls"`` of an API, or one of `METERS`."""
    return name.rpartition("#")[2] if "#" in name else "calls"


def steps_of(unit: str, amount: float) -> int:
    """An amount in the whole steps of an account, rounded up."""
    return math.ceil(amount * METERS.get(unit, 1) - 1e-6)


def use_text(name: str, amount: int) -> str:
    """An amount of an account for people: ``4 calls of api search``, ``cost 0.25 of api judge``."""
    api, unit = name.partition("#")[0], unit_of(name)
    given = f"cost {amount / METERS[unit]:g}" if unit == "cost" else f"{amount} {unit}"
    return f"{given} of api {api}"


def amount_text(resource: str, amount: int) -> str:
    """An amount for people: ``4 CPUs``, ``2.0 GiB of memory``."""
    if resource == MEMORY:
        return f"{amount / 2**30:.1f} GiB of memory"
    return f"{amount} {'CPUs' if resource == CPUS else 'GPUs' if resource == GPUS else resource}"


@dataclass(frozen=True, slots=True)
class Resources:
    """Amounts by resource; a resource that is not listed has the amount 0.

    Attributes
    ----------
    amounts
        Pairs of resource and amount, sorted by resource, without zeros.
    """

    amounts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, amounts: Mapping[str, int] | None = None, **more: int) -> Resources:
        """Resources from a mapping and from keywords: ``Resources.of(cpus=4, memory_bytes=2**30)``."""
        listed = {**(amounts or {}), **more}
        return cls(tuple(sorted((name, amount) for name, amount in listed.items() if amount)))

    def __getitem__(self, resource: str) -> int:
        for name, amount in self.amounts:
            if name == resource:
                return amount
        return 0

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.amounts)


@dataclass(frozen=True, slots=True)
class Amounts:
    """The amounts of one resource with which an action can run.

    Attributes
    ----------
    least, most
        The smallest and the largest amount.
    only
        The possible amounts in ascending order; empty: every whole number from `least` to `most`.
    """

    least: int
    most: int
    only: tuple[int, ...] = ()

    @property
    def elastic(self) -> bool:
        """Whether there is more than one possible amount."""
        return self.most > self.least

    def __contains__(self, amount: int) -> bool:
        return amount in self.only if self.only else self.least <= amount <= self.most

    def nearest(self, wanted: int) -> int:
        """The largest possible amount of at most `wanted`; the least one where there is none."""
        if self.only:
            return max((amount for amount in self.only if amount <= wanted), default=self.least)
        return max(self.least, min(self.most, wanted))

    def up_to(self, limit: int) -> tuple[int, ...]:
        """The possible amounts of at most `limit`, in ascending order."""
        if self.only:
            return tuple(amount for amount in self.only if amount <= limit)
        return tuple(range(self.least, min(self.most, limit) + 1))


NOTHING = Amounts(0, 0)


@dataclass(frozen=True, slots=True)
class ResourceDemand:
    """What an action needs of each resource (ARL-Tangram, section 4.1: its cost vector).

    Attributes
    ----------
    names, amounts
        The resources in alphabetical order, without those of which it needs nothing, and the possible amounts of each.
        At most one is elastic.
    """

    names: tuple[str, ...] = ()
    amounts: tuple[Amounts, ...] = ()

    @classmethod
    def of(cls, amounts: Mapping[str, Amounts | int] | None = None, **more: Amounts | int) -> ResourceDemand:
        """A demand from a mapping and from keywords: ``ResourceDemand.of(cpus=Amounts(1, 8), memory_bytes=2**30)``."""
        listed = {
            name: Amounts(given, given) if isinstance(given, int) else given
            for name, given in {**(amounts or {}), **more}.items()
        }
        names = tuple(sorted(name for name, given in listed.items() if given.most))
        return cls(names, tuple(listed[name] for name in names))

    def __getitem__(self, resource: str) -> Amounts:
        return self.amounts[self.names.index(resource)] if resource in self.names else NOTHING

    def __iter__(self) -> Iterator[tuple[str, Amounts]]:
        return zip(self.names, self.amounts, strict=True)

    @property
    def elastic(self) -> str | None:
        """The resource with more than one possible amount (the paper's key resource); None without one."""
        return next((name for name, amounts in self if amounts.elastic), None)

    @property
    def least(self) -> Resources:
        return _least(self)

    def with_units(self, units: int) -> Resources:
        """The smallest amounts, with `units` of the elastic resource."""
        amounts = {name: each.least for name, each in self}
        if self.elastic is not None:
            amounts[self.elastic] = units
        return Resources.of(amounts)

    def allows(self, granted: Resources) -> bool:
        """Whether the action can run with exactly these resources."""
        names = {*self.names, *(name for name, _ in granted)}
        return all(granted[name] in self[name] for name in names)


@functools.lru_cache(maxsize=1024)
def _least(demand: ResourceDemand) -> Resources:
    """Asked several times for each action; there are few demands."""
    return Resources.of({name: amounts.least for name, amounts in demand})


ONE_CPU = ResourceDemand.of({CPUS: 1})


# What a run declares about shared resources that are no workers: quotas of APIs, and model services.


_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

CPU_POOL = "cpu"
"""The pool of tool workers that name no other."""
GPU_POOL = "gpu"
"""The pool of workers that host model services."""


def checked_pool(name: str) -> str:
    """The name of a pool of tool workers, as given."""
    if not _POOL_NAME.fullmatch(name) or name in (CPU_POOL, GPU_POOL):
        raise BadInput(
            f"pool {name!r}: use a name of at most 64 letters, digits, '-', '_' or '.', "
            f"and not {CPU_POOL} or {GPU_POOL}"
        )
    return name


QuotaUnit = Literal["calls", "tokens", "cost"]


@dataclass(frozen=True, slots=True)
class QuotaWindow:
    """A sliding window: in any period of `seconds` seconds at most `most` calls begin, or tokens or cost are used.

    Attributes
    ----------
    unit
        Of `most`. Tokens and cost are those that a call declares (``Needs(tokens=…, cost=…)``), and once it has ended,
        those that it has used (`report_use`).
    """

    most: float
    seconds: float
    unit: QuotaUnit = "calls"


@dataclass(frozen=True, slots=True)
class ApiQuota:
    """The quota of one API: every repetition of a call counts as a call.

    Attributes
    ----------
    name
        As in ``Needs(api={name: 1})``.
    concurrency
        Most calls at the same time; 0: no limit.
    windows
        Limits per period, all of which hold at once.
    begins_within_s
        A call reaches the API within this many seconds after its action was started. None: at any time before its
        action ends, so that the call counts in every window until `seconds` after that end. A small number wins
        throughput where windows are short against the calls.
    backoff_s, max_backoff_s
        Seconds before the first repetition of a call, doubled for each further one, and their upper limit; jitter takes
        up to half of them off.
    failures_to_open, open_s
        Calls that fail one after the other until the circuit breaker opens, and seconds until it lets one call through.
    """

    name: str
    concurrency: int = 0
    windows: tuple[QuotaWindow, ...] = ()
    begins_within_s: float | None = None
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    failures_to_open: int = 5
    open_s: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise BadInput(f"quota: the name of the API is {self.name!r}: use a text")
        at = f"quota of {self.name}:"
        check_count(f"{at} concurrency", self.concurrency, least=0)
        check_count(f"{at} failures_to_open", self.failures_to_open)
        if isinstance(self.windows, str) or not isinstance(self.windows, Sequence):
            raise BadInput(f"{at} windows is {self.windows!r}: use a list of QuotaWindow(most, seconds)")
        object.__setattr__(self, "windows", tuple(self.windows))
        for window in self.windows:
            if not isinstance(window, QuotaWindow):
                raise BadInput(f"{at} windows has {window!r}: use QuotaWindow(most, seconds)")
            if window.unit not in get_args(QuotaUnit):
                raise BadInput(f"{at} unit of a window is {window.unit!r}: use {', '.join(get_args(QuotaUnit))}")
            if window.unit != "cost":
                check_count(f"{at} {window.unit} of a window", window.most)
            elif not (is_finite(window.most) and window.most >= 1e-6):
                raise BadInput(f"{at} cost of a window is {window.most!r}: use a number from 0.000001 on")
            check_seconds(f"{at} seconds of a window", window.seconds)
        for name in ("backoff_s", "max_backoff_s", "open_s"):
            check_seconds(f"{at} {name}", getattr(self, name))
        within = self.begins_within_s
        if within is not None and not (is_finite(within) and within >= 0):
            raise BadInput(f"{at} begins_within_s is {within!r}: use seconds from 0 on, or None")

    @property
    def most_at_once(self) -> int | None:
        """Most calls that can be under way at the same time; None: no limit."""
        limits = [int(window.most) for window in self.windows]
        return min([*limits, self.concurrency] if self.concurrency else limits, default=None)

    def accounts(self) -> Iterator[ApiQuota]:
        """The quota of its calls, and one of each meter, in whole steps: what is counted, each by itself."""
        yield replace(self, windows=tuple(each for each in self.windows if each.unit == "calls"))
        for unit, steps in METERS.items():
            windows = (QuotaWindow(int(each.most * steps), each.seconds) for each in self.windows if each.unit == unit)
            yield ApiQuota(meter_of(self.name, unit), 0, tuple(windows), self.begins_within_s)


@dataclass(frozen=True, slots=True)
class PoolMaximum:
    """The largest worker that this pool may ever have, where it is known before one has joined.

    An action that needs more is refused at its request. An action that needs no more waits for such a worker.
    """

    pool: str
    resources: Resources


@dataclass(frozen=True, slots=True)
class ModelService:
    """A model that serves requests on GPUs: a reward model, a judge, a teacher.

    Attributes
    ----------
    name
        As in ``Needs(service=name)``.
    gpus
        Numbers of GPUs on which it can be resident, in ascending order.
    load_s
        Seconds to restore it from host memory at each size, if known; empty: learned.
    host_bytes
        Bytes of its copy in host memory (one copy for each size); 0: not counted.
    batch
        Requests that one resident copy serves at the same time.
    cold_load_s
        Seconds to load it from its files at each size, if known; empty: learned.
    """

    name: str
    gpus: tuple[int, ...] = (1,)
    pool: str = "gpu"
    load_s: tuple[float, ...] = ()
    host_bytes: int = 0
    batch: int = 1
    cold_load_s: tuple[float, ...] = ()
