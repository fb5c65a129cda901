"""Sandboxes of trajectories on a real cluster: state, copies, cores, a worker that drains or dies, and clean-up."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from distributed import Client
from worlds.image_files import ImageFiles, layer, layer_of, member, small_root
from worlds.live_world import cluster, control_lines, emulated, kill, run, until, worker_process
from worlds.shared_cluster import shared_cluster

from heddle_dask.chat.tool_calls import format_call
from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.needs import Needs
from heddle_dask.environments.base import ActionFailed, Context, Reply, Reward, Task
from heddle_dask.environments.shell_env import ShellEnvironment, repair_commands
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.wire.cluster_messages import DrainWorkers
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.live.worker.sandbox_host import TOKEN_FILE_VARIABLE
from heddle_dask.records.store import RunReader
from heddle_dask.sandbox.stateful.local_sandbox import keeper_of_loop
from heddle_dask.sandbox_service.contract import read_token
from heddle_dask.strategies.presets import strategies_of_run

pytestmark = [pytest.mark.cluster]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Program:
    """An environment of one function, given by value."""

    name = "sandboxed"

    def __init__(self, body: Callable[[Context, int], Awaitable[None]], directory: Path) -> None:
        self.body = body
        self.directory = directory

    def tasks(self, count: int, seed: int) -> list[Task]:
        return [Task(f"t{i}", "") for i in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float:
        await self.body(ctx, int(task.task_id[1:]))
        return 1.0


async def kept_here() -> tuple[list[str], int]:
    """The sandboxes of the worker that runs this, and the most starts at once that it has seen."""
    keeper = keeper_of_loop()
    return sorted(name.partition("/")[2] for name in keeper.names), keeper.most_starts


async def uses_all_of_it(ctx: Context, number: int) -> None:
    """State, files, limits, services and copies of one sandbox."""
    async with ctx.sandbox(files={"a.txt": "one\n"}, memory="256 MiB") as box:
        assert (await box.exec("cat a.txt; echo two >> a.txt; mkdir -p d")).stdout == "one\n"
        assert (await box.exec("cat a.txt; ls")).stdout == "one\ntwo\na.txt\nd\n"
        result = await box.exec("echo {cpus} $HEDDLE_CPUS", needs=Needs(cpus=(2, 2)))
        assert result.stdout == "2 2\n"
        result = await box.exec("echo begun; sleep 60", timeout_s=2.0)
        assert result.ended_by == "timeout" and result.stdout == "begun\n" and not result.ok
        assert (await box.exec("exit 3")).exit_code == 3
        await box.put("d/b.bin", bytes(range(256)))
        assert await box.get("d/b.bin") == bytes(range(256))
        for path in ("missing", "d"):
            with pytest.raises(ActionFailed, match="sandbox file"):
                await box.get(path)
        # Without the declaration a background process ends with its command; a service is frozen in between.
        await box.exec("(while true; do echo x >> lost; sleep 0.01; done) & until test -s lost; do sleep 0.01; done")
        await box.exec("while true; do echo x >> ticks; sleep 0.01; done", service="ticker")
        await box.exec("until test -s ticks && test $(wc -l < ticks) -gt 4; do sleep 0.01; done")
        ticks, lost = await box.get("ticks"), await box.get("lost")
        assert len(ticks) > 4
        await asyncio.sleep(0.3)
        assert len(await box.get("ticks")) == len(ticks) and await box.get("lost") == lost
        async with await box.fork() as copy:
            assert (await copy.exec("cat a.txt; echo three >> a.txt; cat a.txt")).stdout.endswith("two\nthree\n")
        assert await box.get("a.txt") == b"one\ntwo\n"
        # A cancelled command is killed, and leaves nothing behind: the sandbox is rebuilt without it.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await box.exec("echo cancelled >> a.txt; sleep 3600")
        assert await box.get("a.txt") == b"one\ntwo\n"
        here = (await Client.current().run(kept_here)).values()
        assert len([name for names, _ in here for name in names if name.startswith(f"t{number}/")]) == 1
        with pytest.raises(ActionFailed, match="largest worker of pool"):
            await ctx.call(kept_here, needs=Needs(cpus=64))


def in_an_image(image: str) -> Callable[[Context, int], Awaitable[None]]:
    async def body(ctx: Context, number: int) -> None:
        async with ctx.sandbox(image=image, setup=["echo ready > state"], memory="64 MiB") as box:
            result = await box.exec("cat state base; pwd; echo $FLAVOUR; id -u; ls /bin/tar")
            assert result.stdout == "ready\nlower\n/app\nplain\n0\n", result
            await box.exec(f"echo {number} > base; mkdir -p /opt/d")
            await box.put("/opt/d/file", "content")
            assert await box.get("base") == f"{number}\n".encode() and await box.get("/opt/d/file") == b"content"
        async with ctx.sandbox(image=f"{image}.missing") as box:
            with pytest.raises(ActionFailed, match=r"it is not on .*: give a path that all workers have"):
                await box.exec("true")

    return body


async def members_of_a_group(ctx: Context, number: int) -> None:
    """Eight attempts share a setup, hold no cores while they wait, and leave their sandbox open."""
    box = ctx.sandbox(files={"n": str(number // 100)}, setup=["od -An -N8 -tx1 /dev/urandom > drawn"], memory="64 MiB")
    first = await box.get("drawn")
    assert (await box.exec("echo mine >> drawn; wc -l < drawn", needs=Needs(cpus=4))).stdout == "2\n"
    ctx.metadata["drawn"] = first.hex()
    await asyncio.sleep(0.2)
    assert (await box.exec("wc -l < drawn", needs=Needs(cpus=8))).stdout == "2\n"


@pytest.fixture
def directory_of_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where workers keep their sandboxes: other programs of this machine have theirs elsewhere."""
    # Engines have sockets there: the path must be short.
    path = Path(tempfile.mkdtemp(prefix="heddle-test-"))
    path.chmod(0o711)
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    shutil.rmtree(path)


