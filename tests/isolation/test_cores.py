"""The allocator of cores: no core serves two actions, and an action's cores are on as few NUMA nodes as possible."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.isolation.cores import CoreAllocator, numa_nodes, parsed_list

MACHINES = st.dictionaries(st.integers(0, 11), st.integers(0, 2), min_size=1, max_size=9)


def fewest_nodes(free: dict[int, int], count: int) -> int:
    """By trying all sets of nodes."""
    nodes = sorted(set(free.values()))
    for size in range(1, len(nodes) + 1):
        for chosen in combinations(nodes, size):
            if sum(node in chosen for node in free.values()) >= count:
                return size
    return 0


@given(nodes=MACHINES, history=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_random_histories_leave_the_accounts_balanced(nodes: dict[int, int], history: list[tuple[bool, int]]) -> None:
    allocator, held = CoreAllocator(nodes), list[tuple[int, ...]]()
    for takes, number in history:
        busy = {core for cores in held for core in cores}
        free = {core: node for core, node in nodes.items() if core not in busy}
        if takes and number > len(free):
            with pytest.raises(ValueError, match="are free"):
                allocator.take(number)
        elif takes:
            cores = allocator.take(number)
            assert len(cores) == number and set(cores) <= free.keys()
            if number:
                assert len({nodes[core] for core in cores}) == fewest_nodes(free, number)
            held.append(cores)
        elif held:
            allocator.give_back(held.pop(number % len(held)))
        assert allocator.free == len(nodes) - sum(map(len, held))
    for cores in held:
        allocator.give_back(cores)
    assert allocator.take(len(nodes)) == tuple(sorted(nodes))


def test_a_small_action_leaves_the_larger_room_whole() -> None:
    allocator = CoreAllocator({0: 0, 1: 0, 2: 0, 3: 1, 4: 1})
    assert allocator.take(1) == (3,)
    assert allocator.take(3) == (0, 1, 2)


def test_a_core_is_given_back_once() -> None:
    allocator = CoreAllocator({0: 0})
    with pytest.raises(ValueError, match="core 0 is given back"):
        allocator.give_back((0,))
    with pytest.raises(ValueError, match="core 5"):
        allocator.give_back((5,))


def test_nodes_are_read_as_the_kernel_lists_them(tmp_path: Path) -> None:
    assert parsed_list("0-2,8\n") == [0, 1, 2, 8] and parsed_list("\n") == []
    for node, cores in (("node0", "0-1"), ("node1", "2,3")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores)
    (tmp_path / "possible").write_text("0-1")
    assert numa_nodes(tmp_path) == {0: 0, 1: 0, 2: 1, 3: 1}
