"""The contract of stateful sandboxes, of every kind that runs here, with real processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.core.resources import IDLE_NICE
from heddle_dask.isolation.granted import Granted
from heddle_dask.isolation.granted import running_with as running_with_grant
from heddle_dask.sandbox.process_accounting import ProcessAccounting
from heddle_dask.sandbox.stateful.contract import (
    MIB,
    WORK,
    Command,
    SandboxFailed,
    SandboxGone,
    SandboxSpec,
    StatefulSandbox,
    relative_path,
)
from heddle_dask.sandbox.stateful.kinds import ApptainerKind, kind_named
from heddle_dask.sandbox.stateful.local_sandbox import LocalSandbox
from heddle_dask.sandbox.stateful.supervised_command import KeptOutput
from heddle_dask.sandbox.stateful.work_directory import WorkDirectory, reap
from heddle_dask.sandbox_service import client
from heddle_dask.sandbox_service.client import RemoteSandbox
from heddle_dask.sandbox_service.contract import read_token
from heddle_dask.sandbox_service.server import SandboxServer

Make = Callable[[str], StatefulSandbox]
SPEC = SandboxSpec(memory_bytes=200 * MIB, disk_bytes=8 * MIB, max_processes=40, output_bytes=2000, max_files=400)
KINDS = [
    pytest.param("bubblewrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap")),
    "process",
    "remote",
]


@asynccontextmanager
async def served(directory: Path, **options: Any) -> AsyncIterator[tuple[SandboxServer, str]]:
    """A server of sandboxes and its address."""
    server = SandboxServer(directory, "token", **options)
    runner = web.AppRunner(server.application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def with_kind(kind: str, directory: Path, body: Callable[[Make], Awaitable[None]]) -> None:
    async def run() -> None:
        accounting = ProcessAccounting()
        if kind == "remote":
            async with served(directory) as (server, address):
                await body(lambda name: RemoteSandbox(address, "token", SPEC))
                assert server.names == ()
        else:
            await body(lambda name: LocalSandbox(name, SPEC, kind_named(kind), directory, accounting))

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract(kind: str, sandbox_directory: Path) -> None:
    async def body(make: Make) -> None:
        box = make("one")
        await box.start()

        async def out(text: str, **options: Any) -> str:
            result = await box.exec(Command(text, **options))
            assert result.ended_by == "" and result.exit_code == 0, result
            return result.stdout

        assert await out("echo a > f; cat f; pwd") == f"a\n{WORK}\n"
        assert await out("cat f; echo $HEDDLE_CPUS {cpus} $OMP_NUM_THREADS", cpus=3) == "a\n3 3 3\n"
        assert (await box.exec(Command("echo o; echo e >&2; exit 7"))).text == "o\ne\n[exit code 7]"
        assert (await box.exec(Command("kill -9 $$"))).exit_code in (137, 9)
        # Files, and links that lead outside.
        await box.put("d/e/b", b"\0\xff")
        await box.put("d/e/b", b"\0\xfe")
        assert await box.get(f"{WORK}/d/e/b", 10) == b"\0\xfe"
        await out("ln -s /etc/passwd link; ln -s /etc etc; chmod 400 d/e/b; mkfifo fifo")
        for path in ("link", "etc/passwd", "missing", "d", "fifo"):
            with pytest.raises(SandboxFailed, match="sandbox f"):
                await box.get(path)
        for path in ("link", "etc/x", "d"):
            with pytest.raises(SandboxFailed, match="sandbox f"):
                await box.put(path, b"")
        with pytest.raises(SandboxFailed, match="longer than 1 bytes"):
            await box.get("d/e/b", 1)
        # Limits.
        result = await box.exec(Command("echo begun; sleep 60 & setsid sleep 60", timeout_s=1.0))
        assert result.ended_by == "timeout" and result.stdout == "begun\n"
        result = await box.exec(Command("head -c 20000000 /dev/zero > big; sleep 60", timeout_s=50))
        assert result.exit_code != 0 and result.ended_by in ("", "disk")
        await out("rm -f big")
        result = await box.exec(
            Command("for i in 1 2 3 4; do head -c 4000000 /dev/zero > b$i; done; sleep 60", timeout_s=50)
        )
        assert result.ended_by == "disk"
        await out("rm -f b?")
        result = await box.exec(Command("head -c 900000000 /dev/zero | tail -c 800000000", timeout_s=50))
        assert result.exit_code != 0 or result.ended_by == "memory"
        result = await box.exec(Command("for i in $(seq 90); do sleep 60 & done; wait", timeout_s=50))
        assert result.exit_code != 0, "it may not have that many processes"
        assert "bytes left out" in await out("seq 10000")
        lost, ticks, asleep = (f"{word}{os.getpid()}" for word in ("lost", "ticks", "61."))  # like no other test's
        # Background processes end with their command, services are frozen.
        loop = f"(setsid sh -c 'while true; do echo x >> {lost}; sleep 0.01; done' &)"
        await out(f"{loop}; until test -s {lost}; do sleep 0.01; done")
        await box.exec(Command(f"while true; do echo x >> {ticks}; sleep 0.01; done", service="ticker"))
        await out(f"until test -s {ticks} && test $(wc -l < {ticks}) -gt 4; do sleep 0.01; done")
        sizes = len(await box.get(lost, MIB)), len(await box.get(ticks, MIB))
        await asyncio.sleep(0.3)
        assert (len(await box.get(lost, MIB)), len(await box.get(ticks, MIB))) == sizes
        assert sizes[1] > 4
        # A copy is one of its own, and does not have the service.
        copy = await box.fork("two")
        await copy.exec(Command("echo copy > f; sleep 0.2"))
        assert await box.get("f", 10) == b"a\n" and await copy.get("f", 10) == b"copy\n"
        assert len(await copy.get(ticks, MIB)) == sizes[1]
        await copy.stop()
        # What is cancelled ends.
        running = asyncio.ensure_future(box.exec(Command(f"sleep {asleep}", timeout_s=100)))
        for _ in range(2000):
            if running_with(asleep):
                break
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await box.stop()
        await box.stop()
        for _ in range(1000):
            if not running_with(asleep, lost, ticks):
                break
            await asyncio.sleep(0.01)
        assert not running_with(asleep, lost, ticks)

    with_kind(kind, sandbox_directory, body)


def running_with(*words: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        found += [process.pid for word in words if word in line and "tests" not in line]
    return found


@pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "remote"])
def test_a_sandbox_works_whatever_the_umask_of_its_worker_is(kind: str, sandbox_directory: Path) -> None:
    async def body(make: Make) -> None:
        box = make("one")
        await box.start()
        told = await box.exec(Command("echo a > f; ls -l f | cut -c1-10; cat /etc/passwd > /dev/null && umask"))
        assert told.stdout == "-rw-r--r--\n0022\n", told
        await box.stop()

    before = os.umask(0o077)  # that of a job
    try:
        with_kind(kind, sandbox_directory, body)
    finally:
        os.umask(before)


def test_bubblewrap_shows_nothing_of_the_host(sandbox_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")

    async def body(make: Make) -> None:
        box = make("one")
        await box.start()
        for hidden in (tmp_path / "secret", sandbox_directory, "/etc/shadow", "/root/.ssh", "/sys"):
            assert (await box.exec(Command(f"ls -d {hidden}"))).exit_code != 0, hidden
        for written in ("/usr/x", "/etc/x", "/x", f"{sys.prefix}/x", "/home/x"):
            assert (await box.exec(Command(f"touch {written}"))).exit_code != 0, written
        assert (await box.exec(Command("id -un; ls /proc | grep -c '^[0-9]'"))).stdout.split()[0] == "agent"
        assert int((await box.exec(Command("ls -d /proc/[0-9]* | wc -l"))).stdout) < 8
        assert (await box.exec(Command("python -m pytest --version"))).ok
        network = "import socket; socket.create_connection(('127.0.0.1', 22), 1)"
        assert (await box.exec(Command(f'python -c "{network}"'))).exit_code == 1
        await box.stop()

    with_kind("bubblewrap", sandbox_directory, body)


def test_a_command_runs_on_the_cores_that_it_is_granted(sandbox_directory: Path) -> None:
    async def body(make: Make) -> None:
        box = make("one")
        await box.start()
        core = max(os.sched_getaffinity(0))
        result = await box.exec(Command("grep Cpus_allowed_list /proc/self/status; nproc", cores=(core,)))
        assert result.stdout.split() == ["Cpus_allowed_list:", str(core), "1"]
        # The action holds the supervisor, and all below it, to its limits; a service lives on after the action.
        held: list[int] = []
        with running_with_grant(Granted(adopt=held.append)):
            parents = await box.exec(Command("cut -d ' ' -f 4 /proc/$$/stat"))
            await box.exec(Command("sleep 60", service="s"))
        assert held == [int(parents.stdout)]
        # Lent cores are the command's; a service goes on with those that no other action has.
        lent = Granted(cores=tuple(sorted(os.sched_getaffinity(0))), own_cores=(core,), nice=IDLE_NICE)
        with running_with_grant(lent):
            await box.exec(Command("echo $$ > pid; exec sleep 60", service="s"))
            ask = "until test -s pid; do sleep 0.01; done; grep Cpus_allowed_list /proc/$(cat pid)/status"
            told = await box.exec(Command(f"{ask}; cut -d ' ' -f 41 /proc/$$/stat", cores=lent.cores))
        assert told.stdout.split() == ["Cpus_allowed_list:", str(core), str(os.SCHED_IDLE)]
        await box.stop()

    with_kind("process", sandbox_directory, body)


def test_apptainer_command_lines() -> None:
    files = WorkDirectory(Path("/base"), "one", private_user=False)
    spec = SandboxSpec(kind="apptainer", root="/images/swe.sif")
    kind = ApptainerKind("/usr/bin/apptainer")
    with kind.prepare(Command("pytest -n {cpus}", cpus=4), files, spec) as prepared:
        line = list(prepared.argv)
    assert line[:3] == ["/usr/bin/apptainer", "exec", "--containall"]
    assert line[-4:-1] == ["/images/swe.sif", "/bin/sh", "-c"] and line[-1].endswith("; pytest -n 4")
    joined = " ".join(line)
    for part in (f"--bind {files.work}:{WORK}", f"--pwd {WORK}", "--network none", "--env HEDDLE_CPUS=4"):
        assert part in joined
    with kind.prepare(Command("true"), files, SandboxSpec(kind="apptainer", root="/i", network=True)) as prepared:
        assert "--network" not in prepared.argv
    with (
        pytest.raises(HeddleError, match="root=IMAGE"),
        kind.prepare(Command("true"), files, SandboxSpec(kind="apptainer")),
    ):
        pass
    if not shutil.which("apptainer") and not shutil.which("singularity"):
        with pytest.raises(HeddleError, match="install the package apptainer"):
            kind_named("apptainer")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "/home/agent/../x"])
def test_paths_outside_are_refused(path: str) -> None:
    with pytest.raises(BadInput, match="below the work directory"):
        relative_path(path)


@pytest.mark.parametrize("sizes", [[1], [5, 5], [3, 100, 2], [1] * 300, [64, 64, 1]])
def test_kept_output_has_the_beginning_and_the_end(sizes: list[int]) -> None:
    whole, kept, at = bytes(range(256)) * 2, KeptOutput(20), 0
    for size in sizes:
        kept.take(whole[at : at + size])
        at += size
    total = sum(sizes)
    tail = b"".join(kept._tail)
    assert kept.left_out == max(0, total - 20)
    assert bytes(kept.head) == whole[: min(total, 10)]
    assert tail == (whole[10:total] if total <= 20 else whole[total - 10 : total])
    assert ("left out" in kept.text) == (total > 20)


_KEEPS = """
import asyncio, sys
from pathlib import Path
from heddle_dask.sandbox.process_accounting import ProcessAccounting
from heddle_dask.sandbox.stateful.contract import Command, SandboxSpec
from heddle_dask.sandbox.stateful.kinds import kind_named
from heddle_dask.sandbox.stateful.local_sandbox import LocalSandbox

