"""One table of attacks against every kind of sandbox, as root and as an ordinary user.

Every row of `worlds/sandbox_attacks.py` says here what must come of it. What a weak kind does not promise
(`docs/sandbox.md`) is not asked of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import sandbox_attacks
from worlds.image_files import ImageFiles, layer_of, small_root

import heddle_dask

NOBODY = 65534
ENCLOSED = ("python bubblewrap", "bubblewrap", "image", "remote")
KINDS = (*ENCLOSED, "python weak", "process")
WORKS = {"filter_is_on", "no_new_privileges", "locks_and_pools"}
# Files and processes of the machine: those that a weak kind shares with its user.
OF_THE_MACHINE = {
    *("file_of_host", "system_of_host", "facts_of_host_process", "process_of_host", "loopback_of_host"),
    *("abstract_socket_of_host", "fill_shared_memory", "write_devices", "home_of_root"),
}
# Its own files, and its own root, which has no right outside.
OF_AN_IMAGE = {"write_usr", "write_etc", "write_root", "become_root"}
# A fork bomb of a user without a user id of its own is only watched, and `kill -1` would reach this test.
NEEDS_OWN_IDS = {"fork_bomb", "kill_all", "shared_memory", "files_in_shared_memory"}
ENDED_BY = {
    "fork_bomb": {"processes"},
    "memory_of_one": {"memory", "error"},  # the kernel refuses it: MemoryError
    "memory_of_four": {"memory"},
    "memory_shared_by_nobody": {"memory"},
    "memory_of_a_dead_first_thread": {"memory"},
    "memory_unreadable": {"memory"},
    "shared_memory": {"memory"},
    "files_in_shared_memory": {"disk", "files"},
    "disk": {"disk", "files"},
    "deleted_files": {"disk", "files"},
    "number_of_files": {"disk", "files"},
    "output": {"", "output"},
    "leavings": {""},
    "deep": {"", "disk", "files"},
    "kill_all": {"error", ""},
    "stubborn": {"timeout"},
}


@pytest.fixture(scope="module")
def readable() -> Iterator[Path]:
    """A copy of the package and of the attacks that every user can read, with a directory for sandboxes."""
    place = Path(tempfile.mkdtemp(prefix="heddle-attacks-"))
    package = Path(heddle_dask.__file__).parent
    for name in ("core", "isolation", "sandbox", "sandbox_service"):
        shutil.copytree(package / name, place / "heddle_dask" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "http_client.py"):
        if (package / name).exists():
            shutil.copy(package / name, place / "heddle_dask" / name)
    shutil.copy(sandbox_attacks.__file__, place)
    root = small_root(place / "root", with_extensions=True)
    ImageFiles([layer_of(root)], {"WorkingDir": "/home/agent"}).docker_tar(place / "image.tar")
    shutil.rmtree(root)
    subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)
    yield place
    shutil.rmtree(place)


@contextlib.contextmanager
def facts_of_host(place: Path) -> Iterator[dict[str, Any]]:
    """What must not be reached: a port, an abstract socket, a file and a process of this machine."""
    secret = place / "secret"
    secret.write_text("x")
    abstract = f"\0heddle-attack-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(abstract)
        local.listen()
        yield {
            "port": server.getsockname()[1],
            "abstract": abstract,
            "secret": str(secret),
            "pid": os.getpid(),
        }


def interpreter_of(user: str) -> tuple[list[str], str]:
    """The start of a command line as that user, and the folder with aiohttp; skips where there is no such user."""
    packages = str(Path(pytest.__file__).parents[1])
    if user == "root":
        if os.geteuid():
            pytest.skip("needs root")
        return [sys.executable], packages
    if os.geteuid():
        return [sys.executable], packages
    setpriv = shutil.which("setpriv")
    change = [str(setpriv), "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    for python in (sys.executable, "/usr/bin/python3"):
        # setpriv itself may start a program that its user may not start again.
        checks = f"import os, sys, aiohttp; assert sys.version_info[:2] == {sys.version_info[:2]}"
        checks += "; assert os.access(sys._base_executable, os.X_OK)"
        tried = subprocess.run([*change, python, "-c", checks], env={"PYTHONPATH": packages}, capture_output=True)
        if setpriv and tried.returncode == 0:
            return [*change, python], packages
    pytest.skip("no Python that another user can run")


@pytest.mark.parametrize("user", ["root", "ordinary"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_attack_comes_to_nothing(kind: str, user: str, readable: Path) -> None:
    if kind in ENCLOSED and not shutil.which("bwrap"):
        pytest.skip("no bwrap")
    if kind == "python weak" and user != "root":
        pytest.skip("this mode starts no process at all: `test_sandbox.py` has its promises")
    start, packages = interpreter_of(user)
    boxes = readable / f"{kind} {user}".replace(" ", "-")
    temporary = readable / f"tmp {user}".replace(" ", "-") if kind == "image" else boxes
    for place in {boxes, temporary}:
        place.mkdir(mode=0o711)
        if user != "root" and os.geteuid() == 0:
            os.chown(place, NOBODY, NOBODY)
    own_ids = kind in ENCLOSED or user == "root"
    skipped = set() if kind in ENCLOSED else NEEDS_OWN_IDS - ({"fork_bomb", "kill_all"} if own_ids else set())
    with facts_of_host(readable) as facts:
        done = subprocess.run(
            [
                *start,
                str(readable / "sandbox_attacks.py"),
                kind,
                str(boxes),
                json.dumps({**facts, "skipped": sorted(skipped)}),
            ],
            env={
                "PYTHONPATH": f"{readable}:{packages}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PATH": "/usr/bin:/bin",
                "TMPDIR": str(temporary),
                "HEDDLE_ATTACK_SECRET": "x",
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    came = json.loads(done.stdout.splitlines()[-1])
    check_probes(came.pop("probes"), kind)
    for name in ENDED_BY.keys() - skipped:
        ended, text = came.pop(name)
        assert ended in ENDED_BY[name], (name, ended, text[-300:])
        assert len(text) < 2 * sandbox_attacks.OUTPUT + 200, name
    if not kind.startswith("python "):
        check_services(came)
    assert not list(boxes.iterdir()), "what they left is gone"


def check_probes(came: dict[str, str], kind: str) -> None:
    done = {name for name, result in came.items() if result == "done"}
    assert done >= WORKS, came
    allowed = OF_AN_IMAGE if kind == "image" else set() if kind in ENCLOSED else OF_THE_MACHINE
    assert done - WORKS <= allowed, came


def check_services(came: dict[str, Any]) -> None:
    assert came.pop("directories") == []
    assert came.pop("links") == 4, "a link or a pipe was followed"
    assert came.pop("states of services between actions") == ["T"] and came.pop("services")
    assert came.pop("services over their memory") == 0
    assert came.pop("disk of a service") == "disk"
    assert came.pop("the command after it") == "fine\n"
    assert set(came.values()) == {"clean"}, came
