"""``heddle top`` as its users run it: beside a rollout, in a terminal, in a script, and where nobody answers."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle_dask.cli.main import main
from heddle_dask.cli.top import watch

HANG_S = 120.0
Answer = Callable[..., subprocess.CompletedProcess[str]]
MAIN = [sys.executable, "-c", "from heddle_dask.cli.main import main; main()"]
AGENTS = """
import asyncio

from heddle_dask.environments.base import Task


def tasks(count, seed):
    return [Task(f"t{number}", f"Task {number}.") for number in range(count)]


async def solve(task, ctx):
    ctx.append("user", task.prompt)
    for step in range(2000):
        await ctx.generate(max_tokens=1, ignore_eos=True)
        await asyncio.sleep(0.1)
"""


def answer(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAIN, "top", *map(str, arguments)], cwd=directory, capture_output=True, text=True, timeout=HANG_S
    )


@pytest.fixture
def answered_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Answer:
    """The whole command in this process: to start one takes seconds."""
    caplog.set_level(logging.ERROR, "distributed")  # the command sets it; this one is undone after the test
    monkeypatch.chdir(tmp_path)

    def answered(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["heddle", "top", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(sys.argv, ended.value.code, *capsys.readouterr())

    return answered


@pytest.fixture
def rollout(tmp_path: Path, model_dir: str) -> Iterator[subprocess.Popen[bytes]]:
    """A rollout that lasts until it is interrupted."""
    (tmp_path / "agents.py").write_text(AGENTS)
    options = [
        "--engine",
        "emulated",
        "--model",
        model_dir,
        "--env",
        "agents:solve",
        "--out",
        "runs/run.zarr",
    ]
    options += ["--tasks", "3", "--samples", "1", "--max-steps", "2000", "--no-dashboard", "--tool-cpus", "2"]
    with open(tmp_path / "said.txt", "wb") as said:
        process = subprocess.Popen([*MAIN, "rollout", *options], cwd=tmp_path, stdout=said, stderr=said)
    yield process
    process.send_signal(signal.SIGINT)
    process.wait(timeout=HANG_S)


def watched(directory: Path, process: subprocess.Popen[bytes], answered: Answer) -> dict[str, Any]:
    """The first picture in which trajectories are alive."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        assert process.poll() is None, (directory / "said.txt").read_text()
        said = answered("--once", "--json")
        if said.returncode == 0:
            picture: dict[str, Any] = json.loads(said.stdout)
            if picture["counts"]["steps"]:
                return picture
        else:  # the cluster starts
            assert said.returncode == 2 and len(said.stderr.splitlines()) == 1, said.stderr
        time.sleep(0.2)
    raise AssertionError("no trajectory in a picture")


@pytest.mark.cluster
@pytest.mark.slow
def test_top_beside_a_rollout(
    tmp_path: Path,
    rollout: subprocess.Popen[bytes],
    answered_here: Answer,
) -> None:
    picture = watched(tmp_path, rollout, answered_here)
    assert picture["is_open"] and picture["counts"]["live"] == 3 and len(picture["engines"]) == 1
    (connection,) = (tmp_path / "runs").glob("run.logs/session-1/connection.json")
    assert stat.S_IMODE(connection.stat().st_mode) == 0o600
    assert "PRIVATE KEY" not in connection.read_text()
    assert "watch it with: heddle top runs/run.zarr" in (tmp_path / "said.txt").read_text()

    once = answer(tmp_path, "runs/run.zarr", "--once")
    assert once.returncode == 0 and "Traceback" not in once.stderr
    lines = once.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and any(line.startswith("t0") for line in lines), once.stdout

    told = json.loads(connection.read_text())
    without_key = answered_here("--scheduler", told["address"], "--once")
    assert (without_key.returncode, len(without_key.stderr.splitlines())) == (2, 1)
    assert "needs TLS credentials" in without_key.stderr

    in_a_terminal(tmp_path)

    rollout.send_signal(signal.SIGINT)
    rollout.wait(timeout=HANG_S)
    assert not connection.exists()
    gone = answered_here("runs/run.zarr")
    assert (gone.returncode, len(gone.stderr.splitlines())) == (2, 1)
    assert "no rollout to runs/run.zarr" in gone.stderr