async def main():
    kind = kind_named(sys.argv[2])
    box = LocalSandbox("one", SandboxSpec(), kind, Path(sys.argv[1]), ProcessAccounting())
    await box.start()
    await box.exec(Command("setsid sleep 71.5", service="s"))
    await box.exec(Command("(setsid sleep 71.5 &); echo > begun; sleep 71.5"))

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", KINDS[:2])
def test_nothing_is_left_when_the_worker_is_killed(kind: str, sandbox_directory: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", _KEEPS, str(sandbox_directory), kind])

    def wait(condition: Callable[[], Any]) -> None:
        for _ in range(3000):
            if condition():
                return
            signal.sigtimedwait([], 0.01)
        raise AssertionError("condition not met")

    try:
        wait(lambda: len(running_with("sleep 71.5")) >= 3 and list(sandbox_directory.glob("*/work/begun")))
        assert reap(sandbox_directory) == [], "its owner lives"
    finally:
        owner.kill()
        owner.wait()
    wait(lambda: not running_with("71.5"))
    assert len(reap(sandbox_directory)) == 1


def test_leases_of_a_remote_service(sandbox_directory: Path) -> None:
    async def body() -> None:
        async with served(sandbox_directory, lease_s=1.0, max_sandboxes=2) as (server, address):
            box = RemoteSandbox(address, "token", SPEC)
            await box.start()
            await box.put("f", b"x")
            await asyncio.sleep(2.5)  # more than two leases: it is renewed
            assert await box.get("f") == b"x" and len(server.names) == 1
            other = RemoteSandbox(address, "token", SPEC)
            await other.start()
            third = RemoteSandbox(address, "token", SPEC)
            with pytest.raises(SandboxFailed, match="no room"):
                await third.start()
            await third.stop()
            with pytest.raises(SandboxFailed, match="no room"):
                await box.fork("four")
            # The server knows them apart: one's end is nothing to the other.
            await other.put("f", b"y")
            assert await box.get("f") == b"x" and len(list(sandbox_directory.glob("box-*"))) == 2
            wrong = RemoteSandbox(address, "wrong", SPEC)
            with pytest.raises(SandboxFailed, match="token is wrong"):
                await wrong.start()
            await wrong.stop()
            assert other._renewing is not None
            other._renewing.cancel()  # as if its worker had died
            for _ in range(1000):
                if len(server.names) == 1:
                    break
                await asyncio.sleep(0.01)
            with pytest.raises(SandboxGone, match="no longer"):
                await other.exec(Command("true"))
            await other.stop()
            await box.stop()
            assert server.names == ()
        gone = RemoteSandbox(address, "token", SPEC)
        with pytest.raises(SandboxFailed, match="does not answer"):
            await gone.start()
        await gone.stop()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_requests_that_make_no_sense_are_refused_by_the_service(sandbox_directory: Path) -> None:
    right, deep = {"Authorization": "Bearer token"}, b'{"spec": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

    async def body() -> list[int]:
        statuses = []
        async with served(sandbox_directory) as (_, address), aiohttp.ClientSession() as http:
            host, _, port = address.rpartition("//")[2].partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
            statuses.append(int((await reader.readline()).split()[1]))
            writer.close()
            box = RemoteSandbox(address, "token", SPEC)
            await box.start()
            command = f"/sandboxes/{box._id}/exec"
            bodies = [b"{", b"\xff", b"[]", deep, b'{"spec": []}', b'{"spec": {"memory_bytes": "1"}}', b"{}"]
            for path, each in [
                *(("/sandboxes", each) for each in bodies),
                *((command, each) for each in (*bodies[:4], b'{"text": 1}', b'{"text": "true", "cpus": "x"}')),
                (command, b'{"text": "true", "timeout_s": NaN}'),
            ]:
                async with http.post(address + path, data=each, headers=right) as answer:
                    statuses.append(answer.status)
            odd = {**right, "Content-Type": "application/json; charset=nothing"}
            async with http.post(address + command, data=b"{}", headers=odd) as answer:
                statuses.append(answer.status)
            async with http.get(f"{address}/sandboxes/{box._id}/files", headers=right) as answer:
                statuses.append(answer.status)
            assert (await box.exec(Command("true"))).ok
            await box.stop()
        return statuses

    assert asyncio.run(asyncio.wait_for(body(), 60)) == [401, *[422] * 16]


def test_a_remote_service_that_is_stopped_has_lost_the_sandbox(
    sandbox_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token = tmp_path / "token"
    argv = [sys.executable, "-m", "heddle_dask.sandbox_service", "--token-file", str(token), "--port", str(port)]
    service = subprocess.Popen([*argv, "--lease-s", "2"], env={**os.environ, "TMPDIR": str(tmp_path)})
    address, lines = f"http://127.0.0.1:{port}", list[str]()

    async def body() -> None:
        while not token.exists() or not token.stat().st_size:
            await asyncio.sleep(0.01)
        while True:
            box = RemoteSandbox(address, read_token(token, make=False), SPEC, lines.append)
            try:
                await box.start()
                break
            except SandboxFailed:
                await asyncio.sleep(0.01)  # it does not listen yet
            finally:
                await box.stop() if not box._id else None
        running = asyncio.ensure_future(box.exec(Command("sleep 60")))
        await asyncio.sleep(0)
        service.send_signal(signal.SIGSTOP)
        for request in (running, box.exec(Command("true"))):
            with pytest.raises(SandboxGone, match=r"sandbox service .* has not answered for"):
                await request
        assert lines == [f"sandbox service {address} has not answered for 1.33333 s"]
        await box.stop()
        monkeypatch.setattr(client, "_RENEWAL_S", 0.1)
        another = RemoteSandbox(address, read_token(token, make=False), SPEC, lines.append)
        starting = asyncio.ensure_future(another.start())
        while len(lines) == 1:
            await asyncio.sleep(0.01)
        assert lines[1] == f"sandbox service {address} has not answered for 0.2 s"
        starting.cancel()
        await asyncio.wait([starting])
        await another.stop()

    try:
        asyncio.run(asyncio.wait_for(body(), 60))
    finally:
        service.kill()
        service.wait()


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_token(path)
    assert token == read_token(path) and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(HeddleError, match="chmod 600"):
        read_token(path)
    with pytest.raises(HeddleError, match="missing"):
        read_token(tmp_path / "missing", make=False)
