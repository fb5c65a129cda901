"""Amounts of resources: what hosts have, what actions demand, and what they are granted.

A resource is named by a text. CPUs, GPUs and memory belong to hosts; an API quota (`api_resource`) belongs to the
cluster. Amounts are whole numbers: CPUs, GPUs, bytes, concurrent calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

CPUS = "cpus"
GPUS = "gpus"
MEMORY = "memory_bytes"
MODELS_PER_GPU = "models_per_gpu"
"""Copies of model services that fit into the memory of one GPU of the host at the same time, each with the memory that
it needs to serve; 1 where a host does not say. A property of the host: nothing takes of it."""
COPY_BYTES = "model_copy_bytes"
"""Bytes of host memory for copies of model services; no limit where a host does not say. A property of the host."""
_API_PREFIX = "api:"


def api_resource(name: str) -> str:
    """The resource of the API of this name: calls that are made at the same time."""
    return _API_PREFIX + name


def api_of(resource: str) -> str | None:
    """The name of the API of this resource; None for a resource of hosts."""
    return resource.removeprefix(_API_PREFIX) if resource.startswith(_API_PREFIX) else None


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
        """The smallest amount of each resource."""
        return Resources.of({name: amounts.least for name, amounts in self})

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


ONE_CPU = ResourceDemand.of({CPUS: 1})
