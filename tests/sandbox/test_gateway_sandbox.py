"""A sandbox whose only network is a gateway: with the machine's tools and an image, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import gateway_suite
from worlds.image_files import ImageFiles, layer_of, small_root

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.sandbox.images import writable_layer
from heddle_dask.sandbox.process_accounting import ProcessAccounting
from heddle_dask.sandbox.stateful.contract import Command, SandboxSpec
from heddle_dask.sandbox.stateful.kinds import ProcessKind, kind_named
from heddle_dask.sandbox.stateful.local_sandbox import LocalSandbox

REPOSITORY = Path(__file__).parents[2]
needs_bwrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap")


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files through which every user may pass."""
    path = Path(tempfile.mkdtemp(prefix="heddle-test-gateway-"))
    path.chmod(0o711)
    (path / "boxes").mkdir()
    (path / "boxes").chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """An archive that every user can read."""
    folder = Path(tempfile.mkdtemp(prefix="heddle-test-image-"))
    folder.chmod(0o711)
    base = layer_of(small_root(folder / "root", with_extensions=True))
    archive = ImageFiles([base], {"WorkingDir": "/tmp"}).docker_tar(folder / "image.tar")
    archive.chmod(0o644)
    yield str(archive)
    shutil.rmtree(folder)


@needs_bwrap
@pytest.mark.parametrize("of", ["machine", "image"])
def test_the_gateway_is_the_only_network(of: str, image: str, public: Path) -> None:
    chosen = image if of == "image" else ""
    asyncio.run(asyncio.wait_for(gateway_suite.check_gateway(chosen, public / "boxes"), 200))


@needs_bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are those of an ordinary user")
def test_an_ordinary_user_has_the_same(image: str, public: Path) -> None:
    python = shutil.which("python3", path="/usr/bin")
    found = [] if python is None else [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if not found or subprocess.run(found).returncode:
        pytest.skip("no Python that every user can execute")
    for name in ("__init__.py", "core", "isolation", "sandbox"):
        copied = public / "code" / "heddle_dask" / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if name[0] != "_" else shutil.copy)(REPOSITORY / "heddle_dask" / name, copied)
    shutil.copy(REPOSITORY / "tests" / "worlds" / "gateway_suite.py", public / "code")
    subprocess.run(["chmod", "-R", "a+rX", public / "code"], check=True)
    home = public / "home"
    for folder in (home, home / "boxes"):
        folder.mkdir()
        os.chown(folder, 12345, 12345)
    program = [*writable_layer.as_user(12345), str(python), str(public / "code" / "gateway_suite.py")]
    done = subprocess.run(
        [*program, str(home / "boxes"), "", image],
        env={"TMPDIR": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(public / "code"), "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"euid": 12345}


@needs_bwrap
def test_without_a_gateway_behind_it_connections_close(sandbox_directory: Path) -> None:
    async def run() -> None:
        spec = SandboxSpec(gateway=str(sandbox_directory / "none"))
        box = LocalSandbox("one", spec, kind_named(""), sandbox_directory, ProcessAccounting())
        await box.start()
        ask = 'import socket; print(socket.create_connection(("127.0.0.1", 8911), 20).recv(9))'
        told = await box.exec(Command(f"python3 -c '{ask}'"))
        await box.stop()
        assert told.stdout == "b''\n" or "reset" in told.stderr, told

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_cannot_have_a_gateway_says_why(sandbox_directory: Path) -> None:
    for given in ({"kind": "process"}, {"kind": "remote"}, {"network": True}):
        with pytest.raises(BadInput, match="a gateway is the only network"):
            SandboxSpec(gateway="/run/g", **given)
    with pytest.raises(BadInput, match="use an absolute path"):
        SandboxSpec(folders=("agents",))

    async def start(spec: SandboxSpec, kind: object) -> None:
        box = LocalSandbox("one", spec, kind, sandbox_directory, ProcessAccounting())  # type: ignore[arg-type]
        try:
            await box.start()
        finally:
            await box.stop()

    with pytest.raises(HeddleError, match="install the package bubblewrap"):
        asyncio.run(start(SandboxSpec(gateway="/run/g"), ProcessKind(shutil.which("setpriv"))))
    if shutil.which("bwrap"):
        with pytest.raises(HeddleError, match="no folder /no/such"):
            asyncio.run(start(SandboxSpec(folders=("/no/such",)), kind_named("")))