async def is_clean(client: Client) -> None:
    """No sandbox is left on any worker."""
    for _ in range(500):
        here = await client.run(kept_here)
        if all(names == [] for names, _ in here.values()):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"sandboxes are left: {here}")


def test_sandboxes_keep_state_and_hold_no_cores(model_dir: str, tmp_path: Path, directory_of_workers: Path) -> None:
    layers = [layer_of(small_root(tmp_path / "root", with_python=False)), layer([member("app/base", b"lower\n")])]
    files = ImageFiles([*layers, layer([member("bin/.wh.tar")])], {"Env": ["FLAVOUR=plain"], "WorkingDir": "/app"})
    image = str(files.docker_tar(tmp_path / "image.tar"))

    async def body() -> None:
        async with cluster(1) as (_, client):
            engines = emulated(model_dir)
            programs = (("all", uses_all_of_it, 2), ("image", in_an_image(image), 2), ("group", members_of_a_group, 8))
            for name, program, tasks in programs:
                out = tmp_path / f"{name}.zarr"
                rollout = Rollout(client, env=Program(program, tmp_path), model=model_dir, engines=engines, out=out)
                batch = await rollout.run(tasks)
                assert [(t.status, t.detail) for t in batch] == [("completed", "")] * tasks
                await is_clean(client)
                lines = control_lines(out)
                assert list(replay(Controller(strategies_of_run(RunReader(out).metadata)), lines)) == []
            drawn = {t.metadata["drawn"] for t in batch}
            assert len(drawn) == 1, "all of them are copies of one setup"
            starts = [most for _, most in (await client.run(kept_here)).values()]
            assert 1 <= max(starts) <= 4

    run(body(), 240)
    (boxes,) = directory_of_workers.glob("heddle-sandboxes-*")
    assert list(boxes.iterdir()) == []


def varies(number: int) -> bool:
    """Two and two: sandboxes go to the workers in turn."""
    return number % 4 < 2


class Moved(Program):
    """Half of the trajectories have a command that prints something else at each run."""

    async def solve(self, task: Task, ctx: Context) -> float:
        number = int(task.task_id[1:])
        async with ctx.sandbox(files={"a": "1\n"}, memory="64 MiB") as box:
            await box.exec("echo 2 >> a; ls -la; date")
            await box.put("b", "b\n")
            if varies(number):
                await box.exec("od -An -N8 -tx1 /dev/urandom")
            await box.exec("od -An -N8 -tx1 /dev/urandom > c", compared="status")
            (self.directory / f"ready-{number}").touch()
            while not (self.directory / "go").exists():
                await asyncio.sleep(0.02)
            result = await box.exec("cat a b; test -s c && echo c")
        return float(result.stdout == "1\n2\nb\nc\n")


