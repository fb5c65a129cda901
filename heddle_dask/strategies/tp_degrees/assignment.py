"""Assignment of engines of given TP degrees to workers and to the GPUs of their node.

A worker hosts at most one engine. The workers of a node share its GPUs: an engine of TP degree 2 takes two of them,
and one worker then hosts none. Pure: a function of the present assignments and the wanted degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import NodeGpus
from heddle_dask.strategies.tp_degrees.degrees import AvailableGpus


@dataclass(frozen=True, slots=True)
class EngineWorker:
    """A worker that may host an engine.

    Attributes
    ----------
    units
        Number of its GPUs, if it does not name them.
    gpus
        Names of its visible GPUs. Workers of one node may have the same ones.
    """

    name: str
    node: str
    units: int = 1
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineAssignment:
    """An engine to deploy: its worker, its TP degree, and as many GPUs of the node."""

    worker: str
    tp_degree: int
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One node: its workers, its GPUs, and for each GPU the first worker that has it."""

    name: str
    workers: tuple[str, ...]
    gpus: tuple[str, ...]
    brought_by: tuple[str, ...]

    @property
    def capacity(self) -> NodeGpus:
        return NodeGpus(len(self.gpus), len(self.workers))


def nodes_of(
    workers: Iterable[EngineWorker], reserved: Callable[[str], Collection[str]] = lambda node: ()
) -> list[Node]:
    """The nodes of these workers; nodes and workers sorted by name, with numbers in numerical order.

    GPUs that no worker of a node names are called "0", "1", … in the order of its workers.

    Parameters
    ----------
    reserved
        GPUs of a node that are not for engines: no node has them, and numbers go on behind them.

    Raises
    ------
    BadInput
        Some workers of a node name GPUs and others do not.
    """
    by_node: dict[str, list[EngineWorker]] = {}
    for worker in sorted(workers, key=lambda w: (len(w.node), w.node, len(w.name), w.name)):
        by_node.setdefault(worker.node, []).append(worker)
    return [_node(name, members, reserved(name)) for name, members in by_node.items()]


def _node(name: str, workers: Sequence[EngineWorker], reserved: Collection[str]) -> Node:
    named = [worker for worker in workers if worker.gpus]
    if named and len(named) < len(workers):
        blind = next(worker.name for worker in workers if not worker.gpus)
        raise BadInput(
            f"worker {blind} on node {name} does not say which GPUs it sees, worker {named[0].name} does: "
            "set CUDA_VISIBLE_DEVICES for all workers of a node, or for none"
        )
    brought: dict[str, str] = {}
    numbers = (number for number in map(str, count()) if number not in reserved)
    for worker in workers:
        for gpu in worker.gpus or islice(numbers, worker.units):
            if gpu not in reserved:
                brought.setdefault(gpu, worker.name)
    return Node(name, tuple(worker.name for worker in workers), tuple(brought), tuple(brought.values()))


