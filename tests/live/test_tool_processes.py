"""Plain tool functions in processes of their own: they can be killed, they may die, and none outlives its worker."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from heddle_dask.live.worker.tool_processes import (
    MAX_PROCESSES,
    ToolProcessEnded,
    ToolProcesses,
    ToolRaised,
    ToolServerEnded,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def spins() -> None:
    while True:
        pass


def its_pid() -> int:
    return os.getpid()


def starts_a_child_and_spins(pids: str) -> None:
    child = subprocess.Popen(["sleep", "3600"])
    Path(pids).write_text(f"{os.getpid()} {child.pid}")
    spins()


def reads_nothing() -> None:
    ctypes.string_at(0)


def raises() -> None:
    raise ValueError("first line\nsecond line")


def raises_at_length(lines: bool) -> None:
    raise ValueError(("x" * 99 + "\n" if lines else "x" * 100) * 500_000)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


def raises_unspeakably() -> None:
    raise Unspeakable


IN_MAIN = """
from concurrent.futures import ProcessPoolExecutor

def burn():
    return 1

def starts_others():
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(burn).result()
"""


async def a_coroutine(value: int) -> int:
    return value + 1


def takes_what_is_offered(given: int, cpus: int, idempotency_key: str = "none") -> tuple[int, int, str]:
    return given, cpus, idempotency_key


class Caller:
    def __init__(self, processes: ToolProcesses) -> None:
        self.processes = processes

    async def __call__(self, function: Callable[..., Any], *args: Any, **offered: Any) -> Any:
        return cloudpickle.loads(await self.processes.run(cloudpickle.dumps((function, args, {})), offered))


def with_processes(body: Callable[[Caller], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        processes = ToolProcesses()
        try:
            await body(Caller(processes))
        finally:
            await processes.close()

    asyncio.run(asyncio.wait_for(run(), 100))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != "zombie"
    except psutil.NoSuchProcess:
        return False


async def gone(*pids: int) -> None:
    while any(is_alive(pid) for pid in pids):
        await asyncio.sleep(0.01)


def test_calls_return_what_they_return_and_raise_what_they_raise() -> None:
    async def body(call: Caller) -> None:
        assert await call(max, 3, 9) == 9
        assert await call(lambda: a_coroutine(4)) == 5
        assert await call(takes_what_is_offered, 1, cpus=4, idempotency_key="k") == (1, 4, "k")
        assert await call(takes_what_is_offered, 1, cpus=4) == (1, 4, "none")
        assert await call(len, bytes(20 << 20), cpus=2) == 20 << 20
        with pytest.raises(ToolRaised, match=r"^ValueError: first line$") as raised:
            await call(raises)
        assert "second line" in raised.value.detail
        with pytest.raises(ToolRaised, match="SystemExit"):
            await call(sys.exit)
        with pytest.raises(ToolRaised, match="pickle"):
            await call(lambda: sys._getframe())
        assert await call(its_pid) == await call(its_pid), "a process is used again"

    with_processes(body)


def test_the_text_of_an_exception_is_cut_and_says_so() -> None:
    async def body(call: Caller) -> None:
        for lines in (False, True):
            with pytest.raises(ToolRaised, match=r"^ValueError: x") as raised:
                await call(raises_at_length, lines)
            assert len(str(raised.value)) < 10_000 and len(raised.value.detail) < 70_000
            assert ("cut: " in str(raised.value)) is not lines
            assert "cut: " in raised.value.detail and raised.value.detail.startswith("Traceback")
        with pytest.raises(ToolRaised, match=r"^Unspeakable: its text cannot be made$"):
            await call(raises_unspeakably)

    with_processes(body)


def test_a_function_of_main_that_its_own_processes_cannot_find_is_to_go_into_a_module() -> None:
    async def body(call: Caller) -> None:
        main: dict[str, Any] = {"__name__": "__main__"}
        exec(IN_MAIN, main)
        with pytest.raises(ToolRaised, match=r"^PicklingError: burn of __main__ .*: put it into a module"):
            await call(main["starts_others"])

    with_processes(body)


def test_a_process_that_dies_fails_its_call_alone() -> None:
    async def body(call: Caller) -> None:
        with pytest.raises(ToolProcessEnded, match="its process was killed by SIGSEGV"):
            await call(reads_nothing)
        with pytest.raises(ToolProcessEnded, match=r"its process ended \(7\)"):
            await call(os._exit, 7)
        assert await call(max, 1, 2) == 2

    with_processes(body)


def test_more_calls_that_never_return_than_run_at_once_leave_no_process_behind() -> None:
    async def body(call: Caller) -> None:
        async def times_out() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call(spins), 1.0)

        await asyncio.gather(*(times_out() for _ in range(MAX_PROCESSES + 1)))
        assert await call(max, 1, 2) == 2
        pid = await call(its_pid)
        server = psutil.Process(pid).parent()
        assert server is not None
        await gone(*[child.pid for child in server.children() if child.pid != pid])

    with_processes(body)


def test_a_call_that_is_cancelled_ends_with_what_it_has_started(tmp_path: Path) -> None:
    async def body(call: Caller) -> None:
        pids = tmp_path / "pids"
        calling = asyncio.ensure_future(call(starts_a_child_and_spins, str(pids)))
        while not pids.exists() or len(pids.read_text().split()) < 2:
            await asyncio.sleep(0.01)
        calling.cancel()
        await asyncio.wait({calling})
        await gone(*map(int, pids.read_text().split()))

    with_processes(body)


def test_a_fork_server_that_is_killed_takes_its_processes_along_and_is_replaced() -> None:
    async def body(call: Caller) -> None:
        pid = await call(its_pid)
        calling = asyncio.ensure_future(call(spins))
        await asyncio.sleep(0)
        server = psutil.Process(pid).parent()
        assert server is not None
        server.kill()
        await gone(pid)
        assert await call(max, 1, 2) == 2
        calling.cancel()  # it has begun again
        await asyncio.wait({calling})
        assert calling.cancelled()

    with_processes(body)


def test_a_call_that_kills_its_fork_server_is_lost_and_those_beside_it_run_again(tmp_path: Path) -> None:
    def waits(name: str) -> int:
        path = tmp_path / name
        path.write_text(path.read_text() + "." if path.exists() else ".")
        while not (tmp_path / "killed").exists() or len(path.read_text()) < 2:
            time.sleep(0.01)
        return len(path.read_text())

    def kills() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        (tmp_path / "killed").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    async def body(call: Caller) -> None:
        beside = [asyncio.ensure_future(call(waits, name)) for name in ("a", "b")]
        with pytest.raises(ToolServerEnded):
            await call(kills)
        assert await asyncio.gather(*beside) == [2, 2]

    with_processes(body)


WORKER = """
import asyncio, sys
sys.path[:0] = sys.argv[2:]
import cloudpickle
from heddle_dask.live.worker.tool_processes import ToolProcesses
from live.test_tool_processes import starts_a_child_and_spins

async def main():
    await ToolProcesses().run(cloudpickle.dumps((starts_a_child_and_spins, (sys.argv[1],), {})), {})

asyncio.run(main())
"""


def test_nothing_outlives_a_worker_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    tests = str(Path(__file__).parents[1])
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(pids), tests, str(Path(tests).parent)])
    try:
        deadline = time.monotonic() + 60
        while not pids.exists() or len(pids.read_text().split()) < 2:
            assert worker.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    asyncio.run(asyncio.wait_for(gone(*map(int, pids.read_text().split())), 60))