@pytest.mark.parametrize("how", ["drained", "killed"])
def test_a_sandbox_is_rebuilt_elsewhere_or_its_trajectory_fails(model_dir: str, tmp_path: Path, how: str) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> list[Any]:
        async with cluster(1, tool_workers=2) as (_, client):
            rollout = Rollout(
                client,
                env=Moved(uses_all_of_it, tmp_path),
                model=model_dir,
                engines=emulated(model_dir),
                out=out,
            )
            batch = asyncio.ensure_future(rollout.run(8))
            await until(lambda: len(list(tmp_path.glob("ready-*"))) == 8)
            if how == "drained":
                await ask_scheduler(client, DrainWorkers(names=("tool-0",), ends_in_s=60.0))
            else:
                kill(worker_process("tool-0").pid)
            (tmp_path / "go").touch()
            records = sorted(await batch, key=lambda t: t.trajectory_id)
            if how == "drained":
                await is_clean_but(client, "tool-0")
            return records

    records = run(body())
    lost = [t for t in records if t.status != "completed"]
    assert lost, "some sandbox was on that worker"
    for record in records:
        number = int(record.task_id[1:])
        if record in lost:
            assert varies(number) and (record.status, record.cause) == ("failed", "sandbox"), record.detail
            assert "its operation 3 of 4, 'od -An" in record.detail
        else:
            assert record.reward == 1.0
    lines = control_lines(out)
    missing = [event for event, _ in lines if event[0] == "ActionFinished" and not event[5]]
    assert len(missing) >= 4, "the four sandboxes of that worker were missed on the other"
    assert list(replay(Controller(strategies_of_run(RunReader(out).metadata)), lines)) == []


async def is_clean_but(client: Client, name: str) -> None:
    workers = (await client.scheduler.identity(n_workers=-1))["workers"]  # type: ignore[union-attr]
    others = [address for address, facts in workers.items() if facts["name"] != name]
    for _ in range(500):
        here = await client.run(kept_here, workers=others)
        if all(names == [] for names, _ in here.values()):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"sandboxes are left: {here}")


class Expert(ShellEnvironment):
    """The environment `shell` whose model is an expert that repairs the even attempts; everything else is real."""

    async def solve(self, task: Task, ctx: Context) -> Reward | None:
        commands = repair_commands(task) if ctx.seed % 2 == 0 else ["ls"]
        ctx.metadata["expert"] = ctx.seed % 2 == 0
        return await super().solve(task, Spoken(ctx, commands))  # type: ignore[arg-type]


class Spoken:
    """A context whose model says given commands, and then that it is done."""

    def __init__(self, ctx: Context, commands: list[str]) -> None:
        self._ctx = ctx
        self._replies = [format_call("shell", {"command": command}) for command in commands] + ["Done."]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def append(self, role: str, text: str) -> None:
        self._ctx.metadata[f"{role} {len(self._replies)}"] = text[:200]

    async def generate(self, **options: Any) -> Reply:
        return Reply(self._replies.pop(0), (), (), "stop")


def test_the_shell_environment_is_solved_by_an_expert(model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> Any:
        async with shared_cluster(engines=1) as client:
            rollout = Rollout(
                client,
                env=Expert(cpus=(1, 2)),
                model=model_dir,
                engines=emulated(model_dir),
                samples=4,
                out=out,
            )
            batch = await rollout.run(1)
            await is_clean(client)
            return batch

    batch = run(body(), 200)
    assert {t.metadata["expert"] for t in batch} == {True, False}
    for record in batch:
        assert (record.status, record.detail) == ("completed", "")
        assert record.reward == float(record.metadata["expert"])
        assert record.reward_parts["pass_to_pass"] == 1.0
        (suite,) = [action for action in record.actions if action.label == "suite"]
        assert suite.kind == "reward" and suite.cpus >= 1


def test_a_silent_service_is_told_to_the_driver_and_the_run_goes_on_when_it_answers(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, place, lines = tmp_path / "token", tmp_path / "address", list[str]()
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(token))
    read_token(token)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    root = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "heddle_dask.sandbox_service", "--token-file", str(token), "--port", str(port)]
    service = subprocess.Popen([*argv, "--lease-s", "6"], env={**os.environ, "TMPDIR": str(tmp_path)})

    async def asks_again(ctx: Context, number: int) -> None:
        async with ctx.sandbox(kind="remote", root=root, memory="64 MiB") as box:
            assert (await box.exec("echo one")).stdout == "one\n"
            place.write_text("begun")
            while place.read_text() != "told":
                await asyncio.sleep(0.01)
            assert (await box.exec("echo two")).stdout == "two\n"

    async def body() -> None:
        async with (
            cluster(1, tool_workers=2) as (_, client),
            Rollout(
                client,
                env=Program(asks_again, tmp_path),
                model=model_dir,
                engines=emulated(model_dir),
                progress=lines.append,
            ) as rollout,
        ):
            running = asyncio.ensure_future(rollout.run(1))
            await until(place.exists)
            service.send_signal(signal.SIGSTOP)
            await until(lambda: any(line == f"sandbox service {root} has not answered for 4 s" for line in lines))
            service.send_signal(signal.SIGCONT)
            place.write_text("told")
            assert (await running).counts == {"completed": 1}

    try:
        run(body())
    finally:
        service.kill()
        service.wait()
