"""The sandboxes of one worker: kept, copied, rebuilt, compared, limited and ended. Real sandboxes throughout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from heddle_dask.sandbox.stateful.contract import ExecResult, ReplayDiffers, SandboxFailed, SandboxSpec
from heddle_dask.sandbox.stateful.keeper import MAX_TEMPLATES, SandboxKeeper, SandboxMissing
from heddle_dask.sandbox.stateful.local_sandbox import local_keeper
from heddle_dask.sandbox.stateful.orders import (
    Compared,
    ExecOperation,
    GetOperation,
    Operation,
    PastOperation,
    PutOperation,
    SandboxOrder,
    StartOperation,
    digest_of,
)

SPEC = SandboxSpec(kind="process", files={"f": b"0\n"})


class Box:
    """What a driver knows of a sandbox."""

    def __init__(self, name: str, spec: SandboxSpec = SPEC, past: tuple[PastOperation, ...] = ()) -> None:
        self.name, self.spec, self.past, self.parent, self.parent_done = name, spec, past, "", 0

    def order(self, operation: Operation, *, with_past: bool) -> SandboxOrder:
        past = self.past if with_past else None
        return SandboxOrder(self.name, self.spec, operation, len(self.past), past, self.parent, self.parent_done)

    async def do(
        self, keeper: SandboxKeeper, operation: Operation, *, with_past: bool = False, key: str = ""
    ) -> dict[str, Any]:
        answer = await keeper.perform(self.order(operation, with_past=with_past), key=key)
        if isinstance(operation, ExecOperation | PutOperation):
            self.past = (*self.past, PastOperation(operation, answer["cpus"], answer["digest"]))
        return answer

    async def sh(self, keeper: SandboxKeeper, text: str, *, compared: Compared = "output", **options: Any) -> str:
        answer = await self.do(keeper, ExecOperation(text, 60.0, compared=compared), **options)
        return str(answer["value"]["stdout"])


def with_keeper(directory: Path, body: Callable[[SandboxKeeper], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        keeper = local_keeper(directory, **options)
        try:
            await body(keeper)
        finally:
            await keeper.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_sandbox_is_kept_and_rebuilt_from_its_past(sandbox_directory: Path) -> None:
    async def body(keeper: SandboxKeeper) -> None:
        box = Box("a")
        with pytest.raises(SandboxMissing):
            await box.sh(keeper, "true")
        assert await box.sh(keeper, "cat f; echo 1 >> f", with_past=True, key="k1") == "0\n"
        # The answer was lost: it is not done twice.
        again = await keeper.perform(SandboxOrder("a", SPEC, ExecOperation("echo 1 >> f", 60.0), done=0), key="k1")
        assert again["value"]["stdout"] == "0\n"
        await box.do(keeper, PutOperation("g", b"g\n"))
        assert (await box.do(keeper, GetOperation("f", 100)))["value"] == b"0\n1\n"
        await box.sh(keeper, "od -An -N8 -tx1 /dev/urandom > h; date +%s.%N; echo took 0.25s", compared="status")
        keeper.close_soon("a")
        with pytest.raises(SandboxMissing):
            await box.sh(keeper, "cat f g")
        answer = await box.do(keeper, ExecOperation("cat f g; test -s h", 60.0), with_past=True)
        assert answer["value"]["stdout"] == "0\n1\ng\n" and answer["rebuilt"] == 3
        assert keeper.names == ("a",)

    with_keeper(sandbox_directory, body)


def test_a_command_that_prints_something_else_fails_the_rebuilding(sandbox_directory: Path) -> None:
    async def body(keeper: SandboxKeeper) -> None:
        box = Box("a")
        await box.sh(keeper, "echo same", with_past=True)
        await box.sh(keeper, "od -An -N8 -tx1 /dev/urandom")
        keeper.close_soon("a")
        with pytest.raises(ReplayDiffers, match="operation 2 of 2, 'od -An"):
            await box.sh(keeper, "true", with_past=True)
        assert keeper.names == ()

    with_keeper(sandbox_directory, body)


def test_a_cancelled_command_leaves_no_trace(sandbox_directory: Path) -> None:
    async def body(keeper: SandboxKeeper) -> None:
        box = Box("a")
        await box.sh(keeper, "echo 1 >> f", with_past=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await box.sh(keeper, "echo 2 >> f; sleep 60")
        with pytest.raises(SandboxMissing):
            await box.sh(keeper, "cat f")
        assert await box.sh(keeper, "cat f", with_past=True) == "0\n1\n"

    with_keeper(sandbox_directory, body)


def test_copies_have_the_files_of_their_parent_here_and_its_past_elsewhere(
    sandbox_directory: Path,
) -> None:
    async def body(keeper: SandboxKeeper) -> None:
        box = Box("a")
        await box.sh(keeper, "echo 1 >> f; od -An -N8 -tx1 /dev/urandom > h", with_past=True)
        for parent_is_here in (True, False):
            if not parent_is_here:
                keeper.close_soon("a")
            copy = Box(f"copy {parent_is_here}", past=box.past)
            copy.parent, copy.parent_done = "a", len(box.past)
            answer = await copy.do(keeper, StartOperation(), with_past=True)
            assert answer["rebuilt"] == (0 if parent_is_here else len(box.past))
            assert await copy.sh(keeper, "cat f; echo 2 >> f") == "0\n1\n"
            if parent_is_here:
                assert await box.sh(keeper, "cat f") == "0\n1\n"

    with_keeper(sandbox_directory, body)


def test_starts_are_limited_and_a_setup_is_run_once(sandbox_directory: Path) -> None:
    async def body(keeper: SandboxKeeper) -> None:
        spec = SandboxSpec(kind="process", files={"a": b"1"}, setup=("od -An -N8 -tx1 /dev/urandom > drawn",))
        boxes = [Box(f"b{i}", spec) for i in range(10)]
        drawn = await asyncio.gather(*(box.sh(keeper, "cat drawn a", with_past=True) for box in boxes))
        assert len(set(drawn)) == 1 and drawn[0].endswith("\n1")
        assert keeper.most_starts == 2
        for number in range(MAX_TEMPLATES + 2):
            other = Box(f"o{number}", SandboxSpec(kind="process", files={"a": str(number).encode()}, setup=("true",)))
            assert await other.sh(keeper, "cat a", with_past=True) == str(number)
        assert len(keeper._templates) == MAX_TEMPLATES
        bad = Box("bad", SandboxSpec(kind="process", setup=("echo no >&2; exit 3",)))
        with pytest.raises(SandboxFailed, match=r"its setup 'echo no >&2; exit 3' failed: 'no\\n\[exit code 3\]'"):
            await bad.sh(keeper, "true", with_past=True)
        assert "bad" not in keeper.names

    with_keeper(sandbox_directory, body, max_starts=2)


def test_closing_ends_what_runs(sandbox_directory: Path) -> None:
    async def body(keeper: SandboxKeeper) -> None:
        box = Box("a")
        running = asyncio.ensure_future(box.sh(keeper, "touch begun; sleep 60", with_past=True))
        while not list(sandbox_directory.glob("*/work/begun")):
            await asyncio.sleep(0.01)
        keeper.close_soon("a")
        keeper.close_soon("unknown")
        with pytest.raises(asyncio.CancelledError):
            await running
        while list(sandbox_directory.iterdir()):
            await asyncio.sleep(0.01)
        assert keeper.names == ()

    with_keeper(sandbox_directory, body)


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("3 passed in 0.12s", "3 passed in 14.02s", True),
        ("3 passed in 0.12s", "2 passed in 0.12s", False),
        ("-rw-r--r-- 1 agent agent 5 Nov 24 15:09 a", "-rw-r--r-- 1 agent agent 5 Dec  1 03:59 a", True),
        ("<f at 0x7f1200>", "<f at 0x7f3400>", True),
        ("at 12:01:33.25", "at 13:59:01", True),
        ("2026-01-02", "2027-11-30", True),
        ("size 12", "size 13", False),
    ],
)
def test_what_two_runs_may_print_differently(first: str, second: str, equal: bool) -> None:
    digests = [digest_of(ExecResult(0, text), "output") for text in (first, second)]
    assert (digests[0] == digests[1]) == equal
    assert digest_of(ExecResult(0, first), "status") == digest_of(ExecResult(0, second), "status")
    assert digest_of(ExecResult(0, first), "status") != digest_of(ExecResult(1, first), "status")
    ended = [ExecResult(137, text, ended_by="timeout") for text in (first, second)]
    assert digest_of(ended[0], "output") == digest_of(ended[1], "output")
