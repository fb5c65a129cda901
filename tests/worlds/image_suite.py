"""What a sandbox of an image must do, as root and as an ordinary user: also a program, for a user to run.

Imports nothing that is not in the standard library, but for the sandbox.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tarfile
from pathlib import Path

from heddle_dask.sandbox.process_accounting import ProcessAccounting
from heddle_dask.sandbox.stateful.contract import MIB, Command, ExecResult, SandboxFailed, SandboxSpec
from heddle_dask.sandbox.stateful.kinds import kind_named
from heddle_dask.sandbox.stateful.local_sandbox import LocalSandbox

SUITE = b"""
import os, pathlib, unittest

class Suite(unittest.TestCase):
    def test_environment(self):
        self.assertEqual(os.environ["FLAVOUR"], "plain = good")
        self.assertEqual(os.getcwd(), "/app")

    def test_files(self):
        self.assertFalse(pathlib.Path("/app/old.py").exists())
        pathlib.Path("/app/result").write_text("passed")

    def test_name_of_this_machine(self):
        self.assertIn("localhost", pathlib.Path("/etc/hosts").read_text())
"""


class Boxes:
    """Sandboxes of one image in a folder."""

    def __init__(self, image: str, base: Path) -> None:
        self.spec = SandboxSpec(image=image, memory_bytes=400 * MIB, disk_bytes=8 * MIB, max_processes=60)
        self._base = base
        self._accounting = ProcessAccounting()

    async def started(self, name: str) -> LocalSandbox:
        box = LocalSandbox(name, self.spec, kind_named(""), self._base, self._accounting)
        await box.start()
        return box


async def ran(box: LocalSandbox, text: str) -> str:
    result = await box.exec(Command(text))
    assert result.ok, result
    return result.stdout


async def check_image(image: str, base: Path, user: str) -> None:
    """One sandbox through its life; `user`: what ``id`` says of the image's user."""
    boxes = Boxes(image, base)
    box = await boxes.started("one")
    tests = await box.exec(Command("python -m unittest suite"))
    assert tests.ok and "Ran 3 tests" in tests.stderr, tests
    assert await box.get("result") == b"passed"
    assert (await ran(box, "id -u; id -g; echo $HOME; pwd")).split() == [*user.split(), "/app"]
    # Archives and installers give files to other users, of which an image has none.
    await box.put("owned.tar", _of_another_user())
    assert await ran(box, "tar xf owned.tar && cat owned && touch /owned") == "content"
    # Files: those of the image can be changed and deleted, here alone.
    await box.put("new/deep", b"1")
    await box.put("/etc/setting", b"2")
    assert await ran(box, "cat new/deep /etc/setting /app/new/deep") == "121"
    await ran(
        box, "echo changed > suite.py; rm -r /bin/tar /app/lib; mkdir /app/lib; mv /etc /etc.old; ln -s /app /link"
    )
    assert await box.get("/etc.old/setting") == b"2"
    assert await ran(box, "cat suite.py; ls lib") == "changed\n"
    for path in ("/link/suite.py", "/missing", "lib"):
        for operation in (box.get(path), box.put(path, b"")) if path != "/missing" else (box.get(path),):
            try:
                await operation
            except SandboxFailed:
                continue
            raise AssertionError(path)
    # A copy has them too, and is one of its own.
    copy = await box.fork("two")
    await ran(copy, "test ! -e /bin/tar && test ! -e lib/module.py && echo copy > suite.py")
    assert await box.get("suite.py") == b"changed\n" and await copy.get("suite.py") == b"copy\n"
    await copy.stop()
    # A working directory that is gone, and services.
    await ran(box, "rm -rf /app")
    assert await ran(box, "pwd") == "/\n"
    await box.exec(Command("while true; do echo x >> /ticks; sleep 0.01; done", service="ticker"))
    await ran(box, "until test -s /ticks; do sleep 0.01; done")
    full = await box.exec(Command("for i in 1 2 3 4; do head -c 4000000 /dev/zero > /b$i; done; sleep 60"))
    assert full.ended_by == "disk", full
    await ran(box, "rm /b?")
    await box.stop()
    # The next sandbox has the image as it was.
    fresh = await boxes.started("three")
    assert (await fresh.exec(Command("python -m unittest suite"))).ok
    assert await ran(fresh, "ls lib /bin/tar") == "/bin/tar\n\nlib:\nmodule.py\n"
    await fresh.stop()
    await _check_variables(base, boxes)


def _of_another_user() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        member = tarfile.TarInfo("owned")
        member.uid, member.gid, member.size, member.mode = 4321, 4321, 7, 0o400
        tar.addfile(member, io.BytesIO(b"content"))
    return made.getvalue()


async def _check_variables(base: Path, boxes: Boxes) -> None:
    """What the image sets is for its own programs: bubblewrap does not load a library of its choice."""
    box = await boxes.started("four")
    told: ExecResult = await box.exec(Command("cat /proc/1/environ"))
    assert "LD_PRELOAD" not in told.stdout, told
    assert "LD_PRELOAD" in await ran(box, "env")
    await box.stop()
    assert list(base.iterdir()) == [], "sandboxes are left"


async def check_cancelled(image: str, base: Path) -> None:
    """Starts that are cancelled at any moment leave nothing."""
    boxes = Boxes(image, base)
    for milliseconds in (0, 1, 5, 20, 40, 80, 160):
        box = LocalSandbox(f"at {milliseconds}", boxes.spec, kind_named(""), base, ProcessAccounting())
        starting = asyncio.ensure_future(box.start())
        await asyncio.sleep(milliseconds / 1000)
        starting.cancel()
        await asyncio.wait({starting})
        await box.stop()
    await (await boxes.started("last")).stop()
    assert list(base.iterdir()) == [], "sandboxes are left"


async def check_fifty(image: str, base: Path) -> float:
    """Fifty sandboxes at once, each with files of its own; returns the seconds until all had started."""
    boxes = Boxes(image, base)
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    made = await asyncio.gather(*(boxes.started(f"box {number}") for number in range(50)))
    took_s = loop.time() - before_s
    write = "cat /app/number 2>/dev/null; echo {0} > number; rm suite.py; touch only{0}"
    told = await asyncio.gather(*(ran(box, write.format(number)) for number, box in enumerate(made)))
    assert set(told) == {""}
    files = await asyncio.gather(*(ran(box, "cat number; ls /app") for box in made))
    for number, listed in enumerate(files):
        assert sorted(listed.split()) == sorted([str(number), "lib", "number", f"only{number}"]), listed
    await asyncio.gather(*(box.stop() for box in made))
    return took_s


if __name__ == "__main__":
    os.umask(0o077)
    image, base, user = sys.argv[1:]
    asyncio.run(asyncio.wait_for(check_image(image, Path(base), user), 200))
    print(json.dumps({"euid": os.geteuid()}))
