"""Which core each action has: a pure allocator over the cores of one worker.

A core serves one action at a time, and the cores of an action are on as few NUMA nodes as possible (ARL-Tangram,
section 5.2: the manager picks the exact core set).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class CoreAllocator:
    """The free cores of one worker, by NUMA node.

    Parameters
    ----------
    nodes
        The NUMA node of each core.
    """

    def __init__(self, nodes: Mapping[int, int]) -> None:
        self._node_of = dict(nodes)
        self._free: dict[int, set[int]] = {node: set() for node in sorted(set(nodes.values()))}
        for core, node in nodes.items():
            self._free[node].add(core)

    @property
    def free(self) -> int:
        """Number of cores that no action has."""
        return sum(map(len, self._free.values()))

    def take(self, count: int) -> tuple[int, ...]:
        """Cores for one action, in ascending order.

        From one node if one has enough: the one with the fewest free cores, so that larger rooms stay whole. Otherwise
        from the nodes with most, which is the smallest number of nodes; the last of them is again the tightest.

        Raises
        ------
        ValueError
            Fewer are free: the controller's accounts and those of the worker differ.
        """
        if not 0 <= count <= self.free:
            raise ValueError(f"{count} cores are asked for, {self.free} are free")
        taken: list[int] = []
        while len(taken) < count:
            left = count - len(taken)
            enough = [(len(cores), node) for node, cores in self._free.items() if len(cores) >= left]
            if enough:
                _, node = min(enough)
            else:
                node = max(self._free, key=lambda each: (len(self._free[each]), -each))
            chosen = sorted(self._free[node])[:left]
            self._free[node].difference_update(chosen)
            taken += chosen
        return tuple(sorted(taken))

    def give_back(self, cores: Collection[int]) -> None:
        """The inverse of `take`.

        Raises
        ------
        ValueError
            One of them is free or unknown: it would serve two actions.
        """
        for core in cores:
            node = self._node_of.get(core)
            if node is None or core in self._free[node]:
                raise ValueError(f"core {core} is given back, but no action has it")
            self._free[node].add(core)
