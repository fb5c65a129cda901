"""Which worker hosts an engine of which degree: degrees laid onto the GPUs that the workers of a node share.

A worker hosts one engine at most. The GPUs of a node belong to all its workers: an engine of degree 2 takes two of
them, and one worker then hosts none. Pure: what runs comes in, what is to run goes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.errors import BadInput
from heddle_dask.strategies.tp_degrees.degrees import Budget


@dataclass(frozen=True, slots=True)
class EngineWorker:
    """A worker that may host an engine.

    Attributes
    ----------
    units
        GPUs that it brings, where it does not name them.
    gpus
        The GPUs that it sees, by name. Workers of one node may see the same ones.
    """

    name: str
    node: str
    units: int = 1
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine to be: the worker that hosts it, its degree, and as many GPUs of the node."""

    worker: str
    degree: int
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One node: its workers, its GPUs, and for each GPU the worker that brought it first."""

    name: str
    workers: tuple[str, ...]
    gpus: tuple[str, ...]
    brought_by: tuple[str, ...]


def nodes_of(workers: Iterable[EngineWorker]) -> list[Node]:
    """The nodes of these workers; nodes and workers by name, numbers in their order.

    GPUs that no worker of a node names are called "0", "1", … in the order of its workers.

    Raises
    ------
    BadInput
        Some workers of a node name GPUs and others do not.
    """
    by_node: dict[str, list[EngineWorker]] = {}
    for worker in sorted(workers, key=lambda w: (len(w.node), w.node, len(w.name), w.name)):
        by_node.setdefault(worker.node, []).append(worker)
    return [_node(name, members) for name, members in by_node.items()]


def _node(name: str, workers: Sequence[EngineWorker]) -> Node:
    named = [worker for worker in workers if worker.gpus]
    if named and len(named) < len(workers):
        blind = next(worker.name for worker in workers if not worker.gpus)
        raise BadInput(
            f"worker {blind} on node {name} does not say which GPUs it sees, worker {named[0].name} does: "
            "set CUDA_VISIBLE_DEVICES for all workers of a node, or for none"
        )
    brought: dict[str, str] = {}
    for worker in workers:
        gpus = worker.gpus or tuple(str(len(brought) + i) for i in range(worker.units))
        for gpu in gpus:
            brought.setdefault(gpu, worker.name)
    return Node(name, tuple(worker.name for worker in workers), tuple(brought), tuple(brought.values()))


def budget_of(nodes: Sequence[Node], degrees: Iterable[int]) -> Budget:
    """The GPUs of these nodes as the search wants them: degrees of which no node can hold more than it has workers.

    Raises
    ------
    BadInput
        More than one node is smaller than the others, or no degree is left.
    """
    sizes = sorted((len(node.gpus) for node in nodes), reverse=True)
    if not sizes:
        raise BadInput("no worker can host an engine: start workers with --resources ENGINE=1")
    if len(set(sizes[:-1])) > 1:
        raise BadInput(
            f"nodes of {', '.join(map(str, sizes))} GPUs: a search needs nodes of one size, and at most one "
            "smaller; give the degrees themselves"
        )
    asked = sorted(set(degrees))
    usable = tuple(d for d in asked if all(len(node.gpus) // d <= len(node.workers) for node in nodes))
    if not usable:
        raise BadInput(
            f"no degree of {', '.join(map(str, asked)) or 'none'} leaves every engine a worker of its own: "
            "start a worker for each GPU"
        )
    return Budget(sum(sizes), sizes[0], usable)


def seat_engines(nodes: Sequence[Node], degrees: Sequence[int], now: Iterable[Seat] = ()) -> list[Seat]:
    """Seats for engines of these degrees; those of `now` that can stay are the same as before.

    The largest first, each on the node where an engine of its degree runs already, else where it displaces the
    fewest. Degrees that divide one another find room whenever there is any.

    Raises
    ------
    BadInput
        They do not fit.
    """
    running = list(now)
    desks = [_Desk(node, _still_there(node, running)) for node in nodes]
    ordered = sorted(degrees, reverse=True)
    for at, degree in enumerate(ordered):
        roomy = [desk for desk in desks if desk.has_room(degree)]
        if not roomy:
            raise _does_not_fit(nodes, ordered, degree)
        later = set(ordered[at + 1 :])
        _least_harmed(roomy, degree, later).planned.append(degree)
    return [seat for desk in desks for seat in desk.seats()]


def _least_harmed(desks: Sequence[_Desk], degree: int, later: set[int]) -> _Desk:
    return min(desks, key=lambda desk: desk.harm(degree, later))


def _still_there(node: Node, now: Sequence[Seat]) -> list[Seat]:
    gpus = set(node.gpus)
    return [seat for seat in now if seat.worker in node.workers and gpus.issuperset(seat.gpus)]


def _does_not_fit(nodes: Sequence[Node], degrees: Sequence[int], degree: int) -> BadInput:
    have = ", ".join(f"{len(node.gpus)} GPUs and {len(node.workers)} workers" for node in nodes) or "nothing"
    asked = ",".join(map(str, degrees))
    return BadInput(
        f"degrees {asked} need {sum(degrees)} GPUs and {len(degrees)} workers, and no node has room left for an "
        f"engine of degree {degree}: the nodes have {have}"
    )


@dataclass(slots=True)
class _Desk:
    """One node while engines are given out."""

    node: Node
    now: list[Seat]
    planned: list[int] = field(default_factory=list)

    def has_room(self, degree: int) -> bool:
        return sum(self.planned) + degree <= len(self.node.gpus) and len(self.planned) < len(
            self.node.workers
        )

    def harm(self, degree: int, later: set[int]) -> tuple[bool, int]:
        """Whether the engine is a new one here, and how many GPUs it takes from engines that may yet stay."""
        stays = self.planned.count(degree) < self._running(degree)
        held = sum(seat.degree for seat in self.now if seat.degree in later and seat.degree != degree)
        over = sum(self.planned) + degree + held - len(self.node.gpus)
        return not stays, max(0, over)

    def _running(self, degree: int) -> int:
        return sum(seat.degree == degree for seat in self.now)

    def seats(self) -> list[Seat]:
        kept = self._kept()
        taken = {gpu for seat in kept for gpu in seat.gpus}
        hosts = {seat.worker for seat in kept}
        free = [gpu for gpu in self.node.gpus if gpu not in taken]
        idle = [worker for worker in self.node.workers if worker not in hosts]
        owner = dict(zip(self.node.gpus, self.node.brought_by, strict=True))
        new: list[Seat] = []
        for degree in self._missing(kept):
            gpus, free = tuple(free[:degree]), free[degree:]
            worker = owner[gpus[0]] if owner[gpus[0]] in idle else idle[0]
            idle.remove(worker)
            new.append(Seat(worker, degree, gpus))
        return [*kept, *new]

    def _kept(self) -> list[Seat]:
        """Of too many engines of a degree the last ones stay: what is freed lies together, from the first GPU on."""
        place = {gpu: at for at, gpu in enumerate(self.node.gpus)}
        kept: list[Seat] = []
        for degree in dict.fromkeys(self.planned):
            mine = sorted((s for s in self.now if s.degree == degree), key=lambda s: place[s.gpus[0]])
            count = min(self.planned.count(degree), len(mine))
            kept += mine[len(mine) - count :]
        return kept

    def _missing(self, kept: Sequence[Seat]) -> list[int]:
        """Degrees that still need a seat, from the largest; those of `kept` have one."""
        have = [seat.degree for seat in kept]
        missing = []
        for degree in sorted(self.planned, reverse=True):
            if degree in have:
                have.remove(degree)
            else:
                missing.append(degree)
        return missing
