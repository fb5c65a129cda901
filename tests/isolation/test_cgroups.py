"""Control groups: found as the kernel lists them, and where they can be made, enforced by it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle_dask.isolation import process_tree
from heddle_dask.isolation.cgroups import Cgroup, CgroupTree, FoundCgroups, find_cgroups
from heddle_dask.isolation.cores import memory_bytes

MOUNTS_V1 = """
30 20 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro
31 30 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
32 30 0:28 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
MOUNTS_V2 = "31 30 0:27 / {place} rw shared:1 - cgroup2 cgroup2 rw,nsdelegate\n"


def proc(tmp_path: Path, cgroup: str, mounts: str) -> Path:
    (tmp_path / "cgroup").write_text(cgroup)
    (tmp_path / "mountinfo").write_text(mounts.lstrip())
    return tmp_path


def test_groups_of_version_1_are_found_by_controller(tmp_path: Path) -> None:
    own = "3:cpuset:/slurm/job\n4:memory:/docker/x/slurm\n8:pids:/\n0::/\n"
    found = find_cgroups(proc(tmp_path, own, MOUNTS_V1))
    assert found.version == 1
    assert found.folders == {
        "cpuset": Path("/sys/fs/cgroup/cpuset/slurm/job"),
        "memory": Path("/sys/fs/cgroup/memory/slurm"),
    }


def test_the_group_of_version_2_is_found_with_its_controllers(tmp_path: Path) -> None:
    place = tmp_path / "cgroups"
    (place / "user").mkdir(parents=True)
    (place / "user" / "cgroup.controllers").write_text("cpuset memory pids\n")
    found = find_cgroups(proc(tmp_path, "0::/user\n", MOUNTS_V2.format(place=place)))
    assert found == FoundCgroups(2, dict.fromkeys(("cpuset", "memory", "pids"), place / "user"))
    assert find_cgroups(tmp_path / "nothing") == FoundCgroups()
    assert find_cgroups(delegated=str(place / "user")) == found


def test_memory_is_that_of_the_group_where_it_is_less(tmp_path: Path) -> None:
    whole = memory_bytes({})
    assert whole > 0
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, limit in ((inner, "max"), (inner.parent, str(64 << 20))):
        (folder / "memory.max").write_text(limit)
        (folder / "cgroup.procs").write_text("")
    assert memory_bytes({"memory": inner}) == 64 << 20


def test_orders_to_version_2_are_those_of_its_files(tmp_path: Path) -> None:
    for name in ("cpuset.cpus", "memory.max", "memory.swap.max", "memory.oom.group", "pids.max"):
        (tmp_path / name).write_text("")
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (tmp_path / "pids.events").write_text("max 5\n")
    group = Cgroup(2, dict.fromkeys(("cpuset", "memory", "pids"), tmp_path))
    group.set_cores((1, 3))
    group.set_memory(1 << 20)
    group.set_processes(7)
    names = ("cpuset.cpus", "memory.max", "memory.swap.max", "memory.oom.group", "pids.max")
    assert [(tmp_path / name).read_text() for name in names] == ["1,3", "1048576", "0", "1", "7"]
    assert (group.out_of_memory(), group.forks_refused(), group.pids()) == (2, 5, [])
    assert group.join_files == (str(tmp_path / "cgroup.procs"),)


@pytest.fixture
def tree() -> Iterator[CgroupTree]:
    made = CgroupTree.open(find_cgroups(), os.sched_getaffinity(0))
    if made is None:
        pytest.skip("no control group can be made here")
    yield made
    made.close()
    assert not any(folder.exists() for folder in made.folders.values())


def running(group: Cgroup, program: str) -> subprocess.Popen[str]:
    join = f"import sys\nfor path in {group.join_files!r}:\n    open(path, 'w').write('0')\n"
    return subprocess.Popen(
        [sys.executable, "-c", join + program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_of_a_group_run_on_its_cores_alone(tree: CgroupTree) -> None:
    if "cpuset" not in tree.folders:
        pytest.skip("no cpuset can be made here")
    group, core = tree.make(), max(os.sched_getaffinity(0))
    group.set_cores((core,))
    # It cannot get around it, as it could around an affinity.
    program = "import os\nos.sched_setaffinity(0, range(os.cpu_count()))\nprint(os.sched_getaffinity(0))"
    assert running(group, program).communicate()[0].strip() == str({core})
    tree.discard(group)


def test_memory_beyond_the_limit_is_refused_and_counted(tree: CgroupTree) -> None:
    if "memory" not in tree.folders:
        pytest.skip("no memory group can be made here")
    group = tree.make()
    group.set_memory(64 << 20)
    process = running(group, "bytearray(256 << 20)")
    process.communicate()
    assert process.returncode == -9 and group.out_of_memory() > 0
    tree.discard(group)


def test_forks_without_end_are_refused_counted_and_ended(tree: CgroupTree) -> None:
    if "pids" not in tree.folders:
        pytest.skip("no pids group can be made here")
    group = tree.make()
    group.set_processes(20)
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    process = running(group, bomb)
    while not group.forks_refused():
        assert process.poll() is None
    assert 1 < len(group.pids()) <= 20
    assert group.kill() and group.pids() == []
    process.communicate()
    tree.discard(group)


def test_what_a_killed_worker_left_is_removed_by_the_next() -> None:
    program = (
        "import os, time\n"
        "from heddle_dask.isolation.cgroups import CgroupTree, find_cgroups\n"
        "tree = CgroupTree.open(find_cgroups(), os.sched_getaffinity(0))\n"
        "group = None if tree is None else tree.make()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    os.closerange(0, 3); os.setsid(); time.sleep(600)\n"
        "if group is not None:\n    group.add(pid)\n    print(pid, *group.folders.values(), flush=True)\n"
        "os.kill(pid if group is None else os.getpid(), 9)\n"
    )
    left = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    if not left.stdout:
        pytest.skip("no control group can be made here")
    pid, *folders = left.stdout.split()
    assert all(Path(folder).exists() for folder in folders)
    second = CgroupTree.open(find_cgroups(), os.sched_getaffinity(0))
    assert second is not None
    assert not any(Path(folder).exists() for folder in folders)
    assert process_tree.start_of(int(pid)) == 0
    second.close()
