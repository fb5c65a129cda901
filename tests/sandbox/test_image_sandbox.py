"""Sandboxes of an image that is made here: a test suite runs in it, as root and as an ordinary user; fifty at once."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import image_suite
from worlds.image_files import ImageFiles, layer, layer_of, member, small_root

from benchmarks.sandboxes import rows
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.program_sandbox import sandbox_spec
from heddle_dask.sandbox.images import writable_layer
from heddle_dask.sandbox.stateful.contract import SandboxSpec
from heddle_dask.sandbox.stateful.work_directory import reap

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap")


@pytest.fixture(scope="module")
def image() -> Iterator[ImageFiles]:
    """Two layers: the second deletes a file of the first."""
    with tempfile.TemporaryDirectory() as folder:
        base = layer_of(small_root(Path(folder, "root")))
    accounts = b"root:x:0:0::/root:/bin/sh\nagent:x:1234:77::/home/agent:/bin/sh\n"
    first = [member("app/old.py", b"1"), member("app/lib/module.py", b"1"), member("etc/passwd", accounts)]
    second = [member("app/.wh.old.py"), member("app/suite.py", image_suite.SUITE)]
    variables = ["FLAVOUR=plain = good", "LD_PRELOAD=/evil.so", "PATH=/bin"]
    yield ImageFiles([base, layer(first), layer(second)], {"Env": variables, "WorkingDir": "/app"})


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files through which every user may pass."""
    path = Path(tempfile.mkdtemp(prefix="heddle-test-images-"))
    path.chmod(0o711)
    (path / "boxes").mkdir()
    (path / "boxes").chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("way", ["overlay", "copy"])
def test_a_suite_runs_in_an_image(way: str, image: ImageFiles, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "copy":
        monkeypatch.setattr(writable_layer, "_HOLD", "echo no overlay here")
    source = image.docker_tar(public / "image.tar")
    asyncio.run(asyncio.wait_for(image_suite.check_image(str(source), public / "boxes", "0 0 /root"), 200))


def test_its_user_is_obeyed_in_the_oci_form(image: ImageFiles, public: Path) -> None:
    settings = {**image.settings, "User": "agent"}
    source = ImageFiles(image.layers, settings).layout(public / "layout")
    asyncio.run(asyncio.wait_for(image_suite.check_image(str(source), public / "boxes", "1234 77 /home/agent"), 200))


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are those of an ordinary user")
def test_an_ordinary_user_has_the_same(image: ImageFiles, public: Path) -> None:
    python = shutil.which("python3", path="/usr/bin")
    found = [] if python is None else [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if not found or subprocess.run(found).returncode:
        pytest.skip("no Python that every user can execute")
    # What an ordinary user can read: the checkout may lie in a folder of root.
    for name in ("__init__.py", "core", "isolation", "sandbox"):
        copied = public / "code" / "heddle_dask" / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if name[0] != "_" else shutil.copy)(REPOSITORY / "heddle_dask" / name, copied)
    shutil.copy(REPOSITORY / "tests" / "worlds" / "image_suite.py", public / "code")
    source = image.layout_tar(public / "image.tar")
    subprocess.run(["chmod", "-R", "a+rX", public / "code", source], check=True)
    home = public / "home"
    home.mkdir()
    os.chown(home, 12345, 12345)
    (home / "boxes").mkdir()
    os.chown(home / "boxes", 12345, 12345)
    program = [*writable_layer.as_user(12345), str(python), str(public / "code" / "image_suite.py")]
    done = subprocess.run(
        [*program, str(source), str(home / "boxes"), "0 0 /root"],
        env={"TMPDIR": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(public / "code"), "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"euid": 12345}


def test_a_start_that_is_cancelled_leaves_nothing(image: ImageFiles, public: Path) -> None:
    source = image.docker_tar(public / "image.tar")
    asyncio.run(asyncio.wait_for(image_suite.check_cancelled(str(source), public / "boxes"), 200))


def test_fifty_sandboxes_have_layers_of_their_own(image: ImageFiles, public: Path) -> None:
    source = image.docker_tar(public / "image.tar")
    took_s = asyncio.run(asyncio.wait_for(image_suite.check_fifty(str(source), public / "boxes"), 200))
    print(f"50 sandboxes had started after {took_s:.1f} s", file=sys.stderr)
    assert list((public / "boxes").iterdir()) == []


_LIVES = """
import asyncio, sys
from pathlib import Path
from heddle_dask.sandbox.stateful.contract import Command
from worlds.image_suite import Boxes
async def main():
    box = await Boxes(sys.argv[1], Path(sys.argv[2])).started("one")
    print(box._files.layer.enter()[-3], flush=True)
    await box.exec(Command("sleep 600"))
asyncio.run(main())
"""


def test_nothing_is_left_of_a_worker_that_is_killed(image: ImageFiles, public: Path) -> None:
    source = image.docker_tar(public / "image.tar")
    program = [sys.executable, "-c", _LIVES, str(source), str(public / "boxes")]
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(public)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=environment, text=True) as worker:
        assert worker.stdout is not None
        spaces = Path(worker.stdout.readline().partition("=")[2].strip()).parent  # /proc/PID/ns
        assert spaces.exists()
        worker.kill()
    for _ in range(1000):
        if not spaces.exists():
            break
        time.sleep(0.01)
    assert not spaces.exists(), "the process that holds the layer lives on"
    assert len(reap(public / "boxes")) == 1 and list((public / "boxes").iterdir()) == []


def test_a_benchmark_tells_how_long_sandboxes_take(image: ImageFiles, public: Path) -> None:
    machine, of_image = rows(image.docker_tar(public / "image.tar"), 2, 3)
    assert (machine.of, machine.image_bytes, of_image.of) == ("machine", 0, "image")
    assert of_image.image_bytes > 1 << 20 and 0 < of_image.start_s <= of_image.longest_start_s
    assert of_image.unpack_s > 0 and of_image.all_started_s > 0


def test_what_cannot_go_together_is_told() -> None:
    with pytest.raises(BadInput, match="an image has a root of its own"):
        SandboxSpec(image="/i.tar", root="/r")
    with pytest.raises(BadInput, match="an image has a root of its own"):
        SandboxSpec(image="/i.tar", kind="process")
    spec = sandbox_spec("", "i.tar", "", {"/opt/x": "1", "y": b"2"}, [], "1 GiB", "1 GiB", False)
    assert spec.image == str(Path.cwd() / "i.tar") and spec.files == {"/opt/x": b"1", "y": b"2"}
    with pytest.raises(BadInput, match="give a path in the image"):
        sandbox_spec("", "i.tar", "", {"../x": "1"}, [], "1 GiB", "1 GiB", False)