def in_a_terminal(directory: Path) -> None:
    """It draws on the alternate screen, again and again, and gives the terminal back at Ctrl-C."""
    terminal, other = pty.openpty()
    # A session leader that opens a terminal is controlled by it: Ctrl-C then is a signal.
    shell = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>"$0"', os.ttyname(other)]
    process = subprocess.Popen(
        [*shell, *MAIN, "top", "runs/run.zarr", "--interval", "0.2"],
        cwd=directory,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        start_new_session=True,
    )
    seen = b""
    try:
        seen = until_seen(terminal, seen, lambda text: len(set(offsets_in(text))) >= 2)
        os.write(terminal, b"\x03")
        seen = until_seen(terminal, seen, lambda text: "\x1b[?1049l" in text)
        code = process.wait(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()
        os.close(other)
        os.close(terminal)
    text = seen.decode(errors="replace")
    assert code == 0, text
    assert "Traceback" not in text
    assert text.index("\x1b[?1049h") < text.index("heddle top") < text.rindex("\x1b[?1049l")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"
    assert offsets_in(text) == sorted(offsets_in(text))


def offsets_in(text: str) -> list[int]:
    """The journal offsets of the pictures in it."""
    return [int(found.replace(",", "")) for found in re.findall(r"journal line ([\d,]+)", text)]


def until_seen(terminal: int, seen: bytes, enough: Callable[[str], bool]) -> bytes:
    deadline = time.monotonic() + HANG_S
    while not enough(seen.decode(errors="replace")):
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # the program has ended
                break
    return seen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no rollout with a cluster of its own runs in runs/"),
        (["run.zarr"], "no rollout to run.zarr"),
        (["run.zarr", "--scheduler", "tcp://127.0.0.1:1"], "exclude each other"),
        (["--scheduler", "http://127.0.0.1:1"], "neither tcp:// nor tls://"),
        (["--scheduler", "tcp://127.0.0.1"], "is no address of a scheduler"),
        (["--scheduler-file", "missing.json"], "cannot read the scheduler's address from missing.json"),
        (["--scheduler-file", "list.json"], "names no address"),
        (["--scheduler-file", "text.json"], "it is no JSON"),
        (["--interval", "0"], "interval"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    arguments: list[str],
    said: str,
    answered_here: Answer,
) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "text.json").write_text("address")
    answered = answered_here(*arguments)
    assert (answered.returncode, answered.stdout) == (2, "")
    assert len(answered.stderr.splitlines()) == 1 and said in answered.stderr, answered.stderr


def test_where_nobody_answers_it_is_one_line(answered_here: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "CONNECT_TIMEOUT_S", 1.0)
    with socket.socket() as listener:  # a port that is taken, and no scheduler
        listener.bind(("127.0.0.1", 0))
        answered = answered_here("--scheduler", f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    assert (answered.returncode, answered.stdout) == (2, "")
    assert len(answered.stderr.splitlines()) == 1 and "no Dask scheduler answers at" in answered.stderr


@pytest.mark.cluster
def test_a_scheduler_without_the_plugin_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    command = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
    command += ["--no-dashboard", "--scheduler-file", str(file)]
    scheduler = subprocess.Popen([sys.executable, "-m", "dask", *command], cwd=tmp_path)
    try:
        deadline = time.monotonic() + HANG_S
        while not (file.exists() and file.read_text().endswith("}")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answered = answer(tmp_path, "--scheduler-file", file, "--once")
    finally:
        scheduler.terminate()
        scheduler.wait(timeout=HANG_S)
    assert (answered.returncode, answered.stdout) == (2, "")
    assert len(answered.stderr.splitlines()) == 1 and "has no heddle plugin" in answered.stderr, answered.stderr
