"""Actions on cores of their own, with real processes: what goes wrong in one ends it with its cause, and nothing else.

Every test runs with control groups where they can be made, and without them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.core.resources import IDLE_NICE, Resources
from heddle_dask.isolation import process_tree
from heddle_dask.isolation.cgroups import CgroupTree, FoundCgroups, find_cgroups
from heddle_dask.isolation.granted import granted, report_use
from heddle_dask.live.wire.messages import ActionCall, CallPlace
from heddle_dask.live.worker import coroutine_calls
from heddle_dask.live.worker.action_runner import ActionRunner
from heddle_dask.live.worker.cpu_pool import CoreLease, CpuPool
from heddle_dask.live.worker.running_call import LimitExceeded
from heddle_dask.live.worker.tool_processes import ToolProcessEnded, ToolRaised
from heddle_dask.sandbox.python_runner import run_python

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CORES = sorted(os.sched_getaffinity(0))
MIB = 1 << 20


class Actions:
    """Runs actions as a tool worker does."""

    def __init__(self, folder: Path, groups: FoundCgroups, cpus: int) -> None:
        self.pool = CpuPool(cpus, 4 << 30, folder / "scratch", folder, groups)
        self.runner = ActionRunner(self.pool)
        self.printed = ""
        self.used: tuple[int | None, float | None] = (None, None)

    async def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        cpus: int = 1,
        reach_cpus: int = 0,
        nice: int = 0,
        memory_bytes: int = 0,
        timeout_s: float | None = None,
        **limits: int,
    ) -> Any:
        place: CallPlace = "coroutines" if asyncio.iscoroutinefunction(function) else "process"
        payload = cloudpickle.dumps((function, args, {}))
        call = ActionCall("s", "a", payload, None, "key", place, function.__name__, **limits)
        lease = CoreLease(Resources.of(cpus=cpus, memory_bytes=memory_bytes), reach_cpus, nice)

        async def fetch() -> bytes:
            assert call.payload is not None
            return call.payload

        try:
            running = self.runner.run(call, fetch, lease)
            return cloudpickle.loads(await asyncio.wait_for(running, timeout_s))
        finally:
            self.printed = lease.call.printed
            self.used = (lease.used_tokens, lease.used_cost)


@pytest.fixture(params=["cgroups", "without"])
def groups(request: pytest.FixtureRequest) -> FoundCgroups:
    if request.param == "without":
        return FoundCgroups()
    found = find_cgroups()
    made = CgroupTree.open(found, CORES)
    if made is None:
        pytest.skip("no control group can be made here")
    made.close()
    return found


def with_actions(
    folder: Path,
    groups: FoundCgroups,
    body: Callable[[Actions], Coroutine[Any, Any, None]],
    cpus: int = len(CORES),
) -> None:
    """Run `body`; in the end all cores are free, and nothing is left of any action."""

    async def run() -> None:
        # Another test of this process may have started one that stays, such as Python's own tracker of resources.
        before = process_tree.below(os.getpid())
        actions = Actions(folder, groups, cpus)
        try:
            await body(actions)
            assert actions.pool._allocator.free == (cpus if cpus <= len(CORES) else 0)
            assert list(folder.glob("scratch/*/*")) == []
        finally:
            await actions.runner.close()
        assert set(process_tree.below(os.getpid())) <= set(before)

    asyncio.run(asyncio.wait_for(run(), 60))


# -- what actions do -------------------------------------------------------------------------------------


def its_cores() -> tuple[set[int], set[int], str, str]:
    program = "import os; print(*os.sched_getaffinity(0))"
    of_child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = os.environ["HEDDLE_CPUS"], os.environ["OMP_NUM_THREADS"]
    return os.sched_getaffinity(0), set(map(int, of_child.stdout.split())), *names


def meets(own: str, other: str) -> set[int]:
    """Its cores, while another action runs."""
    Path(own).touch()
    while not Path(other).exists():
        time.sleep(0.001)
    return os.sched_getaffinity(0)


def prints_and_sleeps() -> None:
    print("before", flush=True)
    subprocess.run("echo from a program; exec sleep 600", shell=True, check=True)


def allocates(bytes_: int) -> int:
    return len(bytearray(b"x") * bytes_)


def has_program_allocate(bytes_: int) -> int:
    return subprocess.run([sys.executable, "-c", f"x = bytearray(b'x') * {bytes_}"], check=True).returncode


def fills_its_disk(files: int) -> None:
    for number in range(files):
        Path(os.environ["TMPDIR"], str(number)).write_bytes(os.urandom(MIB))
    time.sleep(600)


def leaves_things_of_every_shape() -> str:
    os.chdir(os.environ["TMPDIR"])
    for name in (b"\xff\xfe", b"-rf", b"new\nline"):
        os.mkdir(name)
    socket.socket(socket.AF_UNIX).bind("socket")
    os.symlink("/etc", "link")
    os.mkdir("closed")
    Path("closed", "file").touch()
    os.chmod("closed", 0)
    for _ in range(1100):
        os.mkdir("d")
        os.chdir("d")
    return "left"


def writes_one_file(mib: int) -> None:
    with open(Path(os.environ["TMPDIR"], "one"), "wb") as file:
        for _ in range(mib):
            file.write(bytes(MIB))


def forks_without_end() -> None:
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.001)


def starts_many_processes() -> None:
    for _ in range(60):
        subprocess.Popen(["sleep", "600"])
    time.sleep(600)


def leaves_a_background_process(pids: str) -> int:
    shell = subprocess.Popen(["sh", "-c", f"setsid sleep 600 & echo $! > {pids}; sleep 600"])
    while not Path(pids).exists() or not Path(pids).read_text():
        time.sleep(0.001)
    with open(pids, "a") as file:
        file.write(f"{shell.pid}\n")
    return os.getpid()


def leaves_a_thread() -> int:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return os.getpid()


def waits_for(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.001)
    return "undisturbed"


async def in_a_sandbox() -> tuple[set[int], str]:
    given = granted()
    assert given is not None
    output = await run_python("import os; print(*os.sched_getaffinity(0), os.environ['HEDDLE_CPUS'])")
    *cores, cpus = output.text.split()
    assert set(map(int, cores)) == set(given.cores)
    return set(given.cores), cpus


# -- cores -----------------------------------------------------------------------------------------------


def test_an_action_runs_on_its_cores_alone_with_all_that_it_starts(tmp_path: Path, groups: FoundCgroups) -> None:
    async def body(actions: Actions) -> None:
        for cpus in (1, len(CORES), 1):
            own, of_child, variable, threads = await actions(its_cores, cpus=cpus)
            assert own == of_child and len(own) == cpus  # as the affinity says, also within a cpuset
            assert (variable, threads) == (str(cpus), str(cpus))
        assert (await actions(its_cores, cpus=0))[2:] == ("0", "1")

    with_actions(tmp_path, groups, body)


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_two_actions_have_no_core_in_common(tmp_path: Path, groups: FoundCgroups) -> None:
    async def body(actions: Actions) -> None:
        names = [str(tmp_path / name) for name in "ab"]
        first, second = await asyncio.gather(actions(meets, *names), actions(meets, *reversed(names)))
        assert len(first) == len(second) == 1 and not first & second

    with_actions(tmp_path, groups, body)


def test_a_program_in_a_sandbox_runs_on_the_cores_of_its_action(tmp_path: Path, groups: FoundCgroups) -> None:
    async def body(actions: Actions) -> None:
        cores, cpus = await actions(in_a_sandbox)
        assert len(cores) == 1 and cpus == "1"

    with_actions(tmp_path, groups, body)


def test_more_cpus_than_cores_are_shared_and_said_so(tmp_path: Path) -> None:
    async def body(actions: Actions) -> None:
        assert "64 CPUs are declared" in actions.pool.mechanism.weaker
        own, _, variable, _ = await actions(its_cores, cpus=16)
        assert own == set(CORES) and variable == "16"

    with_actions(tmp_path, FoundCgroups(), body, cpus=64)


def test_cores_of_a_driver_that_has_died_are_waited_for(tmp_path: Path) -> None:
    async def body(actions: Actions) -> None:
        go = tmp_path / "go"
        old = asyncio.ensure_future(actions(waits_for, str(go), cpus=len(CORES)))
        new = asyncio.ensure_future(actions(its_cores))
        while actions.pool._allocator.free:
            await asyncio.sleep(0.001)
        go.touch()
        assert await old == "undisturbed"
        await new

    with_actions(tmp_path, FoundCgroups(), body)


# -- faults ----------------------------------------------------------------------------------------------


async def fails_alone(
    actions: Actions, folder: Path, cause: str, function: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """The action fails for this cause, while another goes on undisturbed."""
    go = folder / "go"
    go.unlink(missing_ok=True)
    other = asyncio.ensure_future(actions(waits_for, str(go)))
    with pytest.raises(LimitExceeded) as failed:
        await actions(function, *args, **options)
    assert failed.value.cause == cause, failed.value
    assert not other.done()
    go.touch()
    assert await other == "undisturbed"


def test_a_timeout_ends_all_processes_and_returns_the_output_so_far(tmp_path: Path, groups: FoundCgroups) -> None:
    async def body(actions: Actions) -> None:
        with pytest.raises(TimeoutError):
            await actions(prints_and_sleeps, timeout_s=1.5)
        assert actions.printed == "before\nfrom a program\n"

    with_actions(tmp_path, groups, body)


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
@pytest.mark.parametrize("function", [allocates, has_program_allocate])
def test_an_action_that_exhausts_its_memory_fails_alone(
    function: Callable[[int], int], tmp_path: Path, groups: FoundCgroups
) -> None:
    async def body(actions: Actions) -> None:
        await fails_alone(actions, tmp_path, "memory", function, 900 * MIB, memory_bytes=200 * MIB)
        assert await actions(allocates, 50 * MIB, memory_bytes=200 * MIB) == 50 * MIB

    if function is has_program_allocate and not groups.version:
        pytest.skip("a program that ends before a look fails by itself")
    with_actions(tmp_path, groups, body)


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_what_an_action_leaves_is_deleted_whatever_its_shape(tmp_path: Path) -> None:
    async def body(actions: Actions) -> None:
        assert await actions(leaves_things_of_every_shape) == "left"
        assert await actions(allocates, 1) == 1

    with_actions(tmp_path, FoundCgroups(), body)


def test_an_action_that_fills_its_disk_fails_alone(tmp_path: Path, groups: FoundCgroups) -> None:
    async def body(actions: Actions) -> None:
        limit = {"max_disk_bytes": 8 * MIB}
        await fails_alone(actions, tmp_path, "disk", fills_its_disk, 12, **limit)
        await fails_alone(actions, tmp_path, "disk", writes_one_file, 12, **limit)
        await actions(writes_one_file, 4, **limit)

    with_actions(tmp_path, groups, body)


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_an_action_that_forks_without_end_fails_alone(tmp_path: Path, groups: FoundCgroups) -> None:
    if not groups.version and os.geteuid() == 0:
        pytest.skip("root has no limit of its processes outside of control groups")

    async def body(actions: Actions) -> None:
        await fails_alone(actions, tmp_path, "processes", forks_without_end, max_processes=30)

    with_actions(tmp_path, groups, body)


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_an_action_with_more_processes_than_allowed_fails_alone(tmp_path: Path, groups: FoundCgroups) -> None:
    async def body(actions: Actions) -> None:
        await fails_alone(actions, tmp_path, "processes", starts_many_processes, max_processes=30)

    with_actions(tmp_path, groups, body)


def test_background_processes_end_with_their_action(tmp_path: Path, groups: FoundCgroups) -> None:
    async def body(actions: Actions) -> None:
        pids = tmp_path / "pids"
        own = await actions(leaves_a_background_process, str(pids))
        left = [int(pid) for pid in pids.read_text().split()]
        assert len(left) == 2 and not any(process_tree.start_of(pid) for pid in left)
        assert await actions(os.getpid) != own, "a process that left something behind is not used again"
        assert await actions(leaves_a_thread) != await actions(os.getpid)

    with_actions(tmp_path, groups, body)


def test_an_action_that_raises_or_dies_gives_its_cores_back(tmp_path: Path, groups: FoundCgroups) -> None:
    async def body(actions: Actions) -> None:
        with pytest.raises(ToolRaised, match="ZeroDivisionError"):
            await actions(divmod, 1, 0, cpus=len(CORES))
        with pytest.raises(ToolProcessEnded, match="SIGKILL"):
            await actions(os.kill, 0, 9, cpus=len(CORES))
        assert len((await actions(its_cores, cpus=len(CORES)))[0]) == len(CORES)

    with_actions(tmp_path, groups, body)


# -- use of an API ----------------------------------------------------------------------------------------


def uses_an_api(fails: bool) -> str:
    report_use(tokens=30, cost=0.25)
    report_use(tokens=12)
    if fails:
        raise ValueError("unreadable")
    return "done"


async def uses_an_api_too(fails: bool) -> str:
    await asyncio.sleep(0)
    return uses_an_api(fails)


def uses_cost_alone() -> None:
    report_use(cost=0.5)


def test_what_a_call_has_used_of_its_api_comes_with_its_end(tmp_path: Path) -> None:
    async def body(actions: Actions) -> None:
        for function in (uses_an_api, uses_an_api_too):
            assert await actions(function, False) == "done" and actions.used == (42, 0.25)
            with pytest.raises(ToolRaised, match="unreadable"):
                await actions(function, True)
            assert actions.used == (42, 0.25)
        await actions(uses_cost_alone)
        assert actions.used == (None, 0.5)
        await actions(its_cores)
        assert actions.used == (None, None)

    with_actions(tmp_path, FoundCgroups(), body)
    report_use(tokens=1)  # outside of an action: nothing counts it
    for wrong in ({"tokens": -1}, {"tokens": 1.5}, {"cost": float("nan")}):
        with pytest.raises(BadInput, match="report_use"):
            report_use(**wrong)  # type: ignore[arg-type]


# -- coroutines ------------------------------------------------------------------------------------------


async def waits_beside(path: str) -> tuple[int, int]:
    """The process that began this call, and the one that ends it."""
    with open(path + "-pids", "a") as file:
        file.write(f"{os.getpid()}\n")
    while not Path(path).exists():
        await asyncio.sleep(0.01)
    return int(Path(path + "-pids").read_text().split()[0]), os.getpid()


async def blocks(seconds: float) -> int:
    async def sleeps() -> None:
        time.sleep(seconds)

    await asyncio.gather(sleeps())
    return os.getpid()


async def ends_its_process() -> None:
    os._exit(7)


async def its_process() -> int:
    return os.getpid()


async def exits(code: int) -> None:
    sys.exit(code)


async def ignores_that_it_is_cancelled() -> None:
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue


def test_coroutines_have_one_process_and_end_by_their_limit(tmp_path: Path, groups: FoundCgroups) -> None:
    async def body(actions: Actions) -> None:
        first, second = await asyncio.gather(actions(its_process), actions(its_process, cpus=0))
        assert first == second != os.getpid()
        with pytest.raises(TimeoutError):
            await actions(waits_beside, str(tmp_path / "never"), timeout_s=0.5)
        with pytest.raises(ToolRaised, match="SystemExit: 3"):
            await actions(exits, 3)
        assert await actions(its_process) == first

    with_actions(tmp_path, groups, body)


def test_a_coroutine_that_blocks_disturbs_no_other(tmp_path: Path) -> None:
    async def body(actions: Actions) -> None:
        go = tmp_path / "go"
        beside = asyncio.ensure_future(actions(waits_beside, str(go)))
        while not Path(f"{go}-pids").exists():
            await asyncio.sleep(0.01)
        blocking = asyncio.ensure_future(actions(blocks, 600))
        while len(Path(f"{go}-pids").read_text().split()) < 2:
            await asyncio.sleep(0.01)
        assert not blocking.done()
        go.touch()
        common, own = await beside
        assert common != own, "it has begun again"
        assert await actions(its_process) != common
        blocking.cancel()  # its limit
        await asyncio.wait({blocking})
        assert blocking.cancelled()
        assert await actions(blocks, 0) != await actions(its_process), "from now on it has a process of its own"

    with_actions(tmp_path, FoundCgroups(), body)


@pytest.mark.parametrize(
    ("culprit", "error"), [(ends_its_process, ToolProcessEnded), (ignores_that_it_is_cancelled, TimeoutError)]
)
def test_a_coroutine_whose_process_must_end_fails_alone(
    tmp_path: Path, culprit: Callable[[], Any], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coroutine_calls, "_CANCELLED_S", 0.5)

    async def body(actions: Actions) -> None:
        go = tmp_path / "go"
        beside = asyncio.ensure_future(actions(waits_beside, str(go)))
        with pytest.raises(error):
            await actions(culprit, timeout_s=0.5 if error is TimeoutError else None)
        go.touch()
        await beside

    with_actions(tmp_path, FoundCgroups(), body)


def test_coroutines_begin_again_when_their_process_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coroutine_calls, "SILENT_S", 2)

    async def body(actions: Actions) -> None:
        go = tmp_path / "go"
        process = await actions(its_process)
        beside = asyncio.ensure_future(actions(waits_beside, str(go)))
        await asyncio.sleep(0)
        os.kill(process, signal.SIGSTOP)
        pids = Path(f"{go}-pids")
        while not pids.exists() or pids.read_text().split()[-1:] in ([], [str(process)]):
            await asyncio.sleep(0.01)
        go.touch()
        assert (await beside)[1] != process
        assert await actions(its_process) != process

    with_actions(tmp_path, FoundCgroups(), body)


# -- the accounts ----------------------------------------------------------------------------------------

ENDS = ("returns", "raises", "dies", "timeout", "memory")


def ends(how: str) -> str:
    if how == "raises":
        raise ValueError(how)
    if how == "dies":
        os._exit(3)
    if how == "timeout":
        time.sleep(600)
    if how == "memory":
        allocates(900 * MIB)
    return how


@settings(max_examples=5, deadline=None)
@given(history=st.lists(st.tuples(st.sampled_from(ENDS), st.integers(0, len(CORES))), max_size=8))
def test_random_histories_leave_the_accounts_balanced(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]]
) -> None:
    async def body(actions: Actions) -> None:
        async def one(how: str, cpus: int) -> None:
            timeout_s = 0.05 if how == "timeout" else None
            memory_bytes = 100 * MIB if how == "memory" else 0
            try:
                assert await actions(ends, how, cpus=cpus, memory_bytes=memory_bytes, timeout_s=timeout_s) == how
            except (ToolRaised, ToolProcessEnded, TimeoutError, LimitExceeded):
                assert how != "returns"

        # More at once than there are cores: those that do not fit wait for cores.
        await asyncio.gather(*(one(how, cpus) for how, cpus in history))

    with_actions(tmp_path_factory.mktemp("history"), find_cgroups(), body)


def scheduling() -> tuple[int, int]:
    return os.nice(0), os.sched_getscheduler(0)


def standing() -> tuple[list[int], str, int, int]:
    """The cores that this process may run on, what it is told of them, and its priority and that of what it starts."""
    below = subprocess.run([sys.executable, "-c", "import os; print(os.nice(0))"], capture_output=True, check=True)
    return sorted(os.sched_getaffinity(0)), os.environ["HEDDLE_CPUS"], os.nice(0), int(below.stdout)


async def standing_of_a_child() -> tuple[list[int], int]:
    own = granted()
    assert own is not None
    with own.starting():
        child = subprocess.Popen(["sleep", "60"])
    own.adopt(child.pid)
    try:
        for _ in range(200):  # the worker is told, and does it
            if os.getpriority(os.PRIO_PROCESS, child.pid) == 19:
                break
            await asyncio.sleep(0.01)
        return sorted(os.sched_getaffinity(child.pid)), os.getpriority(os.PRIO_PROCESS, child.pid)
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_what_may_use_idle_cores_gives_way_to_the_actions_that_have_them(tmp_path: Path, groups: FoundCgroups) -> None:
    async def body(actions: Actions) -> None:
        plain = (await actions(standing))[2]
        told = await asyncio.gather(actions(standing, reach_cpus=2, nice=19), actions(standing))
        assert told[0] == (CORES[:2], "2", 19, 19)
        assert told[1] == ([CORES[1]], "1", plain, plain), "it has its core alone, and goes first"
        assert await actions(standing_of_a_child, reach_cpus=2, nice=19) == (CORES[:2], 19)
        assert await actions(scheduling, reach_cpus=2, nice=max(7, plain)) == (max(7, plain), os.SCHED_OTHER)
        assert await actions(scheduling, reach_cpus=2, nice=IDLE_NICE) == (19, os.SCHED_IDLE)
        for _ in range(3):
            assert (await actions(standing))[2] == plain, "no process of the lowest priority serves it"

    with_actions(tmp_path, groups, body, cpus=2)