def budget_of(nodes: Sequence[NodeGpus], degrees: Iterable[int]) -> AvailableGpus:
    """The GPUs of these nodes for the search, with the TP degrees for which every engine has its own worker.

    Raises
    ------
    BadInput
        More than one node is smaller than the others, or no degree is left.
    """
    sizes = sorted((node.gpus for node in nodes), reverse=True)
    if not sizes:
        raise BadInput("no worker can host an engine: start workers with --resources ENGINE=1")
    if len(set(sizes[:-1])) > 1:
        raise BadInput(
            f"nodes of {', '.join(map(str, sizes))} GPUs: a search needs nodes of one size, and at most one "
            "smaller; give the TP degrees themselves"
        )
    asked = sorted(set(degrees))
    usable = tuple(d for d in asked if all(node.gpus // d <= node.workers for node in nodes))
    if not usable:
        raise BadInput(
            f"no TP degree of {', '.join(map(str, asked)) or 'none'} leaves every engine a worker of its own: "
            "start a worker for each GPU"
        )
    return AvailableGpus(sum(sizes), sizes[0], usable)


def assign_engines(
    nodes: Sequence[Node], tp_degrees: Sequence[int], now: Iterable[EngineAssignment] = ()
) -> list[EngineAssignment]:
    """Assign an engine of each TP degree to a worker; assignments of `now` that can stay are kept.

    The largest first, each on the node where an engine of its TP degree already runs, else where it displaces the
    fewest. With degrees that divide one another this finds an assignment if there is any.

    Raises
    ------
    BadInput
        The engines do not fit.
    """
    running = list(now)
    filling = [_FillingNode(node, _still_there(node, running)) for node in nodes]
    ordered = sorted(tp_degrees, reverse=True)
    for at, degree in enumerate(ordered):
        roomy = [node for node in filling if node.has_room(degree)]
        if not roomy:
            raise _does_not_fit(nodes, ordered, degree)
        later = set(ordered[at + 1 :])
        _least_harmed(roomy, degree, later).planned.append(degree)
    return [assignment for node in filling for assignment in node.assignments()]


def _least_harmed(nodes: Sequence[_FillingNode], degree: int, later: set[int]) -> _FillingNode:
    return min(nodes, key=lambda node: node.harm(degree, later))


def _still_there(node: Node, now: Sequence[EngineAssignment]) -> list[EngineAssignment]:
    gpus = set(node.gpus)
    return [one for one in now if one.worker in node.workers and gpus.issuperset(one.gpus)]


def _does_not_fit(nodes: Sequence[Node], degrees: Sequence[int], degree: int) -> BadInput:
    have = ", ".join(f"{len(node.gpus)} GPUs and {len(node.workers)} workers" for node in nodes) or "nothing"
    asked = ",".join(map(str, degrees))
    return BadInput(
        f"TP degrees {asked} need {sum(degrees)} GPUs and {len(degrees)} workers, and no node has room left for an "
        f"engine of TP degree {degree}: the nodes have {have}"
    )


@dataclass(slots=True)
class _FillingNode:
    """One node while engines are assigned to it."""

    node: Node
    now: list[EngineAssignment]
    planned: list[int] = field(default_factory=list)

    def has_room(self, degree: int) -> bool:
        return sum(self.planned) + degree <= len(self.node.gpus) and len(self.planned) < len(self.node.workers)

    def harm(self, degree: int, later: set[int]) -> tuple[bool, int]:
        """Whether the engine would be new here, and the number of GPUs it takes from engines that may still be kept."""
        stays = self.planned.count(degree) < self._running(degree)
        held = sum(one.tp_degree for one in self.now if one.tp_degree in later and one.tp_degree != degree)
        over = sum(self.planned) + degree + held - len(self.node.gpus)
        return not stays, max(0, over)

    def _running(self, degree: int) -> int:
        return sum(one.tp_degree == degree for one in self.now)

    def assignments(self) -> list[EngineAssignment]:
        kept = self._kept()
        taken = {gpu for one in kept for gpu in one.gpus}
        hosts = {one.worker for one in kept}
        free = [gpu for gpu in self.node.gpus if gpu not in taken]
        idle = [worker for worker in self.node.workers if worker not in hosts]
        owner = dict(zip(self.node.gpus, self.node.brought_by, strict=True))
        new: list[EngineAssignment] = []
        for degree in self._missing(kept):
            gpus, free = tuple(free[:degree]), free[degree:]
            worker = owner[gpus[0]] if owner[gpus[0]] in idle else idle[0]
            idle.remove(worker)
            new.append(EngineAssignment(worker, degree, gpus))
        return [*kept, *new]

    def _kept(self) -> list[EngineAssignment]:
        """If there are too many engines of a TP degree, the last ones are kept, so that free GPUs are contiguous."""
        place = {gpu: at for at, gpu in enumerate(self.node.gpus)}
        kept: list[EngineAssignment] = []
        for degree in dict.fromkeys(self.planned):
            mine = sorted((one for one in self.now if one.tp_degree == degree), key=lambda one: place[one.gpus[0]])
            count = min(self.planned.count(degree), len(mine))
            kept += mine[len(mine) - count :]
        return kept

    def _missing(self, kept: Sequence[EngineAssignment]) -> list[int]:
        """Degrees that still need a worker, largest first; those of `kept` have one."""
        have = [one.tp_degree for one in kept]
        missing = []
        for degree in sorted(self.planned, reverse=True):
            if degree in have:
                have.remove(degree)
            else:
                missing.append(degree)
        return missing
